"""The implicit state of a model's sequences: outputs of one request that are inputs of the next of its sequence.

Their sequence holds them between the two. A first request has the initial state of the configuration, or zeros, with 1
for each dim that varies. A client is told a state only where the configuration has it among the outputs, too.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import ModelConfig, ModelInput, ModelOutput
from millrace.model_repository.config.model_config import State as Said
from millrace.model_repository.repository.tensor_files import read_tensor
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import shown, wire_name
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import BYTES, DTYPES, Array, objects
from millrace.model_repository.scheduling.sequence_controls import control_type


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """dims: with that of the batch, where the model has one; -1: any"""

    input: str
    output: str
    datatype: str
    dims: tuple[int, ...]
    initial: Array
    is_told: bool  # it is an output of the model, too


def whole(config: ModelConfig) -> ModelConfig:
    """With what a model of sequences has and its clients do not see: its control inputs, its states on both sides."""
    said = config.sequence_batching
    if said is None:
        return config
    controls = [
        replace(empty(ModelInput), name=tensor.name, data_type=control_type(control), dims=(1,))
        for tensor in said.control_input
        for control in tensor.control
    ]
    held = [
        replace(empty(ModelInput), name=state.input_name, data_type=state.data_type, dims=state.dims)
        for state in said.state
    ]
    declared = {output.name for output in config.output}
    made = [
        replace(empty(ModelOutput), name=state.output_name, data_type=state.data_type, dims=state.dims)
        for state in said.state
        if state.output_name not in declared
    ]
    return replace(config, input=(*config.input, *controls, *held), output=(*config.output, *made))


class States:
    """Of one model, whose configuration has sequences; reads files."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        """folder: the model's. raises StatusError"""
        said, outputs = config.sequence_batching, {output.name for output in config.output}
        assert said is not None, config.name
        batch = (1,) if config.max_batch_size else ()
        self._all = [
            _StateTensor(
                state.input_name, state.output_name, wire_name(state.data_type), (*batch, *state.dims),
                _initial(state, folder / "initial_state", batch), state.output_name in outputs,
            )
            for state in said.state
        ]  # fmt: skip
        self._names = tuple(state.output for state in self._all)
        self._vary = [state.input for state in self._all if -1 in state.dims]

    def give(self, request: InferRequest) -> None:
        """It is the next of its sequence: its state, as inputs and as outputs that it asks for."""
        if not self._all:
            return
        sequence = request.sequence
        for state in self._all:
            request.inputs[state.input] = sequence.state.get(state.input, state.initial)
        sequence.asked = request.outputs
        if request.outputs:
            request.outputs += tuple(name for name in self._names if name not in request.outputs)
        if self._vary:  # those of other shapes are not in one batch
            shapes = tuple(request.inputs[name].shape for name in self._vary)
            request.shape_key = request.shape_key, shapes

    def keep(self, request: InferRequest, response: InferResponse) -> InferResponse:
        """What its client is told; the rest is its sequence's state. raises StatusError: that stays as it was"""
        if not self._all:
            return response
        kept, asked = {}, request.sequence.asked
        outputs = dict(response.outputs)
        for state in self._all:
            array = outputs.get(state.output)
            if array is None:
                raise StatusError(Code.INTERNAL, f"{request.named}the model computed no state '{state.output}'")
            _check(request, state, array)
            kept[state.input] = array
            if not state.is_told or (asked and state.output not in asked):
                del outputs[state.output]
        request.sequence.state, request.outputs = kept, asked
        return InferResponse(outputs, response.parameters)


def _check(request: InferRequest, state: _StateTensor, array: Array) -> None:
    """raises StatusError where it is no state for the next request"""
    fits = len(array.shape) == len(state.dims) and all(
        s in (-1, d) for s, d in zip(state.dims, array.shape, strict=True)
    )
    if fits and array.dtype == DTYPES[state.datatype]:
        return
    raise StatusError(
        Code.INTERNAL,
        f"{request.named}state '{state.output}' has shape {shown(array.shape)} of {array.dtype}, expected "
        f"{shown(state.dims)} of {state.datatype}",
    )


def _initial(state: Said, folder: Path, batch: tuple[int, ...]) -> Array:
    """Of a first request. raises StatusError"""
    said = state.initial_state[0] if state.initial_state else None
    dims = said.dims if said is not None else tuple(1 if dim == -1 else dim for dim in state.dims)
    datatype = wire_name(state.data_type)
    if said is not None and said.data_file:
        array = read_tensor(folder / said.data_file, datatype, prod(dims))
    elif datatype == BYTES:
        array = objects([b""] * prod(dims))
    else:
        array = np.zeros(prod(dims), DTYPES[datatype])
    array = array.reshape((*batch, *dims))
    array.flags.writeable = False
    return array
