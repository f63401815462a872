"""The `triton_python_backend_utils` module that a model.py imports; each instance gets its own."""

import base64
import logging
from collections.abc import Mapping
from enum import IntEnum
from types import ModuleType
from typing import Any

from .bls_calls import ResponseIterator
from .bytes_tensors import text
from .config import ModelConfig
from .errors import TritonError, TritonModelException
from .host_interface import EXECUTION, Host
from .metrics import MetricFamily
from .requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    current_host,
)
from .responses import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse, InferenceResponseSender
from .tensors import (
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 1, 2
_MAX_LOGGED = 4000
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
_log = logging.getLogger("millrace.serve.models")


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((t for t in request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((t for t in response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((dict(t) for t in model_config.get("input", ()) if t["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((dict(t) for t in model_config.get("output", ()) if t["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


_SHARED: dict[str, Any] = {
    "InferenceResponse": InferenceResponse, "InferenceResponseSender": InferenceResponseSender,
    "InferenceTrace": InferenceTrace, "ModelConfig": ModelConfig, "PreferredMemory": PreferredMemory,
    "ResponseIterator": ResponseIterator, "Tensor": Tensor, "TritonError": TritonError,
    "TritonModelException": TritonModelException,
    "TRITONSERVER_MEMORY_CPU": TRITONSERVER_MEMORY_CPU, "TRITONSERVER_MEMORY_GPU": TRITONSERVER_MEMORY_GPU,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    "TRITONSERVER_REQUEST_RELEASE_ALL": TRITONSERVER_REQUEST_RELEASE_ALL,
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL": TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    "deserialize_bytes_tensor": deserialize_bytes_tensor, "get_input_config_by_name": get_input_config_by_name,
    "get_input_tensor_by_name": get_input_tensor_by_name, "get_output_config_by_name": get_output_config_by_name,
    "get_output_tensor_by_name": get_output_tensor_by_name, "numpy_to_triton_type": numpy_to_triton_type,
    "serialize_byte_tensor": serialize_byte_tensor, "triton_string_to_numpy": triton_string_to_numpy,
    "triton_to_numpy_type": triton_to_numpy_type,
    "using_decoupled_model_transaction_policy": using_decoupled_model_transaction_policy,
}  # fmt: skip


class LogLevel(IntEnum):
    INFO, WARNING, ERROR, VERBOSE = range(4)


class Logger:
    """Logger that writes to the server's log."""

    INFO, WARNING, ERROR, VERBOSE = LogLevel
    _host: Host | None = None

    @classmethod
    def log(cls, message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Log a message. raises TypeError"""
        if not isinstance(level, LogLevel):
            raise TypeError(f"the level of a message is Logger.INFO, .WARNING, .ERROR or .VERBOSE, and not {level!r}")
        execution = EXECUTION.get()
        host = execution.host if execution is not None else cls._host
        if host is not None:
            host.log(text(message)[:_MAX_LOGGED], int(level))
        else:  # in `auto_complete_config`, outside of any instance
            _log.log(_LEVELS[level], "%s", text(message)[:_MAX_LOGGED])

    @classmethod
    def log_info(cls, message: str) -> None:
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        cls.log(message, cls.VERBOSE)


def make_pb_utils(host: Host | None) -> ModuleType:
    """Create the module for one instance, bound to its host.

    host: None for imports inside of functions, which use the host of the executing thread
    """
    module = ModuleType(NAMES[0], "What a model of Triton's Python backend imports.")

    def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """files: by names like file:1/model.onnx. raises TritonModelException"""
        encoded = {text(name): base64.b64encode(data).decode() for name, data in (files or {}).items()}
        current_host(host, "a model").load(text(model_name), text(config), encoded)

    def unload_model(model_name: str, unload_dependents: bool = False) -> None:
        """Unload a model. raises TritonModelException"""
        current_host(host, "a model").control("unload", name=text(model_name), with_members=bool(unload_dependents))

    def is_model_ready(model_name: str, model_version: str = "") -> bool:
        """Return whether a model is ready. raises TritonModelException"""
        return bool(
            current_host(host, "a model").control("is_ready", name=text(model_name), version=text(model_version))
        )

    module.__dict__.update(
        _SHARED,
        InferenceRequest=type("InferenceRequest", (InferenceRequest,), {"_host": host}),
        MetricFamily=type("MetricFamily", (MetricFamily,), {"_bound": host}),
        Logger=type("Logger", (Logger,), {"_host": host}),
        load_model=load_model,
        unload_model=unload_model,
        is_model_ready=is_model_ready,
    )
    return module
