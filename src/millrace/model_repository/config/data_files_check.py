"""Checks of data in a configuration: initial states of sequences, and warm-up inputs.

Triton finds these mistakes when it creates the data. Here they are rules with Triton's messages, so that they are
reported with their place before anything runs.
"""

from collections.abc import Iterator

from millrace.model_repository.config.config_rules import VARIABLE, RuleViolation
from millrace.model_repository.config.enums import DataType, item_bytes
from millrace.model_repository.config.model_config import InitialState, ModelConfig, State, WarmupInput
from millrace.model_repository.config.pbtxt_binder import Path_

MAX_BYTES = 1 << 30  # of one tensor


def data_violations(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from _states(config)
    for i, warmup in enumerate(config.model_warmup):
        if warmup.batch_size > max(1, config.max_batch_size):
            message = f"warmup sample '{warmup.name}' has a batch size of {warmup.batch_size}"
            expected = f"at most {max(1, config.max_batch_size)}, by max_batch_size"
            yield RuleViolation(("model_warmup", i, "batch_size"), message, expected, "correct it")
        for key, tensor in warmup.inputs.items() if warmup.batch_size else ():
            yield from _warmup(("model_warmup", i, "inputs", key), key, tensor)


def short_file(tensor: InitialState | WarmupInput, name: str, n_there: int) -> str | None:
    """Return why a file of `n_there` bytes is too short, or None; files of strings are not checked here."""
    expected = _bytes(tensor.data_type, tensor.dims)
    if tensor.data_type is DataType.TYPE_STRING or expected <= n_there:
        return None
    only = f"only has {n_there} bytes"
    if isinstance(tensor, InitialState):
        return f"initial_state setting expects {expected} bytes, but the data provided from {name} {only}."
    return f"warmup setting expects {expected} bytes, but the data provided from {name} {only}"


def _states(config: ModelConfig) -> Iterator[RuleViolation]:
    batching = config.sequence_batching
    input_names: set[str] = set()
    for i, state in enumerate(batching.state if batching else ()):
        path: Path_ = ("sequence_batching", "state", i)
        if not state.input_name or not state.output_name or state.data_type is DataType.TYPE_INVALID:
            message = (
                f"sequence batching state must specify 'input_name', 'output_name' and 'data_type' for {config.name}"
            )
            yield RuleViolation(path, message, "the names of two tensors of the model, and their type", "add them")
        elif state.input_name in input_names:
            message = f"State input name '{state.input_name}' specified more than once."
            yield RuleViolation((*path, "input_name"), message, "each name once", "rename or remove one")
        input_names.add(state.input_name)
        yield from _dims(path, f"state '{state.input_name}'", state.dims, state.data_type)
        if len(state.initial_state) > 1:
            n = len(state.initial_state)
            message = (
                f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element."
            )
            yield RuleViolation(
                (*path, "initial_state"), f"{message} Found '{n}' elements.", "one, or none", "remove the others"
            )
        for j, initial in enumerate(state.initial_state[:1]):
            yield from _initial((*path, "initial_state", j), state, initial)
    if batching and batching.state and config.model_transaction_policy and config.model_transaction_policy.decoupled:
        message = f"states of a decoupled model, {config.name}, are not supported yet"
        fix = "a model that answers each request once, or that holds its state itself"
        yield RuleViolation(("sequence_batching", "state"), message, "no state", fix)


def _initial(path: Path_, state: State, initial: InitialState) -> Iterator[RuleViolation]:
    name = state.input_name
    yield from _dims(path, f"the initial state of '{name}'", initial.dims, initial.data_type)
    if initial.data_type is not state.data_type:
        message = f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        yield RuleViolation(path, message, state.data_type.name, f"data_type: {state.data_type.name}")
    if not initial.name:
        message = f"Field 'name' must be set when using initial_state for state input '{name}'."
        yield RuleViolation(path, message, "any name", 'add name: "..."')
    if not initial.zero_data and not initial.data_file:
        message = f"initial_state setting expects state'{name}' to have state_data set"
        yield RuleViolation(path, message, "zero_data: true or data_file", "add one of them")
    if len(initial.dims) != len(state.dims):
        message = "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input"
        n_both = f"{len(initial.dims)} != {len(state.dims)}"
        yield RuleViolation(path, f"{message} '{name}'. {n_both}", "as many as state has", "correct dims")
        return
    for k, (ours, theirs) in enumerate(zip(initial.dims, state.dims, strict=True)):
        if ours == VARIABLE:
            message = f"'initial_state' field for state input name '{name}' contains variable dimensions."
            yield RuleViolation((*path, "dims", k), message, "1 or more", "say how many elements the first state has")
        elif theirs not in (VARIABLE, ours):
            message = (
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {ours} != {theirs}"
            )
            yield RuleViolation((*path, "dims", k), message, f"{theirs}", "correct one of them")


def _warmup(path: Path_, name: str, tensor: WarmupInput) -> Iterator[RuleViolation]:
    if VARIABLE in tensor.dims:
        message = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        yield RuleViolation(path, message, "dims of 1 or more", "say how large they are")
    if not (tensor.zero_data or tensor.random_data or tensor.input_data_file):
        message = f"warmup setting expects input '{name}' to have input_data_type set"
        yield RuleViolation(path, message, "zero_data: true, random_data: true or input_data_file", "add one of them")
    yield from _dims(path, f"the warm-up of input '{name}'", tensor.dims, tensor.data_type)


def _dims(path: Path_, subject: str, dims: tuple[int, ...], data_type: DataType) -> Iterator[RuleViolation]:
    for k, dim in enumerate(dims):
        if dim < 1 and dim != VARIABLE:
            yield RuleViolation((*path, "dims", k), f"{subject} has a dim of {dim}", "1 or more", "correct it")
    if (n_bytes := _bytes(data_type, dims)) > MAX_BYTES:
        yield RuleViolation(path, f"{subject} has {n_bytes} bytes, or more", f"at most {MAX_BYTES}", "correct dims")


def _bytes(data_type: DataType, dims: tuple[int, ...]) -> int:
    """Return the bytes of a tensor, with variable dims as 1; stops counting beyond MAX_BYTES."""
    n_bytes = item_bytes(data_type)
    for dim in dims:
        n_bytes = n_bytes if dim == VARIABLE or n_bytes > MAX_BYTES else n_bytes * max(dim, 0)
    return n_bytes
