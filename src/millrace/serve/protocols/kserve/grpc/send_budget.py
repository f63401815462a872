"""What gRPC holds of answers until their clients take them, in one count, with a bound, and room left for others.

A client may keep its connection and open no window for what it has asked. grpcio's server cuts nobody off: it keeps
the answer until the call is over, long after whatever computed it has been let go. So a connection may have as much as
it leaves to the rest (dynamic thresholds: Choudhury and Hahne, doi:10.1109/90.664262): one that takes nothing gets to
half of the bound, a second one to a quarter, and whoever takes what it asked for finds room beside them.
"""

from collections import Counter
from typing import Any

from millrace.model_repository.request.status_code import Code, StatusError
from millrace.serve.http.request_bodies import FREE_BYTES


class SendBudget:
    """Of one server. Short answers are not counted: there are no more of them than calls may be open."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_peer = Counter[str]()  # of connections that have any

    def lease(self, peer: str) -> "SendBudgetLease":
        """Of one call, or of a part of it. peer: its connection, as gRPC names it"""
        return SendBudgetLease(self, peer)

    def check(self, peer: str) -> None:
        """raises StatusError where it has its share already, so that nothing is computed for it"""
        if (own := self._by_peer[peer]) and own > self._room:
            raise self._too_much(peer)

    def take(self, peer: str, n_bytes: int, is_computed: bool) -> None:
        """is_computed: it cannot be refused any more. raises StatusError where it is too much beside others"""
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
        """That is left. One answer may be larger than all; it counts as half of it, so that others get theirs."""
        return self._max_bytes - sum(min(own, self._max_bytes // 2) for own in self._by_peer.values())

    def _too_much(self, peer: str) -> StatusError:
        what = f"answers of {self._by_peer.total()} bytes wait for their readers"
        return StatusError(Code.UNAVAILABLE, f"{what}, {self._by_peer[peer]} of them for this connection")


class SendBudgetLease:
    """What is counted for one call, or a part of it, until it is taken off."""

    __slots__ = ("_budget", "_n_bytes", "_peer")

    def __init__(self, budget: SendBudget, peer: str) -> None:
        self._budget, self._peer, self._n_bytes = budget, peer, 0

    def check(self) -> None:
        """As of `SendBudget`. raises StatusError"""
        self._budget.check(self._peer)

    def add(self, n_bytes: int) -> None:
        """An answer. raises StatusError where it is too much"""
        self._add(n_bytes, is_computed=False)

    def take_off(self, n_bytes: int) -> None:
        """It was taken."""
        if n_bytes > FREE_BYTES:
            self._n_bytes -= n_bytes
            self._budget.give(self._peer, n_bytes)

    def close(self) -> None:
        """Nothing of it is held any more."""
        if self._n_bytes:
            self._budget.give(self._peer, self._n_bytes)
            self._n_bytes = 0

    def keep(self, context: Any, n_bytes: int) -> None:
        """An answer that is with gRPC, until that call is over."""
        self._add(n_bytes, is_computed=True)
        self.until(context)

    def until(self, context: Any) -> None:
        """gRPC holds it until that call is over."""
        context.add_done_callback(lambda _: self.close())

    def _add(self, n_bytes: int, is_computed: bool) -> None:
        if n_bytes > FREE_BYTES:
            self._budget.take(self._peer, n_bytes, is_computed)
            self._n_bytes += n_bytes
