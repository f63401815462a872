"""What gRPC holds of answers until their clients take them, in one count, with a bound.

A client may keep its connection and open no window for what it has asked. grpcio's server cuts nobody off: it keeps
the answer until the call is over, long after whatever computed it has been let go.
"""

from typing import Any

from millrace.serve.inference.status import Code, StatusError
from millrace.serve.wire import FREE_BYTES


class Untaken:
    """Of one server. Short answers are not counted: there are no more of them than calls may be open."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._n_bytes = most_bytes, 0

    def check(self) -> None:
        """raises StatusError where there is too much already"""
        if self._n_bytes > self._most_bytes:
            raise self._too_much()

    def add(self, context: Any, n_bytes: int) -> None:
        """An answer to that call. raises StatusError where it is too much beside others"""
        if n_bytes > FREE_BYTES and self._n_bytes and self._n_bytes + n_bytes > self._most_bytes:
            raise self._too_much()
        self.keep(context, n_bytes)

    def keep(self, context: Any, n_bytes: int) -> None:
        """One that is on its way, and stays there."""
        if n_bytes > FREE_BYTES:
            self._n_bytes += n_bytes
            context.add_done_callback(lambda _: self._take_off(n_bytes))

    def _take_off(self, n_bytes: int) -> None:
        self._n_bytes -= n_bytes

    def _too_much(self) -> StatusError:
        return StatusError(Code.UNAVAILABLE, f"answers of {self._n_bytes} bytes wait for their readers")
