"""The rules of the dynamic batcher, written down once more as a search over all beginnings of the queue."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.scheduling.dynamic_batcher import BatchRules, QueueRules


def request(size: int = 1, shape: object = None, priority: int = 0, timeout_us: int = 0) -> InferRequest:
    made = InferRequest({})
    made.batch_size, made.shape_key, made.priority, made.timeout_us = size, shape, priority, timeout_us
    return made


@dataclass
class Model:
    """The rules, as docs/repository.md has them, over one list in order of arrival."""

    rules: BatchRules
    queue: list[InferRequest] = field(default_factory=list)
    late: list[InferRequest] = field(default_factory=list)  # in the order in which they became so

    def level(self, r: InferRequest) -> int:
        return r.priority if 1 <= r.priority <= self.rules.n_levels else self.rules.default_level

    def of(self, level: int) -> QueueRules:
        return self.rules.levels.get(level, self.rules.default)

    def deadline(self, r: InferRequest) -> float:
        rules = self.of(self.level(r))
        times = [t for t in (rules.timeout_ns, r.timeout_us * 1000 if rules.may_override else 0) if t]
        return r.queued_ns + min(times) if times else float("inf")

    def is_full(self, r: InferRequest) -> bool:
        there = sum(self.level(q) == self.level(r) for q in (*self.queue, *self.late))
        return 0 < self.of(self.level(r)).max_size <= there

    def expire(self, now: int) -> list[InferRequest]:
        over = [r for r in self.queue if now > self.deadline(r)]
        self.queue = [r for r in self.queue if r not in over]
        self.late += [r for r in over if self.of(self.level(r)).delays]
        return [r for r in over if not self.of(self.level(r)).delays]

    def order(self) -> list[InferRequest]:
        both = [(self.level(r), 0, r) for r in self.queue] + [(self.level(r), 1, r) for r in self.late]
        return [r for _, _, r in sorted(both, key=lambda x: x[:2])]

    def take(self, now: int) -> list[InferRequest]:
        rules, order = self.rules, self.order()
        if not order:
            return []
        if not rules.max_size:
            return self.gone(order[:1])
        legal = [
            k
            for k in range(1, len(order) + 1)
            if k == 1
            or (sum(r.batch_size for r in order[:k]) <= rules.max_size and len({r.shape_key for r in order[:k]}) == 1)
        ]
        longest = order[: max(legal)]
        may_grow = max(legal) == len(order) and sum(r.batch_size for r in longest) < rules.max_size
        over = rules.delay_ns and now - min(r.ready_ns for r in longest) >= rules.delay_ns
        preferred = [k for k in legal if sum(r.batch_size for r in order[:k]) in rules.preferred]
        # larger than every preferred size with one more, which Triton does not wait for
        most = max(rules.preferred, default=0)
        beyond = [k for k in range(1, max(legal) + (not may_grow)) if sum(r.batch_size for r in order[: k + 1]) > most]
        # before the first preferred size, that is: afterwards a preferred one is taken
        beyond = [] if preferred and (not beyond or preferred[0] <= beyond[0]) else beyond[:1]
        if not over and (preferred or beyond):
            return self.gone(order[: max([*preferred, *beyond])])
        if over or not rules.delay_ns or not may_grow or sum(r.batch_size for r in longest) >= most:
            return self.gone(longest)
        return []

    def gone(self, taken: list[InferRequest]) -> list[InferRequest]:
        self.queue = [r for r in self.queue if r not in taken]
        self.late = [r for r in self.late if r not in taken]
        return taken


POLICIES = st.builds(
    QueueRules,
    timeout_ns=st.sampled_from([0, 3_000, 20_000]),
    delays=st.booleans(),
    may_override=st.booleans(),
    max_size=st.sampled_from([0, 0, 3]),
)
RULES = st.integers(0, 8).flatmap(
    lambda most: st.builds(
        BatchRules,
        max_size=st.just(most),
        preferred=st.frozensets(st.integers(1, most), min_size=1, max_size=3) if most else st.just(frozenset()),
        delay_ns=st.sampled_from([0, 10_000]),
        n_levels=st.just(3),
        default_level=st.integers(1, 3),
        default=POLICIES,
        levels=st.dictionaries(st.integers(1, 3), POLICIES, max_size=2),
    )
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 8), st.sampled_from("ab"), st.integers(0, 4), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(1, 12_000)),
        st.tuples(st.just("take")),
        st.tuples(st.just("leave"), st.integers(0, 7)),
    ),
    max_size=40,
)
