"""Admission and preemption order: which waiting sequence is admitted first, which running one is preempted first.

Waiting sequences are ordered by three keys: first the usage of their tenant in tokens, lowest first; then their
priority number, which decreases while they wait; then the policy. So nothing starves: the usage of other tenants grows
while a tenant waits, and a request of any priority becomes its tenant's first after some time. Without tenants and
priorities, and with the policy fcfs, this is the order of arrival, and none of this code runs.

A sequence that is admitted with N tokens and draws G is charged N - 1 + 2 G (`ANSWER_TOKEN_COST`). Let L be the largest
such charge and P the number of slots. **If two tenants had equal usage at some time, and both have had sequences
waiting ever since, their usages differ by at most P L.** Proof: let a have more than b. Take the last step since then
in which a got a slot, and the k sequences of b that got slots before it in that step. These count with their prompts,
so a was ahead by at most k L. (If a got no slot, it was not ahead, and k is 0.) All later usage of a is from sequences
in the other P - k slots, at most L each; usage of b makes the difference smaller. A preempted sequence counts as a new
one when it is readmitted. So the bound is one request's charge with one slot, and the charge of all slots with several,
because running sequences are not preempted for fairness. (A sequence that waits for a prompt with the same beginning
lets others pass, and does not count as waiting here.)

sources: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): a tenant that returns after a pause earns
no credit for it. Goyal et al., Start-time Fair Queuing (SIGCOMM 1996): a new tenant starts at the current virtual
time; after an idle period all start from zero.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from millrace.errors import ConfigError, nearest
from millrace.runtime.request.request import Request, Sequence

AGEING_S = 10.0  # seconds of waiting that lower the priority number by one
MAX_TENANTS = 10_000  # whose usage is remembered
ANSWER_TOKEN_COST = 2.0  # in prompt tokens: an answer token takes a pass over all weights


CachedTokens = Callable[[Sequence], int]  # tokens of a sequence whose pages are in the prefix cache
Policy = Callable[[Sequence, CachedTokens], float]  # the lower of otherwise equal sequences goes first


def fcfs(seq: Sequence, cached_tokens: CachedTokens) -> float:
    return 0.0


def shortest_first(seq: Sequence, cached_tokens: CachedTokens) -> float:
    """Prefer the sequence that has the fewest tokens to compute."""
    return seq.n_tokens - cached_tokens(seq)


def longest_prefix(seq: Sequence, cached_tokens: CachedTokens) -> float:
    """Prefer the longest cached prefix, while it is still cached."""
    return -cached_tokens(seq)


POLICIES: Mapping[str, Policy] = {"fcfs": fcfs, "shortest": shortest_first, "prefix": longest_prefix}


def policy_named(name: str) -> Policy:
    """Return the policy of this name. raises ConfigError"""
    if name not in POLICIES:
        raise ConfigError(f"the policy is {name!r:.60}", nearest(name, POLICIES), "choose another")
    return POLICIES[name]


class AdmissionQueue:
    """The admission order of one scheduler. is_plain: it is the order of arrival, so callers need not ask"""

    def __init__(self, policy: Policy, clock: Callable[[], float], cached_tokens: CachedTokens) -> None:
        self.is_plain = policy is fcfs
        self._policy, self._clock, self._cached_tokens = policy, clock, cached_tokens
        self._usage: dict[str, float] = {}  # tenant -> usage in tokens
        self._virtual_time = 0.0  # the virtual time: the usage of the tenant admitted last, at which new tenants start

    def add(self, request: Request, present: Iterable[Request]) -> None:
        """Account for a new request. present: the requests that wait or run"""
        self.is_plain = False
        tenant, tenants = request.queue_options.tenant, {other.queue_options.tenant for other in present}
        if not tenants:  # past usage delayed no one, so it does not count
            self._usage, self._virtual_time = {}, 0.0
        least = min(map(self._usage_of, tenants), default=0.0)
        had = max(self._usage_of(tenant), least, self._virtual_time)
        self._usage.pop(tenant, None)
        self._usage[tenant] = had  # reinserted at the end, so that the tenant that came longest ago is forgotten first
        while len(self._usage) > MAX_TENANTS:
            del self._usage[next(iter(self._usage))]

    def ordered(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences in order of admission. Each counts as usage for later ones of its tenant."""
        now_s = self._clock()
        ranks = {seq: self._rank(seq, now_s) for seq in waiting}
        shares: dict[Sequence, float] = {}
        ahead: dict[str, float] = {}
        for seq in sorted(ranks, key=ranks.__getitem__):
            tenant = seq.request.queue_options.tenant
            shares[seq] = ahead.setdefault(tenant, self._usage_of(tenant))
            ahead[tenant] += seq.n_left
        self._virtual_time = max(self._virtual_time, min(shares.values(), default=0.0))
        return sorted(shares, key=lambda seq: (shares[seq], *ranks[seq]))

    def by_retention(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running sequences in reverse order of preemption: the last one is preempted first."""
        now_s = self._clock()
        return sorted(running, key=lambda seq: _aged_priority(seq.request, now_s))

    def record_tokens(self, seq: Sequence, n_prompt: int, n_drawn: int) -> None:
        """Add computed tokens to the usage of the sequence's tenant."""
        tenant = seq.request.queue_options.tenant
        self._usage[tenant] = self._usage_of(tenant) + n_prompt + ANSWER_TOKEN_COST * n_drawn

    def overdue(self, waiting: Iterable[Sequence]) -> list[Request]:
        """Return the requests that have exceeded their queue timeout."""
        now_s = self._clock()
        return [
            seq.request
            for seq in waiting
            if seq.index == 0
            and (timeout_s := seq.request.queue_options.queue_timeout_s) is not None
            and seq.request.timings.first_scheduled_s is None
            and now_s - seq.request.timings.queued_s > timeout_s
        ]

    def _usage_of(self, tenant: str) -> float:
        """Return a tenant's usage; an unknown tenant starts at the virtual time."""
        return self._usage.get(tenant, self._virtual_time)

    def _rank(self, seq: Sequence, now_s: float) -> tuple[int, float, tuple[int, int]]:
        """Return the sort key of a sequence among those of its tenant."""
        aged = math.ceil(
            _aged_priority(seq.request, now_s)
        )  # rounded: otherwise no two are equal and the policy never applies
        return aged, self._policy(seq, self._cached_tokens), seq.order


def _aged_priority(request: Request, now_s: float) -> float:
    """Return the request's priority number, lowered by its waiting time."""
    return request.queue_options.priority - max(0.0, now_s - request.timings.queued_s) / AGEING_S
