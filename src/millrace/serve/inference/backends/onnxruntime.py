"""`onnxruntime`: a network as ONNX, computed by ONNX Runtime on the CPU; the package is an extra, imported when used.

Each instance has a session of its own. Threads are shared out: so many for each instance that all together have the
cores of this machine, where the configuration's `intra_op_thread_count` says nothing else.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import nearest
from millrace.machine.cpu import usable_cores
from millrace.serve.inference.backend import Batched, InstanceGiven, ModelBackend
from millrace.serve.inference.check import wire_name
from millrace.serve.inference.ragged import Ragged, with_batch_inputs
from millrace.serve.inference.states import whole
from millrace.serve.inference.status import Code, StatusError, invalid
from millrace.serve.kserve.tensors import Array, objects
from millrace.serve.repository.config import DynamicBatching, ModelConfig, ModelInput, ModelOutput, Reshape
from millrace.serve.repository.declare import empty
from millrace.serve.repository.kinds import DataType

DEFAULT_BATCH = 4  # of a model whose configuration says nothing and whose first dimensions are free: Triton's
_MOST_THREADS = 4096
_TYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "STRING",
}  # fmt: skip
_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}  # Triton's
_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_FILE = "model.onnx"
log = logging.getLogger(__name__)


class OnnxRuntimeBackend(ModelBackend):
    takes_ragged = takes_batch_io = True

    def instance(self, given: InstanceGiven) -> "_Network":
        return _Network(given)

    def completed(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """Inputs and outputs by the file of the highest version, and, where it says none of them, its batches."""
        if config.input and config.output:
            return config
        file = _newest(folder, config.default_model_filename or _FILE)
        if file is None:
            return config
        session = _session(file, _options(config, 1))
        inputs, outputs = _seen(config, session)
        says_nothing = not config.input and not config.output and not config.max_batch_size
        if says_nothing and all(t.shape and not isinstance(t.shape[0], int) for t in (*inputs, *outputs)):
            config = replace(config, max_batch_size=DEFAULT_BATCH)
            if config.sequence_batching is None and config.dynamic_batching is None:
                batching = replace(empty(DynamicBatching), preferred_batch_size=(DEFAULT_BATCH,))
                config = replace(config, dynamic_batching=batching)
        has_batches = config.max_batch_size > 0
        return replace(
            config, input=config.input or tuple(_told(empty(ModelInput), t, has_batches) for t in inputs),
            output=config.output or tuple(_told(empty(ModelOutput), t, has_batches) for t in outputs),
        )  # fmt: skip


class _Network(Batched):
    def __init__(self, given: InstanceGiven) -> None:
        super().__init__(given)
        config = with_batch_inputs(whole(given.config))
        n_instances = sum(group.count for group in config.instance_group)
        self._session = _session(given.file, _options(config, n_instances))
        _check(config, self._session, self._ragged)
        self._outputs = [o.name for o in config.output]
        self._strings = {i.name for i in config.input if i.data_type is DataType.TYPE_STRING}

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        fed = {name: _decoded(name, array) if name in self._strings else array for name, array in inputs.items()}
        try:
            found = self._session.run(self._outputs, fed)
        except Exception as error:
            raise StatusError(Code.INTERNAL, f"onnx runtime error: {error}") from error
        return {name: _encoded(array) for name, array in zip(self._outputs, found, strict=True)}

    def close(self) -> None:
        del self._session


def _seen(config: ModelConfig, session: Any) -> tuple[list[Any], list[Any]]:
    """What clients of the network give and get, which is not all of it where it has sequences or ragged batches."""
    hidden = with_batch_inputs(whole(replace(config, input=(), output=())))
    inputs, outputs = ({tensor.name for tensor in side} for side in (hidden.input, hidden.output))
    return (
        [t for t in session.get_inputs() if t.name not in inputs],
        [t for t in session.get_outputs() if t.name not in outputs],
    )  # fmt: skip


def _newest(folder: Path, name: str) -> Path | None:
    versions = [p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit() and (p / name).exists()]
    return max(versions, key=lambda p: int(p.name)) / name if versions else None


@cache
def _runtime() -> Any:
    """The package. raises StatusError where it is not there"""
    try:
        import onnxruntime
    except ImportError as error:
        what = f"backend 'onnxruntime' needs a package that cannot be imported: {error}"
        raise StatusError(Code.UNSUPPORTED, f"{what}; pip install 'millrace[onnxruntime]'") from None
    return onnxruntime


def _session(file: Path, options: Any) -> Any:
    """file: or a folder of that name, with the network and what it keeps beside itself. raises StatusError"""
    file = file / _FILE if file.is_dir() else file
    try:
        return _runtime().InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if isinstance(error, StatusError):
            raise
        raise StatusError(Code.INTERNAL, f"onnx runtime error: {error}") from error


def _options(config: ModelConfig, n_instances: int) -> Any:
    """Of a session, by what the configuration says. raises StatusError"""
    asked = config.optimization
    if asked and asked.execution_accelerators and (others := asked.execution_accelerators.cpu_execution_accelerator):
        what = f"execution accelerator '{others[0].name}' of model '{config.name}' is not supported"
        raise StatusError(Code.UNSUPPORTED, what)
    runtime, graph = _runtime(), asked.graph if asked else None
    level = graph.level if graph else 0
    if level not in _LEVELS:
        raise invalid(f"graph optimization level {level} of model '{config.name}' is none of -1, 0, 1 and 2")
    options = runtime.SessionOptions()
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, _LEVELS[level])
    options.intra_op_num_threads = max(1, usable_cores() // max(1, n_instances))
    options.log_severity_level = 3  # errors: warnings about the graph are for whoever exported it
    said = {key: parameter.string_value for key, parameter in config.parameters.items()}
    settings: dict[str, Callable[[str], None]] = {
        "intra_op_thread_count": lambda n: setattr(options, "intra_op_num_threads", n),
        "inter_op_thread_count": lambda n: setattr(options, "inter_op_num_threads", n),
        "execution_mode": lambda n: setattr(options, "execution_mode", runtime.ExecutionMode(n)),
        "enable_mem_arena": lambda flag: setattr(options, "enable_cpu_mem_arena", flag),
        "enable_mem_pattern": lambda flag: setattr(options, "enable_mem_pattern", flag),
    }
    for key, text in said.items():
        if key in settings:
            settings[key](_value(config.name, key, text))
        elif key.startswith("session."):
            options.add_session_config_entry(key, text)
        else:
            log.warning("model '%s': parameter '%s' changes nothing; %s", config.name, key, nearest(key, settings))
    return options


def _value(model: str, key: str, text: str) -> Any:
    """raises StatusError"""
    if key.startswith("enable_") and text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    most = 1 if key == "execution_mode" else _MOST_THREADS
    if not key.startswith("enable_") and text.isascii() and text.isdigit() and len(text) < 5 and int(text) <= most:
        return int(text)
    expected = "0 or 1" if key.startswith("enable_") else f"a number from 0 to {most}"
    raise invalid(f"failed to parse parameter '{key}' of model '{model}': '{text:.40}', {expected} is expected")


def _told(nothing: Any, tensor: Any, has_batches: bool) -> Any:
    """As a configuration says it. raises StatusError for a type that has no name there"""
    kind = _TYPES.get(tensor.type)
    if kind is None:
        raise StatusError(
            Code.UNSUPPORTED, f"tensor '{tensor.name}' has the type {tensor.type}, which is not supported"
        )
    dims = _dims(tensor)[1:] if has_batches else _dims(tensor)
    if not dims:  # a configuration has no dims without a dimension
        nothing = replace(nothing, reshape=replace(empty(Reshape), shape=()))
    return replace(nothing, name=tensor.name, data_type=DataType[f"TYPE_{kind}"], dims=tuple(dims or [1]))


def _dims(tensor: Any) -> list[int]:
    """-1: any."""
    return [d if isinstance(d, int) and d >= 0 else -1 for d in tensor.shape]


def _check(config: ModelConfig, session: Any, ragged: Ragged) -> None:
    """The configuration against the file, in Triton's words. raises StatusError"""
    sides = ((config.input, session.get_inputs(), "input"), (config.output, session.get_outputs(), "output"))
    for said, there, side in sides:
        known = {tensor.name: tensor for tensor in there}
        if side == "input" and len(said) != len(there):
            what = f"unable to load model '{config.name}', configuration expects {len(said)} inputs"
            raise invalid(f"{what}, model provides {len(there)}")
        for one in said:
            if one.name not in known:
                names = ", ".join(known)
                raise invalid(f"unexpected inference {side} '{one.name}', allowed {side}s are: {names}")
            _check_type(config, one, known[one.name])
            if side == "input" and one.name in ragged.flat:
                _check_flat(config, known[one.name])
            elif one.name not in ragged.free:
                _check_shape(config, one, known[one.name])


def _check_flat(config: ModelConfig, there: Any) -> None:
    if _dims(there) != [-1]:
        what = "for ragged batches the shape should have one dimension, -1; but shape expected by the model is"
        raise invalid(f"model '{config.name}', tensor '{there.name}': {what} {_dims(there)}")


def _check_type(config: ModelConfig, said: Any, there: Any) -> None:
    kind = _TYPES.get(there.type)
    if kind is None or DataType[f"TYPE_{kind}"] is not said.data_type:
        wanted = kind or there.type
        raise invalid(
            f"unable to load model '{config.name}', tensor '{said.name}': the model expects data-type {wanted} but the "
            f"model configuration specifies data-type {wire_name(said.data_type)}"
        )


def _check_shape(config: ModelConfig, said: Any, there: Any) -> None:
    shape = said.reshape.shape if said.reshape else said.dims
    full, dims = [*([-1] if config.max_batch_size > 0 else []), *shape], _dims(there)
    fits = len(full) == len(dims) and all(a in (b, -1) or b == -1 for a, b in zip(full, dims, strict=True))
    if config.max_batch_size > 0 and dims and dims[0] != -1:
        raise invalid(
            f"model '{config.name}', tensor '{said.name}': for the model to support batching the shape should have at "
            f"least 1 dimension and the first dimension must be -1; but shape expected by the model is {dims}"
        )
    if not fits:
        raise invalid(
            f"model '{config.name}', tensor '{said.name}': the model expects {len(dims)} dimensions (shape {dims}) but "
            f"the model configuration specifies {len(full)} dimensions (an initial batch dimension because "
            f"max_batch_size > 0 followed by the explicit tensor shape, making complete shape {full})"
            if config.max_batch_size > 0 else
            f"model '{config.name}', tensor '{said.name}': the model expects {len(dims)} dimensions (shape {dims}) but "
            f"the model configuration specifies {len(full)} dimensions (shape {full})"
        )  # fmt: skip


def _decoded(name: str, array: Array) -> Array:
    """BYTES as ONNX has them: texts. raises StatusError"""
    try:
        flat: Sequence[str] = [value.decode() for value in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise invalid(f"input '{name}' holds bytes that are no UTF-8: {error}") from None
    found = np.empty(len(flat), np.object_)
    found[:] = flat
    return found.reshape(array.shape)


def _encoded(array: Array) -> Array:
    if array.dtype.kind not in "OU":
        return array
    return objects([str(value).encode() for value in array.reshape(-1)]).reshape(array.shape)
