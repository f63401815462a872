"""`openvino`: a network as OpenVINO's IR (`model.xml` with `model.bin` beside it) or as ONNX, on the CPU; an extra.

Computed in the precision of the file: OpenVINO itself takes bfloat16 where the processor has it, which `HINT_BF16` asks
for here. Each instance has a compiled network of its own; they share out the cores where `INFERENCE_NUM_THREADS` says
nothing else, and none is pinned to one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignature,
    Sides,
    check_size,
    choice,
    failing,
    n_threads,
    number,
    package,
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

    def instance(self, given: InstanceContext) -> "_Network":
        return _Network(given)

    def sides(self, config: ModelConfig, file: Path) -> Sides:
        network = _read(file)
        return _told(network.inputs), _told(network.outputs)


class _Network(FrameworkModel):
    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given)
        config = self.inner
        properties, network = _properties(config), _read(given.file)
        self._inputs, self._outputs = (
            {name: i for i, port in enumerate(ports) for name in _names(port)}
            for ports in (network.inputs, network.outputs)
        )
        self.check(_told(network.inputs, config.input), _told(network.outputs, config.output))
        with failing(_WHO):
            self._compiled = package("openvino").Core().compile_model(network, "CPU", properties)
            self._request = self._compiled.create_infer_request()
        self._wanted = [o.name for o in config.output]

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with failing(_WHO):
            found = self._request.infer({self._inputs[name]: np.ascontiguousarray(x) for name, x in inputs.items()})
            return {name: found[self._outputs[name]].copy() for name in self._wanted}

    def close(self) -> None:
        del self._request, self._compiled


def _read(file: Path) -> Any:
    """raises StatusError, also where a part of the network is not beside it"""
    core = package("openvino").Core()
    check_size(file.parent)
    with failing(_WHO):
        return core.read_model(file)


def _properties(config: ModelConfig) -> Properties:
    """Of a compiled network, by the parameters that Triton has for the CPU. raises StatusError"""
    found: Properties = {
        "INFERENCE_NUM_THREADS": n_threads(config), "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip

    def at_least_one(key: str, text: str) -> None:
        found[key] = number(config, key, text, least=1)

    def hint(key: str, text: str) -> None:
        if choice(config, key, text, _YES_NO) == "YES":
            found["INFERENCE_PRECISION_HINT"] = "bf16"

    def streams(key: str, text: str) -> None:
        found[key] = text if text in ("AUTO", "NUMA") else number(config, key, text, least=1)

    def refused(key: str, text: str) -> None:
        if key == "CPU_EXTENSION_PATH" or choice(config, key, text, _YES_NO) == "YES":
            what = f"parameter '{key}' of model '{config.name}' is not supported"
            raise StatusError(Code.UNSUPPORTED, f"{what}: {_INSTEAD[key]}")

    def device(key: str, text: str) -> None:
        choice(config, key, text, ("CPU",))

    set_parameters(config, {
        "INFERENCE_NUM_THREADS": at_least_one, "COMPILATION_NUM_THREADS": at_least_one, "HINT_BF16": hint,
        "NUM_STREAMS": streams, "TARGET_DEVICE": device, "SKIP_OV_DYNAMIC_BATCHSIZE": lambda *_: None,
        **dict.fromkeys(_INSTEAD, refused),
    })  # fmt: skip
    return found


_INSTEAD = {
    "CPU_EXTENSION_PATH": "it would load a library into the server",
    "ENABLE_BATCH_PADDING": "export the network with a first dimension that varies",
    "RESHAPE_IO_LAYERS": "export the network with these dimensions",
}


def _names(port: Any) -> list[str]:
    """All that a tensor is called; one without a name is called as what makes it."""
    return sorted(port.get_names()) or [port.get_node().get_friendly_name()]


def _told(ports: Sequence[Any], said: Sequence[Any] = ()) -> list[ModelSignature]:
    """By that of a tensor's names which the configuration has."""
    wanted = {one.name for one in said}
    found = []
    for port in ports:
        names = _names(port)
        name = next((n for n in names if n in wanted), names[0])
        shape, kind = port.get_partial_shape(), port.get_element_type().get_type_name()
        dims = None if shape.rank.is_dynamic else tuple(d.get_length() if d.is_static else -1 for d in shape)
        found.append(ModelSignature(name, _TYPES.get(kind, ""), dims, kind))
    return found
