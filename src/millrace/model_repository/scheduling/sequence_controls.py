"""Control inputs of a sequence: the control tensors that are added to a request's own inputs.

START, END and READY take one of two configured values; CORRID is the sequence's id. An empty slot of a batch is filled
with a null request: zeros of the other requests' shapes, with READY set to false.
"""

import numpy as np

from millrace.model_repository.config.enums import ControlKind, DataType
from millrace.model_repository.config.model_config import Control, ModelConfig
from millrace.model_repository.request.infer_request import END, START, InferRequest
from millrace.model_repository.request.request_validation import wire_name
from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.request.tensors import BYTES, DTYPES, Array, objects

_FLAGS = {ControlKind.CONTROL_SEQUENCE_START: START, ControlKind.CONTROL_SEQUENCE_END: END}
Id = int | str


class SequenceControls:
    """Control inputs of one model with sequence batching."""

    def __init__(self, config: ModelConfig) -> None:
        batching = config.sequence_batching
        assert batching is not None, config.name
        self._shape = (1, 1) if config.max_batch_size else (1,)
        self._corrid: tuple[str, DataType] | None = None
        self._switches: list[tuple[str, ControlKind, tuple[Array, Array]]] = []  # with their values for false and true
        for tensor in batching.control_input:
            for control in tensor.control:
                if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
                    self._corrid = tensor.name, control.data_type
                else:
                    self._switches.append((tensor.name, control.kind, _values(control, self._shape)))

    def check(self, id_: Id) -> None:
        """Check that the sequence id fits the CORRID input. raises StatusError"""
        if self._corrid is None or self._corrid[1] is DataType.TYPE_STRING:
            return
        name, data_type = self._corrid
        if isinstance(id_, str):
            raise invalid(f"sequence id '{id_}' is a string, and control input '{name}' is {data_type.name}")
        room = np.iinfo(DTYPES[wire_name(data_type)])
        if not room.min <= id_ <= room.max:
            raise invalid(f"sequence id {id_} does not fit into control input '{name}' of {data_type.name}")

    def add_inputs(self, request: InferRequest) -> None:
        """Set the control inputs of a request, replacing earlier ones."""
        for name, kind, values in self._switches:
            request.inputs[name] = values[bool(request.flags & _FLAGS[kind]) if kind in _FLAGS else True]
        self._add_id(request, request.correlation_id)

    def null_request(self, template: InferRequest) -> InferRequest:
        """Return a null request with the shapes of `template`; its responses are dropped."""
        request = template.copy_with({name: _zeros(array) for name, array in template.inputs.items()})
        request.correlation_id, request.flags, request.send_by = 0, 0, lambda *_: None
        request.inputs.update({name: values[False] for name, _, values in self._switches})
        self._add_id(request, 0)
        return request

    def _add_id(self, request: InferRequest, id_: Id) -> None:
        if self._corrid is None:
            return
        name, data_type = self._corrid
        if data_type is DataType.TYPE_STRING:
            array = objects([(str(id_) if id_ else "").encode()])
        else:
            array = np.array([id_], DTYPES[wire_name(data_type)])
        request.inputs[name] = array.reshape(self._shape)


def control_type(control: Control) -> DataType:
    """Return the data type of a control's tensor."""
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return DataType.TYPE_INT32
    return DataType.TYPE_FP32 if control.fp32_false_true else DataType.TYPE_BOOL


def _values(control: Control, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the shared arrays for false and true."""
    false, true = control.int32_false_true or control.fp32_false_true or control.bool_false_true
    datatype = wire_name(control_type(control))
    return _constant(false, datatype, shape), _constant(true, datatype, shape)


def _constant(value: float, datatype: str, shape: tuple[int, ...]) -> Array:
    array = np.full(shape, value, DTYPES[datatype])
    array.flags.writeable = False
    return array


def _zeros(template: Array) -> Array:
    if template.dtype != DTYPES[BYTES]:
        return np.zeros_like(template)
    return objects([b""] * template.size).reshape(template.shape)
