"""The dynamic batcher against its rules, written down once more as a search over all beginnings of the queue."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.serve.inference.batching import Batch, BatchQueue, BatchRules, Closed, QueueRules
from millrace.serve.inference.request import InferRequest
from millrace.serve.inference.status import Code, StatusError


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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(RULES, STEPS)
def test_what_is_taken_when_is_what_the_rules_say(rules: BatchRules, steps: list[tuple[str, ...]]) -> None:
    queue, model, now = BatchQueue(rules), Model(rules), 0
    everybody = list[InferRequest]()
    for what, *how in steps:
        if what == "wait":
            now += int(how[0])
        elif what == "put":
            size, shape, priority, timeout_us = how
            made = request(min(int(size), rules.max_size or 8), shape, int(priority), int(timeout_us))
            everybody.append(made)
            if model.is_full(made):
                with pytest.raises(StatusError, match="Exceeds maximum queue size"):
                    queue.put(made, now)
            else:
                queue.put(made, now)
                model.queue.append(made)
        elif what == "leave" and everybody:  # one that is there, or was, or was refused
            gone = everybody[-1 - int(how[0]) % len(everybody)]
            assert queue.leave(gone) == (gone in model.order())
            model.gone([gone])
        elif what == "take":
            assert queue.expired(now) == sorted(model.expire(now), key=model.level)
            batch = queue.take(now)
            taken = model.take(now)
            assert list(batch.requests if batch else ()) == taken
            assert batch is None or batch.size == sum(r.batch_size for r in taken)
            due = queue.due_ns()
            if batch is None and model.order():  # it is woken no later than when something changes, and not for ever
                assert due is not None and now < due <= min(r.queued_ns for r in model.order()[:1]) + rules.delay_ns
        assert len(queue) == len(model.order())


def closes(rules: BatchRules, *sizes: int, now: int = 0, shapes: str = "") -> list[tuple[int, Closed]]:
    queue = BatchQueue(rules)
    for i, size in enumerate(sizes):
        queue.put(request(size, shapes[i : i + 1]), 0)
    found: list[tuple[int, Closed]] = []
    while (batch := queue.take(now)) is not None:
        found.append((batch.size, batch.closed))
    return found


def test_why_a_batch_closed() -> None:
    waits = BatchRules(max_size=8, preferred=frozenset({4}), delay_ns=100)
    assert closes(waits, 1, 1) == [], "two more, and it is a preferred one"
    assert closes(waits, 1, 1, now=100) == [(2, Closed.DELAY)]
    assert closes(waits, 2, 2, 2) == [(4, Closed.PREFERRED)], "and the last one waits"
    assert closes(waits, 2, 2, 2, now=100) == [(6, Closed.DELAY)], "whatever is there"
    assert closes(waits, 3, 3) == [(3, Closed.FULL)], "6 is beyond every preferred size"
    assert closes(waits, 8) == [(8, Closed.FULL)]
    assert closes(waits, 1, 1, 1, shapes="aab") == [(2, Closed.SHAPE)]
    at_once = BatchRules(max_size=8, preferred=frozenset({4}))
    assert closes(at_once, *[1] * 6) == [(4, Closed.PREFERRED), (2, Closed.DELAY)]
    assert closes(BatchRules(), 5, 5) == [(5, Closed.SINGLE), (5, Closed.SINGLE)]


def test_whoever_waits_is_woken_in_time() -> None:
    rules = BatchRules(max_size=8, preferred=frozenset({8}), delay_ns=100, default=QueueRules(timeout_ns=40))
    queue = BatchQueue(rules)
    assert queue.due_ns() is None
    one = request()
    queue.put(one, 5)
    assert queue.take(5) is None and queue.due_ns() == 46, "its time-out comes before its delay"
    assert queue.expired(45) == [] and queue.expired(46) == [one]
    assert queue.take(46) is None and queue.due_ns() is None


def test_a_request_may_shorten_its_time_and_never_lengthen_it() -> None:
    for said_us, ends_ns in ((1, 1000), (9, 5000)):
        queue = BatchQueue(BatchRules(default=QueueRules(timeout_ns=5000, may_override=True)))
        queue.put(request(timeout_us=said_us), 0)
        assert queue.expired(ends_ns) == [] and len(queue.expired(ends_ns + 1)) == 1


def test_a_full_queue_is_unavailable() -> None:
    queue = BatchQueue(BatchRules(default=QueueRules(max_size=1)))
    queue.put(request(), 0)
    with pytest.raises(StatusError) as refused:
        queue.put(request(), 0)
    assert refused.value.code is Code.UNAVAILABLE
    assert str(refused.value) == "[request id: <id_unknown>] Exceeds maximum queue size"


def test_who_left_is_taken_out() -> None:
    queue = BatchQueue(BatchRules(max_size=4, preferred=frozenset({4})))
    first, second = request(), request()
    queue.put(first, 0)
    queue.put(second, 0)
    assert queue.leave(first) and not queue.leave(first)
    assert queue.take(0) == Batch((second,), 1, Closed.DELAY)


def test_priorities_that_nobody_waits_at_are_forgotten() -> None:
    queue = BatchQueue(BatchRules(max_size=1, n_levels=1 << 40))
    for priority in range(1, 100):
        request = InferRequest({})
        request.priority, request.batch_size = priority, 1
        queue.put(request, 0)
        batch = queue.take(0)
        assert batch is not None and batch.requests == (request,)
    assert len(queue._levels) == 1
