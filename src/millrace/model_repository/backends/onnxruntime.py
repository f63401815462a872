"""`onnxruntime`: a network as ONNX, computed by ONNX Runtime on the CPU; the package is an extra, imported when used.

Each instance has a session of its own. Threads are shared out: so many for each instance that all together have the
cores of this machine, where the configuration's `intra_op_thread_count` says nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.machine.cpu import usable_cores
from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignature,
    Setting,
    Sides,
    check_size,
    encoded,
    failing,
    flag,
    n_threads,
    number,
    package,
    set_parameters,
    texts,
)
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.status_code import invalid
from millrace.model_repository.request.tensors import Array

_WHO = "onnx runtime"
_TYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "STRING",
}  # fmt: skip
_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}  # Triton's
_FILE = "model.onnx"  # also in a folder of that name


class OnnxRuntimeBackend(FrameworkBackend):
    takes_ragged = takes_batch_io = True

    def instance(self, given: InstanceContext) -> "_Network":
        return _Network(given)

    def sides(self, config: ModelConfig, file: Path) -> Sides:
        return _sides(_session(file, _options(config, usable_cores())))


class _Network(FrameworkModel):
    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given)
        self._session = _session(given.file, _options(self.inner, n_threads(self.inner)))
        self.check(*_sides(self._session))
        self._outputs = [o.name for o in self.inner.output]
        self._strings = {i.name for i in self.inner.input if i.data_type is DataType.TYPE_STRING}

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        fed = {name: texts(name, array) if name in self._strings else array for name, array in inputs.items()}
        with failing(_WHO):
            found = self._session.run(self._outputs, fed)
        return {name: encoded(array) for name, array in zip(self._outputs, found, strict=True)}

    def close(self) -> None:
        del self._session


def _session(file: Path, options: Any) -> Any:
    """file: or a folder of that name, with the network and what it keeps beside itself. raises StatusError"""
    check_size(file)
    file = file / _FILE if file.is_dir() else file
    runtime = package("onnxruntime")
    with failing(_WHO):
        return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _sides(session: Any) -> Sides:
    return _told(session.get_inputs()), _told(session.get_outputs())


def _told(tensors: Sequence[Any]) -> list[ModelSignature]:
    return [ModelSignature(t.name, _TYPES.get(t.type, ""), _dims(t.shape), t.type) for t in tensors]


def _dims(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) and d >= 0 else -1 for d in shape)


def _options(config: ModelConfig, threads: int) -> Any:
    """Of a session, by what the configuration says. raises StatusError"""
    runtime, graph = package("onnxruntime"), config.optimization.graph if config.optimization else None
    level = graph.level if graph else 0
    if level not in _LEVELS:
        raise invalid(f"graph optimization level {level} of model '{config.name}' is none of -1, 0, 1 and 2")
    options = runtime.SessionOptions()
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, _LEVELS[level])
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors: warnings about the graph are for whoever exported it

    def sets(option: str, read: Callable[[ModelConfig, str, str], Any]) -> Setting:
        return lambda key, text: setattr(options, option, read(config, key, text))

    settings = {
        "intra_op_thread_count": sets("intra_op_num_threads", number),
        "inter_op_thread_count": sets("inter_op_num_threads", number),
        "execution_mode": sets("execution_mode", lambda c, key, text: runtime.ExecutionMode(number(c, key, text, 1))),
        "enable_mem_arena": sets("enable_cpu_mem_arena", flag),
        "enable_mem_pattern": sets("enable_mem_pattern", flag),
    }
    set_parameters(config, settings, {"session.": options.add_session_config_entry})
    return options
