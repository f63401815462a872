"""`pb_utils.InferenceRequest`: one that a model is given, or makes to ask another model."""

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from .bls_calls import Call, ResponseIterator, begun
from .bytes_tensors import text
from .errors import TritonError, TritonModelException
from .host_interface import EXECUTION, Answer, BlockingCalls, BlsRequest, Host, Incoming
from .responses import LOST, InferenceResponseSender, checked, response_of
from .tensors import Tensor, held

TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 1, 2
TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = 0, 2


def here(bound: Host | None, what: str) -> Host:
    """The instance whose `execute` this thread runs, or that it belongs to. raises TritonModelException"""
    execution = EXECUTION.get()
    found = execution.host if execution is not None else bound
    if found is None:
        raise TritonModelException(f"{what} is asked for outside of a model: import pb_utils at the top of model.py")
    return found


class PreferredMemory:
    """On the CPU, wherever it is asked for."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.type, self.device_id = preferred_memory_type, preferred_device_id


class InferenceTrace:
    """Of a request; handed on, it says for whom another model is asked."""

    def __init__(self, of: Incoming | None = None) -> None:
        self._of = of

    def get_context(self) -> str | None:
        """W3C's headers as a JSON object, for whatever the model asks outside of the server; None: no trace is taken"""
        return self._of.trace_context if self._of is not None else None


# Triton's parameters, in its order.
_MADE_OF: dict[str, Any] = {
    "request_id": "", "correlation_id": 0, "inputs": None, "requested_output_names": None, "model_name": None,
    "model_version": -1, "flags": 0, "timeout": 0, "preferred_memory": None, "trace": None, "parameters": None,
}  # fmt: skip
_NEEDED = ("inputs", "requested_output_names", "model_name")
_SIGNATURE = inspect.Signature(
    [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=v) for n, v in _MADE_OF.items()]
)


class InferenceRequest:
    _host: ClassVar[Host | None] = None  # of the model whose pb_utils it is
    _incoming: Incoming | None = None  # what `execute` was given
    _sender: InferenceResponseSender | None = None
    _is_open = False  # it was given, and is neither answered nor has a sender
    _is_decoupled = False  # the model that was given it
    _release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def __init__(self, *given: Any, **named: Any) -> None:
        """To ask model `model_name`. raises TritonModelException, and TypeError for parameters it has not, or lacks"""
        said = _SIGNATURE.bind(*given, **named)
        said.apply_defaults()
        missing = [name for name in _NEEDED if said.arguments[name] is None]
        if missing:
            raise TypeError(f"InferenceRequest is made with {', '.join(_NEEDED)}: {missing[0]} is missing")
        self._id, self._model = text(said.arguments["request_id"]), text(said.arguments["model_name"])
        version = int(said.arguments["model_version"])
        self._version = version if version > 0 else None
        self._correlation_id: int | str = said.arguments["correlation_id"]
        self._flags = int(said.arguments["flags"])
        self._timeout_us = int(said.arguments["timeout"])
        self._inputs: list[Tensor] = list(said.arguments["inputs"])
        self._outputs: list[str] = [text(name) for name in said.arguments["requested_output_names"]]
        self._trace = said.arguments["trace"] or InferenceTrace()
        self._parameters = checked(said.arguments["parameters"], "a request")
        where = f"for request with id '{self._id}' and model name '{self._model}' should not be empty."
        if not all(self._inputs):
            raise TritonModelException(f"Input tensor {where}")
        if not all(self._outputs):
            raise TritonModelException(f"Requested output name {where}")
        if not self._model:
            raise TritonModelException("model_name is missing: the model that is asked")

    @classmethod
    def given(
        cls, incoming: Incoming, outputs: Sequence[str], model: str, is_decoupled: bool = False
    ) -> "InferenceRequest":
        """What `execute` gets. outputs: of the model"""
        made = cls.__new__(cls)
        made._incoming, made._is_open, made._is_decoupled = incoming, True, is_decoupled
        made._id, made._model, made._version = incoming.id, model, None
        made._correlation_id, made._flags = incoming.correlation_id, incoming.flags
        made._timeout_us = incoming.timeout_us
        made._inputs = [Tensor(name, array) for name, array in incoming.inputs.items()]
        made._outputs = list(incoming.outputs or outputs)
        made._trace, made._parameters = InferenceTrace(incoming), dict(incoming.parameters)
        return made

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
        """With TRITONSERVER_REQUEST_RELEASE_RESCHEDULE it is executed again; its response is None for now."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"request release flags {flags}: expected ALL (1) or RESCHEDULE (2)")
        self._release_flags = flags

    @property
    def is_rescheduled(self) -> bool:
        return self._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def execute_again(self) -> None:
        """Threads that have its sender may go on to send; without FINAL it may go, too."""
        self._is_open = False
        if self._sender is not None:
            self._sender._let_go()
        if self._incoming is not None:
            self._incoming.again()

    def answered(self) -> None:
        """By what `execute` returned or raised."""
        self._is_open = False
        if self._sender is not None:
            self._sender._close()

    def __del__(self) -> None:
        if self._is_open and self._incoming is not None:
            self._incoming.send(Answer(error=TritonError(LOST.format("a request"))), True)

    @property
    def is_answered(self) -> bool:
        """By its sender, to the end."""
        return self._sender is not None and self._sender.is_answered

    @property
    def has_sender(self) -> bool:
        return self._sender is not None

    # ------------------------------------------------------------------ asking it

    def exec(self, decoupled: bool = False) -> Any:
        """Ask, and wait. An InferenceResponse; with decoupled a ResponseIterator, which waits for each response."""
        call = self._asked(decoupled)
        return ResponseIterator(call) if decoupled else response_of(call.next())

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """Ask now; what is returned is awaited for what `exec` gives."""
        loop = asyncio.get_running_loop()
        call = self._asked(decoupled)
        if not decoupled:
            return loop.create_task(call.only())
        return loop.create_task(begun(call))

    def _asked(self, decoupled: bool) -> Call:
        host = here(self._host, "another model")
        if not host.is_executing:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        if host.pid != os.getpid():  # its threads are not here, so that nobody would answer
            raise TritonModelException("a process that a model has forked cannot ask other models; use a thread pool")
        execution, of = EXECUTION.get(), self._trace._of
        behind = [of] if of is not None else list(execution.requests) if execution is not None else []
        waits = BlockingCalls.PERHAPS if host.is_busy else BlockingCalls.NO
        if execution is not None and execution.thread == threading.get_ident():
            waits = BlockingCalls.YES
        asked = BlsRequest(
            self._model, self._version, self._id, self._correlation_id, self._flags, self._timeout_us,
            self._parameters, held(self._inputs), self._outputs, decoupled, behind, waits,
        )  # fmt: skip
        return Call(host, asked)
