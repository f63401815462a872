"""Bound on the responses that gRPC buffers until clients read them, shared fairly between connections.

A client may keep its connection open without reading. grpcio's server never disconnects it: it buffers the response
until the call is over, long after its computation has ended. So a connection may use as much as it leaves to the others
(dynamic thresholds: Choudhury and Hahne, doi:10.1109/90.664262): the first that reads nothing gets half of the bound, a
second one a quarter, and clients that read find room.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from millrace.model_repository.request.status_code import Code, StatusError
from millrace.serve.http.request_bodies import UNCOUNTED_BODY_BYTES


class SendBudget:
    """The send budget of one server. Short responses are not counted, because the number of open calls bounds them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_peer = Counter[str]()  # of connections that have any

    def lease(self, peer: Callable[[], str]) -> "SendBudgetLease":
        """Return the lease of one call, or of a part of it. peer: returns its connection, as gRPC names it"""
        return SendBudgetLease(self, peer)

    @property
    def is_used(self) -> bool:
        return bool(self._by_peer)

    def check(self, peer: str) -> None:
        """Check that a connection has room before anything is computed for it. raises StatusError if it has none"""
        if (own := self._by_peer[peer]) and own > self._room:
            raise self._too_much(peer)

    def take(self, peer: str, n_bytes: int, is_computed: bool) -> None:
        """Count a response. is_computed: it cannot be refused any more. raises StatusError if it is too large"""
        own = self._by_peer[peer]
        if not is_computed and self._by_peer and own + n_bytes > self._room:
            raise self._too_much(peer)
        self._by_peer[peer] = own + n_bytes

    def give(self, peer: str, n_bytes: int) -> None:
        self._by_peer[peer] -= n_bytes
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    @property
    def _room(self) -> int:
        """Return the bytes left. A connection counts for at most half of the bound, so that others get room."""
        return self._max_bytes - sum(min(own, self._max_bytes // 2) for own in self._by_peer.values())

    def _too_much(self, peer: str) -> StatusError:
        what = f"answers of {self._by_peer.total()} bytes wait for their readers"
        return StatusError(Code.UNAVAILABLE, f"{what}, {self._by_peer[peer]} of them for this connection")


class SendBudgetLease:
    """The bytes counted for one call, or for a part of it."""

    __slots__ = ("_budget", "_find_peer", "_n_bytes", "_name")

    def __init__(self, budget: SendBudget, peer: Callable[[], str]) -> None:
        self._budget, self._find_peer, self._n_bytes = budget, peer, 0
        self._name: str | None = None

    @property
    def _peer(self) -> str:
        """Return the name of the connection, which is found only for large responses."""
        if self._name is None:
            self._name = self._find_peer()
        return self._name

    def check(self) -> None:
        """Check as `SendBudget.check` does. raises StatusError"""
        if self._budget.is_used:
            self._budget.check(self._peer)

    def add(self, n_bytes: int) -> None:
        """Count a response. raises StatusError if it is too large"""
        self._add(n_bytes, is_computed=False)

    def take_off(self, n_bytes: int) -> None:
        """Stop counting bytes that the client has read."""
        if n_bytes > UNCOUNTED_BODY_BYTES:
            self._n_bytes -= n_bytes
            self._budget.give(self._peer, n_bytes)

    def close(self) -> None:
        """Stop counting all bytes of the lease."""
        if self._n_bytes:
            self._budget.give(self._peer, self._n_bytes)
            self._n_bytes = 0

    def keep(self, context: Any, n_bytes: int) -> None:
        """Count a response that gRPC already holds, until its call is over."""
        self._add(n_bytes, is_computed=True)
        self.until(context)

    def until(self, context: Any) -> None:
        """Close the lease when the call is over."""
        if self._n_bytes:
            context.add_done_callback(lambda _: self.close())

    def _add(self, n_bytes: int, is_computed: bool) -> None:
        if n_bytes > UNCOUNTED_BODY_BYTES:
            self._budget.take(self._peer, n_bytes, is_computed)
            self._n_bytes += n_bytes
