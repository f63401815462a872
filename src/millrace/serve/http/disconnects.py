"""Cancellation of work for clients that disconnect."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from millrace.serve.http.errors import ClientGoneError

T = TypeVar("T")
WATCH_S = 0.01  # a client that disconnects sooner is answered all the same


async def run_until_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run `work`, and cancel it if the client disconnects. To be called after the body was read.

    Clients are watched only after WATCH_S, because the task for it would double the time of a short request.
    raises ClientGoneError, and whatever `work` raises
    """
    task = asyncio.current_task()
    assert task is not None, "it is called in one"
    watch = _Watch(receive, task)
    later = asyncio.get_running_loop().call_later(WATCH_S, watch.begin)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.has_cancelled:
            task.uncancel()
            raise ClientGoneError from None
        raise
    finally:
        later.cancel()
        await watch.end()
        del watch  # the exception's traceback has this frame


class _Watch:
    """Watcher of a client, which cancels its task if it disconnects."""

    def __init__(self, receive: Receive, task: "asyncio.Task[Any]") -> None:
        self._receive, self._task = receive, task
        self._watching: asyncio.Task[None] | None = None
        self.has_cancelled = False

    def begin(self) -> None:
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        await _until_gone(self._receive)
        self.has_cancelled = self._task.cancel()

    async def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            try:
                await asyncio.wait((self._watching,))
            except asyncio.CancelledError:
                if not self.has_cancelled:  # otherwise the client left just as the work was done
                    raise


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
