"""What a sequence's model is told beside a request's own inputs: the control tensors of its configuration.

START, END and READY have the two values that the configuration gives them, CORRID is the sequence's id. A slot of a
batch that has nothing to compute is filled with a request like the others, of zeros, in which READY is false.
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


class Controls:
    """Of one model, whose configuration has sequences."""

    def __init__(self, config: ModelConfig) -> None:
        said = config.sequence_batching
        assert said is not None, config.name
        self._shape = (1, 1) if config.max_batch_size else (1,)
        self._corrid: tuple[str, DataType] | None = None
        self._switches: list[tuple[str, ControlKind, tuple[Array, Array]]] = []  # their values, false and true
        for tensor in said.control_input:
            for control in tensor.control:
                if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
                    self._corrid = tensor.name, control.data_type
                else:
                    self._switches.append((tensor.name, control.kind, _values(control, self._shape)))

    def check(self, id_: Id) -> None:
        """raises StatusError where the model cannot be told of it"""
        if self._corrid is None or self._corrid[1] is DataType.TYPE_STRING:
            return
        name, data_type = self._corrid
        if isinstance(id_, str):
            raise invalid(f"sequence id '{id_}' is a string, and control input '{name}' is {data_type.name}")
        room = np.iinfo(DTYPES[wire_name(data_type)])
        if not room.min <= id_ <= room.max:
            raise invalid(f"sequence id {id_} does not fit into control input '{name}' of {data_type.name}")

    def give(self, request: InferRequest) -> None:
        """Its control inputs; those of a request that is given them again are those of now."""
        for name, kind, values in self._switches:
            request.inputs[name] = values[bool(request.flags & _FLAGS[kind]) if kind in _FLAGS else True]
        self._give_id(request, request.correlation_id)

    def null(self, like: InferRequest) -> InferRequest:
        """What stands in an empty slot beside `like`, and is answered to nobody."""
        found = like.copied({name: _zeros(array) for name, array in like.inputs.items()})
        found.correlation_id, found.flags, found.send_by = 0, 0, lambda *_: None
        found.inputs.update({name: values[False] for name, _, values in self._switches})
        self._give_id(found, 0)
        return found

    def _give_id(self, request: InferRequest, id_: Id) -> None:
        if self._corrid is None:
            return
        name, data_type = self._corrid
        if data_type is DataType.TYPE_STRING:
            array = objects([(str(id_) if id_ else "").encode()])
        else:
            array = np.array([id_], DTYPES[wire_name(data_type)])
        request.inputs[name] = array.reshape(self._shape)


def control_type(control: Control) -> DataType:
    """Of its tensor."""
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return DataType.TYPE_INT32
    return DataType.TYPE_FP32 if control.fp32_false_true else DataType.TYPE_BOOL


def _values(control: Control, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Of false and of true, which requests share."""
    false, true = control.int32_false_true or control.fp32_false_true or control.bool_false_true
    datatype = wire_name(control_type(control))
    return _constant(false, datatype, shape), _constant(true, datatype, shape)


def _constant(value: float, datatype: str, shape: tuple[int, ...]) -> Array:
    array = np.full(shape, value, DTYPES[datatype])
    array.flags.writeable = False
    return array


def _zeros(like: Array) -> Array:
    if like.dtype != DTYPES[BYTES]:
        return np.zeros_like(like)
    return objects([b""] * like.size).reshape(like.shape)
