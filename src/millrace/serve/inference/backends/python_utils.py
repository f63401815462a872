"""What a model.py imports as `triton_python_backend_utils`: Triton's names, for models that run in this process.

Everything that a model may use is here or in `python_config.py`; what is not there yet raises with its name.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from millrace.serve.inference.backends.python_config import ModelConfig
from millrace.serve.inference.request import InferRequest, InferResponse, Parameter
from millrace.serve.inference.status import Code, StatusError
from millrace.serve.kserve.tensors import Array, objects, split_strings
from millrace.serve.kserve.tensors import Tensor as WireTensor
from millrace.serve.repository.kinds import DataType

__all__ = ["ModelConfig"]
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 1, 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 1, 2
TRITONSERVER_MEMORY_GPU, TRITONSERVER_MEMORY_CPU = 2, 0
# By Triton's number of each.
_TYPES: dict[int, Any] = {
    1: np.bool_, 2: np.uint8, 3: np.uint16, 4: np.uint32, 5: np.uint64, 6: np.int8, 7: np.int16, 8: np.int32,
    9: np.int64, 10: np.float16, 11: np.float32, 12: np.float64, 13: np.object_, 14: ml_dtypes.bfloat16,
}  # fmt: skip
_NUMBERS = {np.dtype(kind): number for number, kind in _TYPES.items()}
_MOST_LOGGED = 4000
_MOST_PARAMETERS = 64 << 10  # characters of those of a response
_2_63, _2_64 = 1 << 63, 1 << 64
_LOST = "the model let go of {} without TRITONSERVER_RESPONSE_COMPLETE_FINAL, so that nobody can answer any more"


class TritonModelException(Exception):  # noqa: N818  Triton's name
    """What a model raises to say that something of its own went wrong."""


class TritonError:
    """What a response carries in place of tensors."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message


_CODES = (
    Code.UNKNOWN, Code.INTERNAL, Code.NOT_FOUND, Code.INVALID_ARG, Code.UNAVAILABLE, Code.UNSUPPORTED,
    Code.ALREADY_EXISTS, Code.CANCELLED,
)  # fmt: skip


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        """array: of numbers, of bytes objects, or of strings, which become UTF-8"""
        found: Array = np.asarray(array)
        if found.dtype.kind in "SU":
            found = found.astype(np.object_)
        if found.dtype == np.object_:
            texts = [v.encode() if isinstance(v, str) else bytes(v) for v in found.reshape(-1)]
            found = objects(texts).reshape(found.shape)
        if found.dtype not in _NUMBERS:
            raise TritonModelException(f"the data type {found.dtype} of tensor '{name}' has no name in Triton")
        self._name, self._array = name, found

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """A model may write into it."""
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def triton_dtype(self) -> int:
        return _NUMBERS[self._array.dtype]

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.as_numpy().__dlpack__()

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.as_numpy().__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """tensor: of another framework, on the CPU; memory is shared with it"""
        return Tensor(name, np.from_dlpack(tensor))


class InferenceResponse:
    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | str | None = None,
        parameters: str | Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error
        self._parameters = _checked(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


def _checked(parameters: str | Mapping[str, Any] | None) -> dict[str, Parameter]:
    """parameters: an object, or its JSON; a client reads them as they are. raises TritonModelException"""
    if not parameters:
        return {}
    try:
        text = parameters if isinstance(parameters, str) else json.dumps(dict(parameters))
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise TritonModelException(f"the parameters of a response are no JSON object: {error}") from None
    if len(text) > _MOST_PARAMETERS:
        raise TritonModelException(
            f"the parameters of a response have {len(text)} characters; at most {_MOST_PARAMETERS} are allowed"
        )
    if not isinstance(found, dict):
        raise TritonModelException(f"the parameters of a response are a {type(found).__name__}, not an object")
    for key, value in found.items():
        if not isinstance(value, bool | int | float | str) or (isinstance(value, int) and not -_2_63 <= value < _2_64):
            raise TritonModelException(
                f"parameter '{key}' of a response is neither a bool, an integer of 64 bits, a float nor a string"
            )
    return found


class InferenceResponseSender:
    """Answers from any thread; of a model that is not decoupled one response, and the flag FINAL."""

    def __init__(self, request: InferRequest) -> None:
        self._request, self._is_closed = request, False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self._is_closed = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        deliver(self._request, response, self._is_closed)

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def close(self) -> None:
        """It was answered in another way."""
        self._is_closed = True

    def __del__(self) -> None:
        if not self._is_closed:
            self._request.fail(StatusError(Code.INTERNAL, _LOST.format("its response sender")))


class InferenceRequest:
    """What `execute` is given."""

    def __init__(self, request: InferRequest, outputs: Sequence[str]) -> None:
        """outputs: of the model"""
        self._request, self._outputs = request, request.outputs or tuple(outputs)
        self._inputs = [Tensor(name, array) for name, array in request.inputs.items()]
        self._sender: InferenceResponseSender | None = None
        self._is_open = True  # neither answered nor given a sender

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request.id

    def correlation_id(self) -> int | str:
        return self._request.correlation_id

    def flags(self) -> int:
        return self._request.flags

    def set_flags(self, flags: int) -> None:
        self._request.flags = flags

    def timeout(self) -> int:
        return self._request.timeout_us

    def parameters(self) -> str:
        return json.dumps(self._request.parameters)

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def trace(self) -> "InferenceTrace":
        return InferenceTrace()

    def get_response_sender(self) -> InferenceResponseSender:
        self._is_open = False
        self._sender = self._sender or InferenceResponseSender(self._request)
        return self._sender

    def answered(self) -> None:
        """By what `execute` returned or raised."""
        self._is_open = False
        if self._sender is not None:
            self._sender.close()

    def __del__(self) -> None:
        if self._is_open:
            self._request.fail(StatusError(Code.INTERNAL, _LOST.format("a request")))

    @property
    def has_sender(self) -> bool:
        return self._sender is not None

    def exec(self, decoupled: bool = False) -> Any:
        raise _not_yet("InferenceRequest.exec")

    def async_exec(self, decoupled: bool = False) -> Any:
        raise _not_yet("InferenceRequest.async_exec")

    def set_release_flags(self, flags: int) -> None:
        raise _not_yet("InferenceRequest.set_release_flags")


class InferenceTrace:
    def get_context(self) -> None:
        """None: no trace is taken."""
        return


def deliver(request: InferRequest, response: InferenceResponse | None, final: bool) -> None:
    """What a model answered, as a response of the server; outputs that nobody asked for are left out.

    Arrays are copied: a model may write into its own again, in the next `execute`, before this one's answer is written.
    """
    if response is None:
        request.send(None, final)
        return
    error = response.error()
    if error is not None:
        code = error.code()
        request.fail(StatusError(_CODES[code] if 0 <= code < len(_CODES) else Code.UNKNOWN, error.message()), final)
        return
    tensors = {tensor.name(): tensor._array for tensor in response.output_tensors()}
    wanted = {n: tensors[n] for n in request.outputs if n in tensors} if request.outputs else tensors
    copied = {name: array.copy() for name, array in wanted.items()}
    request.send(InferResponse(copied, response._parameters), final)


class Logger:
    """Of the server's log, under the name of the models."""

    INFO, WARNING, ERROR, VERBOSE = range(4)
    _LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
    _log = logging.getLogger("millrace.serve.models")

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        cls._log.log(cls._LEVELS[level], "%s", str(message)[:_MOST_LOGGED])

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


class PreferredMemory:
    """On the CPU, wherever it is asked for."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.type, self.device_id = preferred_memory_type, preferred_device_id


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, *given: Any, **named: Any) -> None:
        raise _not_yet("MetricFamily")


# ---------------------------------------------------------------------- functions


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


def triton_to_numpy_type(number: int) -> Any:
    return _TYPES[number]


def numpy_to_triton_type(kind: Any) -> int:
    return _NUMBERS[np.dtype(kind)]


def triton_string_to_numpy(text: str) -> Any:
    """text: TYPE_FP32, as a configuration has it"""
    return _TYPES[DataType[text]]


def serialize_byte_tensor(array: Array) -> Array | None:
    """Each element after its length in four bytes, as an array of one element; None of an empty one."""
    if not array.size:
        return None
    return objects([WireTensor("", "BYTES", Tensor("", array).as_numpy()).raw()])


def deserialize_bytes_tensor(data: Any) -> Array:
    return objects(split_strings(bytes(data)))


def load_model(model_name: str, config: str = "", files: Any = None) -> None:
    raise _not_yet("load_model")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    raise _not_yet("unload_model")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    raise _not_yet("is_model_ready")


def _not_yet(what: str) -> TritonModelException:
    return TritonModelException(f"{what} is not supported yet")
