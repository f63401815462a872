"""Backend `onnxruntime`: ONNX models on ONNX Runtime's CPU provider; an optional package, imported on use.

Each instance has its own session. The machine's cores are divided among all instances, unless `intra_op_thread_count`
is set.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.machine.cpu import usable_cores
from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignatures,
    Setting,
    TensorSignature,
    check_size,
    decode_texts,
    encode_texts,
    flag,
    framework_errors,
    import_package,
    n_threads,
    number,
    set_parameters,
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

    def instance(self, context: InstanceContext) -> "_OnnxModel":
        return _OnnxModel(context)

    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        return _sides(_session(file, _options(config, usable_cores())))


class _OnnxModel(FrameworkModel):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        self._session = _session(context.file, _options(self.inner, n_threads(self.inner)))
        self.check(*_sides(self._session))
        self._outputs = [o.name for o in self.inner.output]
        self._strings = {i.name for i in self.inner.input if i.data_type is DataType.TYPE_STRING}

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        fed = {name: decode_texts(name, array) if name in self._strings else array for name, array in inputs.items()}
        with framework_errors(_WHO):
            results = self._session.run(self._outputs, fed)
        return {name: encode_texts(array) for name, array in zip(self._outputs, results, strict=True)}

    def close(self) -> None:
        del self._session


def _session(file: Path, options: Any) -> Any:
    """Open a session. file: the model, or a folder with it and its external data. raises StatusError"""
    check_size(file)
    file = file / _FILE if file.is_dir() else file
    runtime = import_package("onnxruntime")
    with framework_errors(_WHO):
        return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _sides(session: Any) -> ModelSignatures:
    return _tensor_signatures(session.get_inputs()), _tensor_signatures(session.get_outputs())


def _tensor_signatures(tensors: Sequence[Any]) -> list[TensorSignature]:
    return [TensorSignature(t.name, _TYPES.get(t.type, ""), _dims(t.shape), t.type) for t in tensors]


def _dims(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) and d >= 0 else -1 for d in shape)


def _options(config: ModelConfig, threads: int) -> Any:
    """Return session options from the configuration. raises StatusError"""
    runtime, graph = import_package("onnxruntime"), config.optimization.graph if config.optimization else None
    level = graph.level if graph else 0
    if level not in _LEVELS:
        raise invalid(f"graph optimization level {level} of model '{config.name}' is none of -1, 0, 1 and 2")
    options = runtime.SessionOptions()
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, _LEVELS[level])
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only: graph warnings concern the exporter

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
