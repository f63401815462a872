"""Who goes first: the order in which waiting sequences are admitted, and who gives way where pages run short.

First comes the tenant that had least of the machine, counted in tokens; of its requests, the one of the lowest priority
number, where waiting lowers it; of several alike, the one that the policy takes. So nobody starves: others' shares grow
while a tenant waits, and whatever its priority, a request is first of its tenant's after some time. Where nobody claims
anything and the policy is to serve whoever came first, this is the order of arrival, and nothing here runs.

source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): a tenant that comes back after a pause does
not bring along what it did not use.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from millrace.errors import ConfigError, nearest
from millrace.runtime.request import Request, Sequence

AGEING_S = 10.0  # of waiting, which count as one priority
MAX_TENANTS = 10_000  # that are remembered
DRAWN = 2.0  # tokens of a prompt that one of an answer counts as: it takes a pass over all weights


Known = Callable[[Sequence], int]  # tokens of it whose pages are there already
Policy = Callable[[Sequence, Known], float]  # of sequences that are alike else, the one of the lowest goes first


def first_come(seq: Sequence, known: Known) -> float:
    return 0.0


def shortest_first(seq: Sequence, known: Known) -> float:
    """The one that has its next token soonest."""
    return seq.n_tokens - known(seq)


def longest_prefix(seq: Sequence, known: Known) -> float:
    """While what it begins with is still there."""
    return -known(seq)


POLICIES: Mapping[str, Policy] = {"fcfs": first_come, "shortest": shortest_first, "prefix": longest_prefix}


def policy_named(name: str) -> Policy:
    """raises ConfigError"""
    if name not in POLICIES:
        raise ConfigError(f"the policy is {name!r:.60}", nearest(name, POLICIES), "choose another")
    return POLICIES[name]


class Order:
    """Of one scheduler. is_plain: that of arrival, and nobody needs to ask."""

    def __init__(self, policy: Policy, clock: Callable[[], float], known: Known) -> None:
        self.is_plain = policy is first_come
        self._policy, self._clock, self._known = policy, clock, known
        self._had: dict[str, float] = {}  # tenant -> tokens

    def arrives(self, request: Request, present: Iterable[Request]) -> None:
        """present: all that wait or run"""
        self.is_plain = False
        tenant = request.claim.tenant
        least = min((self._had.get(other.claim.tenant, 0.0) for other in present), default=0.0)
        had = max(self._had.pop(tenant, 0.0), least)
        self._had[tenant] = had  # at the end: the one that came the longest ago goes first
        while len(self._had) > MAX_TENANTS:
            del self._had[next(iter(self._had))]

    def of(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """From the one that goes first on."""
        now_s = self._clock()
        return sorted(waiting, key=lambda seq: self._rank(seq, now_s))

    def kept_first(self, running: list[Sequence]) -> list[Sequence]:
        """Who gives way to all others where pages run short is the last; time counts as for those that wait."""
        now_s = self._clock()
        return sorted(running, key=lambda seq: _aged(seq.request, now_s))

    def computed(self, seq: Sequence, n_prompt: int, n_drawn: int) -> None:
        """Tokens of it were."""
        tenant = seq.request.claim.tenant
        self._had[tenant] = self._had.get(tenant, 0.0) + n_prompt + DRAWN * n_drawn

    def overdue(self, waiting: Iterable[Sequence]) -> list[Request]:
        """Those that have waited as long as they would."""
        now_s = self._clock()
        return [
            seq.request
            for seq in waiting
            if seq.index == 0
            and (timeout_s := seq.request.claim.queue_timeout_s) is not None
            and seq.request.timings.first_scheduled_s is None
            and now_s - seq.request.timings.queued_s > timeout_s
        ]

    def _rank(self, seq: Sequence, now_s: float) -> tuple[float, int, float, tuple[int, int]]:
        had = self._had.get(seq.request.claim.tenant, 0.0)
        aged = math.ceil(_aged(seq.request, now_s))  # whole ones: else no two were alike, and the policy never asked
        return had, aged, self._policy(seq, self._known), seq.order


def _aged(request: Request, now_s: float) -> float:
    """Its priority, which waiting has lowered."""
    return request.claim.priority - max(0.0, now_s - request.timings.queued_s) / AGEING_S
