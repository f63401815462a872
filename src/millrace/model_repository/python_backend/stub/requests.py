"""`pb_utils.InferenceRequest`: a request that a model receives, or creates to call another model."""

import asyncio
import inspect
import json
import os
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from .bls_calls import BlsCall, ResponseIterator, start_iterator
from .bytes_tensors import text
from .errors import TritonError, TritonModelException
from .host_interface import EXECUTION, BlsRequest, Host, Incoming, ModelResponse
from .responses import LOST, InferenceResponseSender, check_parameters, to_inference_response
from .tensors import Tensor, named_arrays

TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 1, 2
TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = 0, 2


def current_host(bound: Host | None, subject: str) -> Host:
    """Return the host of the `execute` that this thread runs, or `bound`. raises TritonModelException"""
    execution = EXECUTION.get()
    host = execution.host if execution is not None else bound
    if host is None:
        raise TritonModelException(f"{subject} is asked for outside of a model: import pb_utils at the top of model.py")
    return host


class PreferredMemory:
    """A memory preference; all memory is on the CPU."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.type, self.device_id = preferred_memory_type, preferred_device_id


class InferenceTrace:
    """Trace of a request; passed to another request, it names the parent request."""

    def __init__(self, incoming: Incoming | None = None) -> None:
        self._incoming = incoming

    def get_context(self) -> str | None:
        """Return W3C trace headers as JSON, for calls outside of the server; None if the request is not traced"""
        return self._incoming.trace_context if self._incoming is not None else None


# Triton's parameters, in its order.
_PARAMETERS: dict[str, Any] = {
    "request_id": "", "correlation_id": 0, "inputs": None, "requested_output_names": None, "model_name": None,
    "model_version": -1, "flags": 0, "timeout": 0, "preferred_memory": None, "trace": None, "parameters": None,
}  # fmt: skip
_REQUIRED = ("inputs", "requested_output_names", "model_name")
_SIGNATURE = inspect.Signature(
    [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=v) for n, v in _PARAMETERS.items()]
)


class InferenceRequest:
    _host: ClassVar[Host | None] = None  # of the instance that owns this pb_utils
    _incoming: Incoming | None = None  # the request passed to `execute`
    _sender: InferenceResponseSender | None = None
    _is_open = False  # received, not answered, and without a sender
    _is_decoupled = False  # whether the receiving model is decoupled
    _release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a request to model `model_name`. raises TritonModelException, TypeError for wrong parameters"""
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        missing = [name for name in _REQUIRED if bound.arguments[name] is None]
        if missing:
            raise TypeError(f"InferenceRequest is made with {', '.join(_REQUIRED)}: {missing[0]} is missing")
        self._id, self._model = text(bound.arguments["request_id"]), text(bound.arguments["model_name"])
        version = int(bound.arguments["model_version"])
        self._version = version if version > 0 else None
        self._correlation_id: int | str = bound.arguments["correlation_id"]
        self._flags = int(bound.arguments["flags"])
        self._timeout_us = int(bound.arguments["timeout"])
        self._inputs: list[Tensor] = list(bound.arguments["inputs"])
        self._outputs: list[str] = [text(name) for name in bound.arguments["requested_output_names"]]
        self._trace = bound.arguments["trace"] or InferenceTrace()
        self._parameters = check_parameters(bound.arguments["parameters"], "a request")
        where = f"for request with id '{self._id}' and model name '{self._model}' should not be empty."
        if not all(self._inputs):
            raise TritonModelException(f"Input tensor {where}")
        if not all(self._outputs):
            raise TritonModelException(f"Requested output name {where}")
        if not self._model:
            raise TritonModelException("model_name is missing: the model that is asked")

    @classmethod
    def from_incoming(
        cls, incoming: Incoming, outputs: Sequence[str], model: str, is_decoupled: bool = False
    ) -> "InferenceRequest":
        """Create the request that `execute` receives. outputs: the model's output names"""
        request = cls.__new__(cls)
        request._incoming, request._is_open, request._is_decoupled = incoming, True, is_decoupled
        request._id, request._model, request._version = incoming.id, model, None
        request._correlation_id, request._flags = incoming.correlation_id, incoming.flags
        request._timeout_us = incoming.timeout_us
        request._inputs = [Tensor(name, array) for name, array in incoming.inputs.items()]
        request._outputs = list(incoming.outputs or outputs)
        request._trace, request._parameters = InferenceTrace(incoming), dict(incoming.parameters)
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        return self._timeout_us

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def trace(self) -> InferenceTrace:
        return self._trace

    def is_cancelled(self) -> bool:
        return self._incoming is not None and self._incoming.cancelled

    # ------------------------------------------------------------------ answering it

    def get_response_sender(self) -> InferenceResponseSender:
        if self._incoming is None:
            raise TritonModelException("a request that this model has made is answered by the model that it asks")
        self._is_open = False
        self._sender = self._sender or InferenceResponseSender(self._incoming, self._is_decoupled)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Set the release flags; with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE the request is executed again."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"request release flags {flags}: expected ALL (1) or RESCHEDULE (2)")
        self._release_flags = flags

    @property
    def is_rescheduled(self) -> bool:
        return self._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def reschedule(self) -> None:
        """Execute the request again. Threads may keep using its sender, or drop it without FINAL."""
        self._is_open = False
        if self._sender is not None:
            self._sender._detach()
        if self._incoming is not None:
            self._incoming.reschedule()

    def mark_answered(self) -> None:
        """Record that the return value or exception of `execute` answered the request."""
        self._is_open = False
        if self._sender is not None:
            self._sender._close()

    def __del__(self) -> None:
        if self._is_open and self._incoming is not None:
            self._incoming.send(ModelResponse(error=TritonError(LOST.format("a request"))), True)

    @property
    def is_answered(self) -> bool:
        """Whether its sender has sent the final response."""
        return self._sender is not None and self._sender.is_answered

    @property
    def has_sender(self) -> bool:
        return self._sender is not None

    # ------------------------------------------------------------------ asking it

    def exec(self, decoupled: bool = False) -> Any:
        """Call the model and wait. Returns an InferenceResponse or, if decoupled, a ResponseIterator."""
        call = self._call(decoupled)
        return ResponseIterator(call) if decoupled else to_inference_response(call.next())

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """Call the model now; awaiting the result returns what `exec` would."""
        loop = asyncio.get_running_loop()
        call = self._call(decoupled)
        if not decoupled:
            return loop.create_task(call.single_response())
        return loop.create_task(start_iterator(call))

    def _call(self, decoupled: bool) -> BlsCall:
        host = current_host(self._host, "another model")
        if not host.is_executing:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        if host.pid != os.getpid():  # a forked process lacks the threads that receive responses
            raise TritonModelException("a process that a model has forked cannot ask other models; use a thread pool")
        execution, incoming = EXECUTION.get(), self._trace._incoming
        parents = [incoming] if incoming is not None else list(execution.requests) if execution is not None else []
        bls_request = BlsRequest(
            self._model, self._version, self._id, self._correlation_id, self._flags, self._timeout_us,
            self._parameters, named_arrays(self._inputs), self._outputs, decoupled, parents,
        )  # fmt: skip
        return BlsCall(host, bls_request)
