"""Who goes first: the order in which waiting sequences are admitted, and who gives way where pages run short.

First comes the tenant that had least of the machine, counted in tokens; of its requests, the one of the lowest priority
number, where waiting lowers it; of several alike, the one that the policy takes. So nobody starves: others' shares grow
while a tenant waits, and whatever its priority, a request is first of its tenant's after some time. Where nobody claims
anything and the policy is to serve whoever came first, this is the order of arrival, and nothing here runs.

A stay in a place is charged N - 1 + 2 G for N tokens that are there when it begins and G that it draws (`DRAWN`). Let
L be the most that a stay can be charged, P the number of places. **Of two tenants that had as much at some time, and
have had sequences waiting ever since, none has more than the other by more than P L.** For: say a has more than b. Look
at the last step since then in which a was given a place, and at the k sequences of b that were given places before it
in that step: they count with their prompts, so a was ahead by k L at most. (If a was given none, it was ahead by
nothing, and k is 0.) What a had after that was computed for sequences in the other P - k places, for each L at most;
what b had makes the difference smaller. Who gave its pages away and comes back begins another stay. So with one place
it is what one request takes, with several what all of them hold, for nobody that runs gives way. (Who waits for a
prompt that begins as its own does lets others by: in this it does not count as waiting.)

sources: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): a tenant that comes back after a pause
does not bring along what it did not use. Goyal et al., Start-time Fair Queuing (SIGCOMM 1996): whoever comes begins
where the service has come to; after an idle moment all begin anew.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from millrace.errors import ConfigError, nearest
from millrace.runtime.request.request import Request, Sequence

AGEING_S = 10.0  # of waiting, which count as one priority
MAX_TENANTS = 10_000  # that are remembered
ANSWER_TOKEN_COST = 2.0  # tokens of a prompt that one of an answer counts as: it takes a pass over all weights


CachedTokens = Callable[[Sequence], int]  # tokens of it whose pages are there already
Policy = Callable[[Sequence, CachedTokens], float]  # of sequences that are alike else, the one of the lowest goes first


def fcfs(seq: Sequence, cached_tokens: CachedTokens) -> float:
    return 0.0


def shortest_first(seq: Sequence, cached_tokens: CachedTokens) -> float:
    """The one that has its next token soonest."""
    return seq.n_tokens - cached_tokens(seq)


def longest_prefix(seq: Sequence, cached_tokens: CachedTokens) -> float:
    """While what it begins with is still there."""
    return -cached_tokens(seq)


POLICIES: Mapping[str, Policy] = {"fcfs": fcfs, "shortest": shortest_first, "prefix": longest_prefix}


def policy_named(name: str) -> Policy:
    """raises ConfigError"""
    if name not in POLICIES:
        raise ConfigError(f"the policy is {name!r:.60}", nearest(name, POLICIES), "choose another")
    return POLICIES[name]


class AdmissionQueue:
    """Of one scheduler. is_plain: that of arrival, and nobody needs to ask."""

    def __init__(self, policy: Policy, clock: Callable[[], float], cached_tokens: CachedTokens) -> None:
        self.is_plain = policy is fcfs
        self._policy, self._clock, self._cached_tokens = policy, clock, cached_tokens
        self._had: dict[str, float] = {}  # tenant -> tokens
        self._reached = 0.0  # what the tenant had whose turn it was last: nobody begins with less

    def arrives(self, request: Request, present: Iterable[Request]) -> None:
        """present: all that wait or run"""
        self.is_plain = False
        tenant, tenants = request.claim.tenant, {other.claim.tenant for other in present}
        if not tenants:  # whatever was computed before kept nobody waiting, so it is nobody's debt
            self._had, self._reached = {}, 0.0
        least = min(map(self._had_by, tenants), default=0.0)
        had = max(self._had_by(tenant), least, self._reached)
        self._had.pop(tenant, None)
        self._had[tenant] = had  # at the end: the one that came the longest ago goes first
        while len(self._had) > MAX_TENANTS:
            del self._had[next(iter(self._had))]

    def of(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """From the one that goes first on; what stands before others of its tenant counts as computed for those."""
        now_s = self._clock()
        turns = {seq: self._turn(seq, now_s) for seq in waiting}
        shares: dict[Sequence, float] = {}
        ahead: dict[str, float] = {}
        for seq in sorted(turns, key=turns.__getitem__):
            tenant = seq.request.claim.tenant
            shares[seq] = ahead.setdefault(tenant, self._had_by(tenant))
            ahead[tenant] += seq.n_left
        self._reached = max(self._reached, min(shares.values(), default=0.0))
        return sorted(shares, key=lambda seq: (shares[seq], *turns[seq]))

    def kept_first(self, running: list[Sequence]) -> list[Sequence]:
        """Who gives way to all others where pages run short is the last; time counts as for those that wait."""
        now_s = self._clock()
        return sorted(running, key=lambda seq: _aged(seq.request, now_s))

    def computed(self, seq: Sequence, n_prompt: int, n_drawn: int) -> None:
        """Tokens of it were."""
        tenant = seq.request.claim.tenant
        self._had[tenant] = self._had_by(tenant) + n_prompt + ANSWER_TOKEN_COST * n_drawn

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

    def _had_by(self, tenant: str) -> float:
        """Who is not remembered is as one that comes now."""
        return self._had.get(tenant, self._reached)

    def _turn(self, seq: Sequence, now_s: float) -> tuple[int, float, tuple[int, int]]:
        """Among those of its tenant."""
        aged = math.ceil(_aged(seq.request, now_s))  # whole ones: else no two were alike, and the policy never asked
        return aged, self._policy(seq, self._cached_tokens), seq.order


def _aged(request: Request, now_s: float) -> float:
    """Its priority, which waiting has lowered."""
    return request.claim.priority - max(0.0, now_s - request.timings.queued_s) / AGEING_S
