"""The rules of the sequence batcher, written down once more over one list of sequences, in simulated time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.scheduling.dynamic_batcher import Batch, BatchRules
from millrace.model_repository.scheduling.sequence_batcher import SequenceBatcher, SequenceRules
from tests.support.batching_rules import Model as Batcher

START, END = 1, 2
LOST = "instance m_., which had the sequence, ended, and what it knew of it is lost"
NO_START = "must specify the START flag on the first request of the sequence"


def request(id_: int | str, flags: int = 0, shape: object = None, timeout_us: int = 0) -> InferRequest:
    made = InferRequest({})
    made.batch_size, made.correlation_id, made.flags = 1, id_, flags
    made.shape_key, made.timeout_us = shape, timeout_us
    return made


def null(like: InferRequest) -> InferRequest:
    return InferRequest({}, request_id="null")


def queue_of(rules: SequenceRules, n_instances: int = 1) -> SequenceBatcher:
    return SequenceBatcher(rules, n_instances, lambda _: None, null)


@dataclass(eq=False)
class Seq:
    id: int | str
    waiting: list[InferRequest] = field(default_factory=list)
    busy: InferRequest | None = None
    closed: bool = False
    place: tuple[int, int] | None = None
    deadline: float = float("inf")
    idle_since: int | None = None

    @property
    def is_over(self) -> bool:
        return self.closed and not self.waiting and self.busy is None


class Model:
    """The rules as docs/repository.md has them."""

    def __init__(self, rules: SequenceRules, n_instances: int) -> None:
        self.rules, self.n_instances = rules, n_instances
        self.sequences: list[Seq] = []  # in order of their first requests
        self.batchers = [Batcher(rules.batches or BatchRules()) for _ in range(n_instances)]
        self.ready_since: dict[InferRequest, int] = {}
        self.gone: set[int] = set()  # instances
        self.lost_at: dict[int | str, int] = {}  # sequences that they had

    def newest(self, id_: int | str) -> Seq | None:
        return next((s for s in reversed(self.sequences) if s.id == id_), None)

    def refuses(self, r: InferRequest) -> bool:
        last = self.newest(r.correlation_id)
        return not r.flags & START and (last is None or last.closed)

    def put(self, r: InferRequest, now: int) -> None:
        sequence = self.newest(r.correlation_id)
        if r.flags & START:
            self.lost_at.pop(r.correlation_id, None)
            if sequence is not None:
                sequence.closed = True
            sequence = Seq(r.correlation_id)
            self.sequences.append(sequence)
        assert sequence is not None
        sequence.waiting.append(r)
        sequence.closed = bool(r.flags & END)
        self.settle(now)
        if sequence.place is None and r.timeout_us:
            sequence.deadline = min(sequence.deadline, now + 1000 * r.timeout_us)

    def settle(self, now: int) -> None:
        self.sequences = [s for s in self.sequences if not s.is_over]
        taken = {s.place for s in self.sequences}
        there = [i for i in range(self.n_instances) if i not in self.gone]
        every = [(slot, i) for slot in range(self.rules.n_slots) for i in there]
        free = [place for place in every if place not in taken]
        for i, s in enumerate(self.sequences):
            if s.place is None and free and not any(t.id == s.id for t in self.sequences[:i]):
                s.place = free.pop(0)
            has_nothing = s.place is not None and not s.waiting and s.busy is None
            s.idle_since = (now if s.idle_since is None else s.idle_since) if has_nothing else None
            if s.place is not None and s.waiting and s.busy is None and s.waiting[0] not in self.ready_since:
                self.ready_since[s.waiting[0]] = now
                self.batchers[s.place[1]].queue.append(s.waiting[0])

    def cancel(self, r: InferRequest, now: int) -> list[InferRequest]:
        for s in self.sequences:
            if r in s.waiting:
                kept = s.waiting.index(r)
                gone, s.waiting, s.closed = s.waiting[kept:], s.waiting[:kept], True
                for batcher in self.batchers:
                    batcher.gone(gone)
                self.settle(now)
                return gone
        return []

    def done(self, r: InferRequest, now: int) -> None:
        for s in self.sequences:
            if s.busy is r:
                s.busy = None
        self.settle(now)

    def lose(self, instance: int, now: int) -> list[InferRequest]:
        self.gone.add(instance)
        ended = [s for s in self.sequences if s.place is not None and s.place[1] == instance]
        refused = [r for s in ended for r in s.waiting]
        for s in ended:
            if not s.closed:
                self.lost_at[s.id] = now
            s.waiting, s.closed = [], True
        self.batchers[instance].gone(refused)
        self.settle(now)
        return refused

    def find(self, instance: int, now: int) -> None:
        self.gone.discard(instance)
        self.settle(now)

    def expire(self, now: int) -> list[InferRequest]:
        self.lost_at = {id_: at for id_, at in self.lost_at.items() if now - at < self.rules.idle_ns}
        for s in self.sequences:
            s.closed = s.closed or (s.idle_since is not None and now - s.idle_since >= self.rules.idle_ns)
        self.settle(now)
        late = [s for s in self.sequences if s.place is None and now >= s.deadline]
        refused = [r for s in late for r in s.waiting]
        for s in late:
            s.waiting, s.closed = [], True
        self.settle(now)
        return refused

    def take(self, now: int, instance: int) -> list[InferRequest | None]:
        """By slot, None for one that is filled; of oldest, without slots."""
        found: Sequence[InferRequest | None] = self.direct(now, instance)
        if self.rules.batches:
            found = self.batchers[instance].take(now)
        for s in self.sequences:
            if s.waiting and s.waiting[0] in found:
                s.busy = s.waiting.pop(0)
        return list(found)

    def direct(self, now: int, instance: int) -> list[InferRequest | None]:
        rules = self.rules
        there = {s.place[0]: s.waiting[0] for s in self.sequences
                 if s.place and s.place[1] == instance and s.waiting and s.busy is None}  # fmt: skip
        if not there or (
            len(there) < rules.min_ready and now < min(r.queued_ns for r in there.values()) + rules.delay_ns
        ):
            return []
        shape = there[min(there)].shape_key
        slots = [there.get(slot) for slot in range(rules.n_slots)]
        slots = [r if r is not None and r.shape_key == shape else None for r in slots]
        while slots[-1] is None:
            slots.pop()
        return slots

    def due(self, busy: set[int]) -> float:
        """When something changes, at the latest, though nothing comes."""
        times = [s.idle_since + self.rules.idle_ns for s in self.sequences if s.idle_since is not None]
        times += [int(s.deadline) for s in self.sequences if s.place is None and s.deadline < float("inf")]
        delay = self.rules.batches.delay_ns if self.rules.batches else self.rules.delay_ns
        for s in self.sequences:
            if s.place is not None and s.place[1] not in busy and s.waiting and s.busy is None:
                since = self.ready_since if self.rules.batches else {s.waiting[0]: s.waiting[0].queued_ns}
                times.append(since[s.waiting[0]] + delay)
        return min(times, default=float("inf"))


DIRECT = st.integers(0, 4).flatmap(
    lambda most: st.builds(
        SequenceRules,
        model=st.just("m"),
        n_slots=st.just(max(1, most)),
        max_size=st.just(most),
        idle_ns=st.sampled_from([8_000, 1_000_000]),
        delay_ns=st.sampled_from([0, 6_000]),
        min_ready=st.integers(0, max(1, most)),
    )
)
OLDEST = st.integers(0, 4).flatmap(
    lambda most: st.builds(
        SequenceRules,
        model=st.just("m"),
        n_slots=st.integers(1, 4),
        max_size=st.just(most),
        idle_ns=st.sampled_from([8_000, 1_000_000]),
        batches=st.builds(
            BatchRules,
            max_size=st.just(most),
            preferred=st.frozensets(st.integers(1, most), max_size=2) if most else st.just(frozenset()),
            delay_ns=st.sampled_from([0, 6_000]),
        ),
    )
)
WAITS = [1, 1_000, 2_999, 3_000, 5_000, 6_000, 8_000]  # ns; they meet time-outs, delays and idle times
FLAGS = st.sampled_from([0, 0, 0, START, START, END, START | END])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 4), FLAGS, st.sampled_from("aab"), st.sampled_from([0, 0, 3, 12])),
        st.tuples(st.just("put"), st.integers(1, 4), FLAGS, st.sampled_from("aab"), st.sampled_from([0, 0, 3, 12])),
        st.tuples(st.just("wait"), st.sampled_from(WAITS)),
        st.tuples(st.just("take")),
        st.tuples(st.just("done"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["lose", "find"]), st.integers(0, 1)),
    ),
    max_size=50,
)  # fmt: skip


class Both:
    """The batcher and the model, told the same."""

    def __init__(self, rules: SequenceRules, n_instances: int) -> None:
        self.queue, self.model, self.now = queue_of(rules, n_instances), Model(rules, n_instances), 0
        self.everybody: list[InferRequest] = []
        self.running: dict[int, list[InferRequest]] = {}  # by instance, until all of a batch are done with
        self.places: dict[int, tuple[int, int]] = {}  # of each sequence, where it was found
        self.rules, self.n_instances = rules, n_instances

    def put(self, made: InferRequest) -> None:
        self.everybody.append(made)
        if self.model.refuses(made):
            words = LOST if made.correlation_id in self.model.lost_at else NO_START
            with pytest.raises(StatusError, match=words):
                self.queue.put(made, self.now)
        else:
            self.queue.put(made, self.now)
            self.model.put(made, self.now)

    def take(self) -> None:
        assert self.queue.take_expired(self.now) == self.model.expire(self.now)
        for instance in set(range(self.n_instances)) - set(self.running):
            batch, expected = self.queue.take(self.now, instance), self.model.take(self.now, instance)
            assert self.shown(batch) == expected
            if batch is not None:
                self.running[instance] = list(batch.requests)
                assert batch.size == len(batch.executed_requests) and batch.requests
                for slot, r in enumerate(batch.places):
                    if r in batch.requests:
                        assert self.places.setdefault(id(r.sequence), (slot, instance)) == (slot, instance)
        due = self.queue.due_ns()
        latest = self.model.due(set(self.running))
        assert due is None or due > self.now, "it would be woken for nothing, again and again"
        assert latest == float("inf") or (due is not None and due <= latest)

    def shown(self, batch: Batch | None) -> list[InferRequest | None]:
        return [r if r.id != "null" else None for r in batch.executed_requests] if batch is not None else []

    def done(self, which: int) -> None:
        if self.running:
            instance = sorted(self.running)[which % len(self.running)]
            gone = self.running[instance].pop()
            if not self.running[instance]:
                del self.running[instance]
            self.queue.finish_request(gone, self.now)
            self.queue.finish_request(gone, self.now)  # told twice
            self.model.done(gone, self.now)

    def step(self, what: str, *how: Any) -> None:
        if what == "put":
            self.put(request(*how))
        elif what == "wait":
            self.now += how[0]
        elif what == "take":
            self.take()
        elif what == "done":
            self.done(*how)
        elif what == "lose":
            self.lose(*how)
        elif what == "find":
            self.find(*how)
        elif self.everybody:
            self.cancel(*how)
        assert len(self.queue) == sum(len(s.waiting) for s in self.model.sequences)
        assert self.queue.n_sequences == len(self.model.sequences)

    def end(self) -> None:
        """All that was taken is computed, and nobody waits for more."""
        for instance in range(self.n_instances):
            self.find(instance)
        self.queue.finish(self.now)
        for s in self.model.sequences:
            s.closed = True
        self.model.settle(self.now)
        for _ in range(200 + len(self.queue) * 2):
            if not self.running and not self.queue.n_sequences and self.queue.due_ns() is None:
                break
            self.now += 10_000
            self.take()
            self.done(0)
        assert not self.running and len(self.queue) == self.queue.n_sequences == 0 and self.queue.due_ns() is None

    def lose(self, which: int) -> None:
        """Until it is there again it is given nothing; what it computes ends now or later."""
        which %= self.n_instances
        refused = self.queue.lose_instance(which, f"m_{which}", self.now)
        assert set(refused) == set(self.model.lose(which, self.now)) and len(refused) == len(set(refused))

    def find(self, which: int) -> None:
        self.queue.restore_instance(which % self.n_instances, self.now)
        self.model.find(which % self.n_instances, self.now)

    def cancel(self, which: int) -> None:
        gone = self.everybody[-1 - which % len(self.everybody)]  # that waits, or did
        assert self.queue.cancel(gone, self.now) == self.model.cancel(gone, self.now)
