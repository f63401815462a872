"""Backend `openvino`: OpenVINO IR (`model.xml` with `model.bin`) or ONNX models on the CPU; an optional package.

Models run in the precision of the file; `HINT_BF16` enables bfloat16, which is OpenVINO's own default on processors
that support it. Each instance has its own compiled model; they divide the cores unless `INFERENCE_NUM_THREADS` is set,
without pinning.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignatures,
    TensorSignature,
    check_size,
    choice,
    framework_errors,
    import_package,
    n_threads,
    number,
    set_parameters,
)
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array

_WHO = "openvino"
_TYPES = {
    "boolean": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
    "i32": "INT32", "i64": "INT64", "f16": "FP16", "f32": "FP32", "f64": "FP64",
}  # fmt: skip
_YES_NO = ("YES", "NO")
Properties = dict[str, Any]


class OpenvinoBackend(FrameworkBackend):
    takes_ragged = takes_batch_io = True

    def instance(self, context: InstanceContext) -> "_OpenVinoModel":
        return _OpenVinoModel(context)

    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        network = _read(file)
        return _tensor_signatures(network.inputs), _tensor_signatures(network.outputs)


class _OpenVinoModel(FrameworkModel):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        config = self.inner
        properties, network = _properties(config), _read(context.file)
        self._inputs, self._outputs = (
            {name: i for i, port in enumerate(ports) for name in _names(port)}
            for ports in (network.inputs, network.outputs)
        )
        self.check(_tensor_signatures(network.inputs, config.input), _tensor_signatures(network.outputs, config.output))
        with framework_errors(_WHO):
            self._compiled = import_package("openvino").Core().compile_model(network, "CPU", properties)
            self._request = self._compiled.create_infer_request()
        self._output_names = [o.name for o in config.output]

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with framework_errors(_WHO):
            results = self._request.infer({self._inputs[name]: np.ascontiguousarray(x) for name, x in inputs.items()})
            return {name: results[self._outputs[name]].copy() for name in self._output_names}

    def close(self) -> None:
        del self._request, self._compiled


def _read(file: Path) -> Any:
    """Read a model. raises StatusError, also if a part of it is missing"""
    core = import_package("openvino").Core()
    check_size(file.parent)
    with framework_errors(_WHO):
        return core.read_model(file)


def _properties(config: ModelConfig) -> Properties:
    """Return compile properties from Triton's parameters for the CPU. raises StatusError"""
    properties: Properties = {
        "INFERENCE_NUM_THREADS": n_threads(config), "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip

    def at_least_one(key: str, text: str) -> None:
        properties[key] = number(config, key, text, min_value=1)

    def hint(key: str, text: str) -> None:
        if choice(config, key, text, _YES_NO) == "YES":
            properties["INFERENCE_PRECISION_HINT"] = "bf16"

    def streams(key: str, text: str) -> None:
        properties[key] = text if text in ("AUTO", "NUMA") else number(config, key, text, min_value=1)

    def refused(key: str, text: str) -> None:
        if key == "CPU_EXTENSION_PATH" or choice(config, key, text, _YES_NO) == "YES":
            message = f"parameter '{key}' of model '{config.name}' is not supported"
            raise StatusError(Code.UNSUPPORTED, f"{message}: {_INSTEAD[key]}")

    def device(key: str, text: str) -> None:
        choice(config, key, text, ("CPU",))

    set_parameters(config, {
        "INFERENCE_NUM_THREADS": at_least_one, "COMPILATION_NUM_THREADS": at_least_one, "HINT_BF16": hint,
        "NUM_STREAMS": streams, "TARGET_DEVICE": device, "SKIP_OV_DYNAMIC_BATCHSIZE": lambda *_: None,
        **dict.fromkeys(_INSTEAD, refused),
    })  # fmt: skip
    return properties


_INSTEAD = {
    "CPU_EXTENSION_PATH": "it would load a library into the server",
    "ENABLE_BATCH_PADDING": "export the network with a first dimension that varies",
    "RESHAPE_IO_LAYERS": "export the network with these dimensions",
}


def _names(port: Any) -> list[str]:
    """Return all names of a tensor, or the name of its producer if it has none."""
    return sorted(port.get_names()) or [port.get_node().get_friendly_name()]


def _tensor_signatures(ports: Sequence[Any], declared: Sequence[Any] = ()) -> list[TensorSignature]:
    """Return signatures under those tensor names that the configuration uses."""
    declared_names = {tensor.name for tensor in declared}
    signatures = []
    for port in ports:
        names = _names(port)
        name = next((n for n in names if n in declared_names), names[0])
        shape, kind = port.get_partial_shape(), port.get_element_type().get_type_name()
        dims = None if shape.rank.is_dynamic else tuple(d.get_length() if d.is_static else -1 for d in shape)
        signatures.append(TensorSignature(name, _TYPES.get(kind, ""), dims, kind))
    return signatures
