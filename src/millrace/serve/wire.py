"""The raw side of one call: its context, its body within limits, and the client that may go away."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive, Scope

from millrace.serve.errors import ClientGoneError, HttpError
from millrace.serve.logs import RequestLog

T = TypeVar("T")
CALL = "millrace.call"  # where the edge leaves the Call in the ASGI scope


@dataclass(slots=True)
class Call:
    """One HTTP request, as its handler sees it."""

    id: str  # x-request-id
    arrived_s: float  # time.perf_counter()
    log: RequestLog
    body_bytes: int = 0
    ignored: tuple[str, ...] = ()  # fields of the request that change nothing


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int
    timeout_s: float


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits) -> bytes:
    """The whole body. Whatever is larger is refused before it is held in memory.

    raises HttpError with 413, 415 or 408; ClientGoneError
    """
    _check_content_type(header(scope, b"content-type"))
    announced = header(scope, b"content-length")
    if announced is not None and int(announced) > limits.max_bytes:  # the HTTP parser lets only digits through
        raise _too_large(f"{int(announced)} bytes", limits)
    parts: list[bytes] = []
    n_bytes = 0
    try:
        async with asyncio.timeout(limits.timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                parts.append(message.get("body", b""))
                n_bytes += len(parts[-1])
                if n_bytes > limits.max_bytes:
                    raise _too_large("too many bytes", limits)
                more = message.get("more_body", False)
    except TimeoutError:
        raise HttpError(
            408,
            "body_timeout",
            f"the body was not complete after {limits.timeout_s:g} s",
            "the whole request",
            "send it again",
        ) from None
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run `work`, and cancel it when the client goes away. Call it after the body was read.

    raises ClientGoneError, and whatever `work` raises
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))
        if not working.cancelled():
            working.exception()  # seen, so that asyncio does not complain that nobody looked


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_content_type(value: bytes | None) -> None:
    kind = (value or b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise HttpError(
            415,
            "unsupported_media_type",
            f"the content type is {kind.decode('latin-1')[:100]}",
            "application/json",
            "send the header content-type: application/json",
        )


def _too_large(what: str, limits: BodyLimits) -> HttpError:
    return HttpError(
        413,
        "body_too_large",
        f"the body has {what}",
        f"at most {limits.max_bytes}",
        "send less, or raise the server's --max-body-bytes",
    )
