"""Implicit state of sequences: outputs of one request that become inputs of the next request of the sequence.

The sequence holds the state between two requests. A first request gets the configured initial state, or zeros with
variable dims of 1. A client receives a state only if the configuration also lists it as an output.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import ModelConfig, ModelInput, ModelOutput
from millrace.model_repository.config.model_config import State as StateConfig
from millrace.model_repository.repository.tensor_files import read_tensor
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import format_shape, wire_name
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import BYTES, DTYPES, Array, objects
from millrace.model_repository.scheduling.sequence_controls import control_type


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """A state. dims: with the batch dimension if the model batches; -1 is any"""

    input: str
    output: str
    datatype: str
    dims: tuple[int, ...]
    initial: Array
    is_output: bool  # also listed as an output of the model


def with_sequence_tensors(config: ModelConfig) -> ModelConfig:
    """Return the configuration with control inputs and states added, which clients of the model do not see."""
    batching = config.sequence_batching
    if batching is None:
        return config
    controls = [
        replace(empty(ModelInput), name=tensor.name, data_type=control_type(control), dims=(1,))
        for tensor in batching.control_input
        for control in tensor.control
    ]
    state_inputs = [
        replace(empty(ModelInput), name=state.input_name, data_type=state.data_type, dims=state.dims)
        for state in batching.state
    ]
    declared = {output.name for output in config.output}
    state_outputs = [
        replace(empty(ModelOutput), name=state.output_name, data_type=state.data_type, dims=state.dims)
        for state in batching.state
        if state.output_name not in declared
    ]
    return replace(config, input=(*config.input, *controls, *state_inputs), output=(*config.output, *state_outputs))


class SequenceStates:
    """Implicit state of one model with sequence batching; reads initial states from files."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        """folder: the model's folder. raises StatusError"""
        batching, outputs = config.sequence_batching, {output.name for output in config.output}
        assert batching is not None, config.name
        batch = (1,) if config.max_batch_size else ()
        self._all = [
            _StateTensor(
                state.input_name, state.output_name, wire_name(state.data_type), (*batch, *state.dims),
                _initial(state, folder / "initial_state", batch), state.output_name in outputs,
            )
            for state in batching.state
        ]  # fmt: skip
        self._names = tuple(state.output for state in self._all)
        self._vary = [state.input for state in self._all if -1 in state.dims]

    def add_inputs(self, request: InferRequest) -> None:
        """Add the state to the inputs and requested outputs of a sequence's next request."""
        if not self._all:
            return
        sequence = request.sequence
        for state in self._all:
            request.inputs[state.input] = sequence.state.get(state.input, state.initial)
        sequence.requested_outputs = request.outputs
        if request.outputs:
            request.outputs += tuple(name for name in self._names if name not in request.outputs)
        if self._vary:  # other shapes must not share a batch
            shapes = tuple(request.inputs[name].shape for name in self._vary)
            request.shape_key = request.shape_key, shapes

    def store(self, request: InferRequest, response: InferResponse) -> InferResponse:
        """Store the new state and return the client's outputs. raises StatusError, keeping the old state"""
        if not self._all:
            return response
        states, requested = {}, request.sequence.requested_outputs
        outputs = dict(response.outputs)
        for state in self._all:
            array = outputs.get(state.output)
            if array is None:
                raise StatusError(Code.INTERNAL, f"{request.error_prefix}the model computed no state '{state.output}'")
            _check(request, state, array)
            states[state.input] = array
            if not state.is_output or (requested and state.output not in requested):
                del outputs[state.output]
        request.sequence.state, request.outputs = states, requested
        return InferResponse(outputs, response.parameters)


def _check(request: InferRequest, state: _StateTensor, array: Array) -> None:
    """Check shape and type of a new state. raises StatusError"""
    fits = len(array.shape) == len(state.dims) and all(
        s in (-1, d) for s, d in zip(state.dims, array.shape, strict=True)
    )
    if fits and array.dtype == DTYPES[state.datatype]:
        return
    raise StatusError(
        Code.INTERNAL,
        f"{request.error_prefix}state '{state.output}' has shape {format_shape(array.shape)} of {array.dtype}, "
        f"expected {format_shape(state.dims)} of {state.datatype}",
    )


def _initial(state: StateConfig, folder: Path, batch: tuple[int, ...]) -> Array:
    """Return the initial state for a first request. raises StatusError"""
    initial = state.initial_state[0] if state.initial_state else None
    dims = initial.dims if initial is not None else tuple(1 if dim == -1 else dim for dim in state.dims)
    datatype = wire_name(state.data_type)
    if initial is not None and initial.data_file:
        array = read_tensor(folder / initial.data_file, datatype, prod(dims))
    elif datatype == BYTES:
        array = objects([b""] * prod(dims))
    else:
        array = np.zeros(prod(dims), DTYPES[datatype])
    array = array.reshape((*batch, *dims))
    array.flags.writeable = False
    return array
