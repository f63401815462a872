"""What goes wrong, as HTTP says it: a status and a Problem, which each protocol writes in its own way."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from millrace.errors import BusyError, CheckpointError, ContextError, MachineError, MillraceError, RequestError
from millrace.runtime.request.sampling_params import Delta, FinishReason
from millrace.serve.llm.response_types import ErrorBody, ErrorReply

# OpenAI's words for what a client may do about it; any other status below 500 is the request's own fault
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
CLIENT_CLOSED = 499  # nginx's word for a client that went away; only ever seen in the log


class HttpError(MillraceError):
    """A refusal that is HTTP's own business: the path, the method, the key, the body, the model's name."""

    def __init__(self, status: int, code: str, what: str, expected: str, mend: str) -> None:
        super().__init__(what, expected, mend)
        self.args = (status, code, what, expected, mend)
        self.status, self.code = status, code
        self.param: str | None = None
        self.headers: dict[str, str] = {}

    def about(self, param: str) -> "HttpError":
        """The same error, naming a field."""
        self.param = param
        return self


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete; nobody is left to be told."""


@dataclass(frozen=True, slots=True)
class HttpProblem:
    """One error, before a protocol writes it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def brief(self) -> str:
        """For the log: the code, and the beginning of what was wrong."""
        return f"{self.code}: {self.message.split('; expected: ')[0][:160]}"

    def body(self) -> bytes:
        """As OpenAI's clients expect it: `{"error": {"message", "type", "param", "code"}}`."""
        return msgspec.json.encode(
            ErrorReply(error=ErrorBody(message=self.message, type=self.type, param=self.param, code=self.code))
        )

    def with_field_names(self, names: Mapping[str, str]) -> "HttpProblem":
        """In a protocol's words. names: of fields, ours to theirs

        A name that is also a word of English (stop, seed) is one only in an error about that field.
        """
        relevant = [name for name in names if "_" in name or "." in name or name == self.param]
        if not relevant:
            return self
        ours = "|".join(map(re.escape, sorted(relevant, key=len, reverse=True)))
        message = re.sub(rf"(?<![\w.])({ours})(?!\w)", lambda name: names[name[0]], self.message)
        return replace(self, message=message, param=names.get(self.param or "", self.param))

    def response(self, write: "ErrorWriter", headers: Mapping[str, str]) -> Response:
        all_headers = dict(headers)
        if self.retry_after_s is not None:
            all_headers["retry-after"] = str(math.ceil(self.retry_after_s))
        return Response(write(self), self.status, all_headers, media_type="application/json")

    def raw_response(self, headers: Mapping[str, str]) -> bytes:
        """As it is written where no request was understood: the connection's last words."""
        body = self.body()
        all_headers = {
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
            **headers,
        }
        lines = (f"{name}: {value}\r\n" for name, value in all_headers.items())
        return f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n{''.join(lines)}\r\n".encode() + body


ErrorWriter = Callable[[HttpProblem], bytes]  # a protocol's: the JSON of a reply that is an error
BUG = HttpProblem(500, "The server failed at this request; its log says why.", code="internal_error")


MACHINE_RETRY_S = 5.0  # memory may be free again then


def one_line(error: MillraceError) -> str:
    """What was wrong, what was expected and how to mend it, as one line of prose."""
    return f"{error.what}; expected: {error.expected}; to mend: {error.mend}"


def problem_of(error: MillraceError, *, accepting: bool) -> HttpProblem:
    """`accepting`: the engine runs and takes requests, so that BusyError means a full queue."""
    message = one_line(error)
    match error:
        case HttpError():
            return HttpProblem(error.status, message, error.param, error.code)
        case ContextError():
            return HttpProblem(400, message, error.param, code="context_length_exceeded")
        case RequestError():
            return HttpProblem(400, message, param=error.param, code="invalid_value")
        case BusyError() if accepting:
            return HttpProblem(429, message, code="queue_full", retry_after_s=error.retry_after_s)
        case BusyError():
            return HttpProblem(503, message, code="unavailable", retry_after_s=error.retry_after_s)
        case MachineError():
            return HttpProblem(503, message, code="unavailable", retry_after_s=MACHINE_RETRY_S)
        case CheckpointError():  # the chat template cannot digest it; asking again would not help
            return HttpProblem(422, message, param="messages", code="chat_template_failed")
    return HttpProblem(500, message, code="server_error")


ABORTED = "it was aborted, for the server is shutting down"


def generation_failed(reason: str | None, *, status: int = 500) -> HttpProblem:
    """An answer that the engine could not finish."""
    message = f"The answer could not be finished: {reason or ABORTED}"
    return HttpProblem(status, message, code="generation_failed", retry_after_s=5.0 if status == 503 else None)


class GenerationFailedError(Exception):
    """The engine ended a choice with an error, or aborted it though its client is still there.

    fault: the error that ended it, where it is the request's own, or the server had no room for the answer
    """

    def __init__(self, delta: Delta, fault: MillraceError | None = None) -> None:
        super().__init__(delta.error or ABORTED)
        aborted = delta.finish_reason is FinishReason.ABORT
        failed = generation_failed(delta.error, status=503 if aborted else 500)
        self.problem = failed if fault is None else problem_of(fault, accepting=True)
        # of an abort the client, or whoever stopped the server, knows the cause; what else fails is for us to look into
        self.log_level = logging.INFO if aborted or fault is not None else logging.ERROR


def not_yet(field: str, mend: str, what: str = "") -> RequestError:
    """what: of the field, where it is not the field itself"""
    return RequestError(f"{what or field} is not supported yet", f"a request without {what or 'it'}", mend, param=field)
