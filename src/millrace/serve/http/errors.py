"""HTTP errors: statuses and `HttpProblem`, which each protocol encodes in its own format."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
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
    """A refusal at the level of HTTP: path, method, key, body or model name."""

    def __init__(self, status: int, code: str, what: str, expected: str, fix: str) -> None:
        super().__init__(what, expected, fix)
        self.args = (status, code, what, expected, fix)
        self.status, self.code = status, code
        self.param: str | None = None
        self.headers: dict[str, str] = {}

    def about(self, param: str) -> "HttpError":
        """Set the field that the error is about, and return the error."""
        self.param = param
        return self


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete; no response is sent."""


@dataclass(frozen=True, slots=True)
class HttpProblem:
    """One error, before a protocol encodes it."""

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
        """Return the code and the beginning of the message, for the log."""
        return f"{self.code}: {self.message.split('; expected: ')[0][:160]}"

    def body(self) -> bytes:
        """Encode in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""
        return msgspec.json.encode(
            ErrorReply(error=ErrorBody(message=self.message, type=self.type, param=self.param, code=self.code))
        )

    def with_field_names(self, names: Mapping[str, str]) -> "HttpProblem":
        """Replace field names by a protocol's. names: ours to theirs

        A name that is also an English word (stop, seed) is replaced only in an error about that field.
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
        """Encode a complete HTTP response, for requests that could not be parsed; the connection closes after it."""
        body = self.body()
        all_headers = {
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
            **headers,
        }
        lines = (f"{name}: {value}\r\n" for name, value in all_headers.items())
        return status_line(self.status) + f"{''.join(lines)}\r\n".encode() + body


@cache
def status_line(status: int) -> bytes:
    """Return the first line of a response over HTTP/1.1."""
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


ErrorWriter = Callable[[HttpProblem], bytes]  # a protocol's: the JSON of a reply that is an error
BUG = HttpProblem(500, "The server failed at this request; its log says why.", code="internal_error")


MACHINE_RETRY_S = 5.0  # memory may be free again then


def one_line(error: MillraceError) -> str:
    """Return what was wrong, what was expected and how to fix it, in one line."""
    return f"{error.what}; expected: {error.expected}; to fix: {error.fix}"


def problem_of(error: MillraceError, *, accepting: bool) -> HttpProblem:
    """Return the problem of an error. accepting: the engine takes requests, so that BusyError means a full queue"""
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
    """Return the problem of an answer that the engine could not finish."""
    message = f"The answer could not be finished: {reason or ABORTED}"
    return HttpProblem(status, message, code="generation_failed", retry_after_s=5.0 if status == 503 else None)


class GenerationFailedError(Exception):
    """The engine ended a choice with an error, or aborted it while its client is still connected.

    fault: the error that ended it, if the request caused it or the server had no memory for the answer
    """

    def __init__(self, delta: Delta, fault: MillraceError | None = None) -> None:
        super().__init__(delta.error or ABORTED)
        aborted = delta.finish_reason is FinishReason.ABORT
        failed = generation_failed(delta.error, status=503 if aborted else 500)
        self.problem = failed if fault is None else problem_of(fault, accepting=True)
        # an abort is caused by the client or by stopping the server; any other failure needs investigation
        self.log_level = logging.INFO if aborted or fault is not None else logging.ERROR


def not_yet(field: str, fix: str, what: str = "") -> RequestError:
    """Return the error of an unsupported field. what: the unsupported part, if it is not the whole field"""
    return RequestError(f"{what or field} is not supported yet", f"a request without {what or 'it'}", fix, param=field)
