"""Which requests of which sequences are computed together: Triton's sequence batcher, as a function of time.

A sequence is begun by a request with START, and has a slot of an instance until it is over: its requests are computed
there, in their order, the next when the one before is done with. It is over when the request with END is done with,
when none of its requests waited or was computed for the idle time, when one of those that wait is cancelled (the ones
before it are still computed), or when another with its id begins. Sequences for which no slot is free wait in their
order, each after those of its own id; only there a request's time-out counts, and it is that of the sequence.

`direct`: a batch of an instance has a place for each of its slots; those of slots that have nothing to compute, or
something of other shapes, are filled, so that a sequence is always found at the same place. `oldest`: what may be
computed next of an instance's sequences is batched as the dynamic batcher has it.

As in `dynamic_batcher.py`, nothing here waits or looks at a clock.
"""

import heapq
import logging
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.infer_request import END, START, InferRequest
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.scheduling.dynamic_batcher import NEVER, Batch, BatchQueue, BatchRules, Closed

log = logging.getLogger(__name__)
Id = int | str
Key = tuple[str, Id]  # whose sequence it is, where there are several API keys, and its correlation ID


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """n_slots: of each instance. least_ready: direct does not wait for more than so many slots with requests; 0: for
    none. batches: the rules of oldest, where it is that"""

    model: str
    n_slots: int
    max_size: int = 0  # 0 for a model without batches
    idle_ns: int = 1_000_000_000
    delay_ns: int = 0
    least_ready: int = 0
    batches: BatchRules | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> "SequenceRules":
        """config: completed, and it has sequences"""
        said, size = config.sequence_batching, config.max_batch_size
        assert said is not None, config.name
        rules = cls(config.name, max(1, size), size, said.max_sequence_idle_microseconds * 1000)
        if (oldest := said.oldest) is not None:
            delay_ns = oldest.max_queue_delay_microseconds * 1000
            batches = BatchRules(size, frozenset(oldest.preferred_batch_size), delay_ns)
            return replace(rules, n_slots=max(oldest.max_candidate_sequences, 0) or rules.n_slots, batches=batches)
        if (direct := said.direct) is None or not direct.minimum_slot_utilization:
            return rules
        delay_ns = direct.max_queue_delay_microseconds * 1000
        return replace(rules, delay_ns=delay_ns, least_ready=_least(direct.minimum_slot_utilization, rules.n_slots))


def _least(utilization: float, n_slots: int) -> int:
    """The fewest slots that are so large a part of all, in the protocol's own float32."""

    def is_enough(n: int) -> bool:
        return bool(np.float32(n) / np.float32(n_slots) >= np.float32(utilization))

    # not one by one: a configuration may have 2**31 of them
    return bisect_left(range(1, n_slots + 1), True, key=is_enough) + 1


class Sequence:
    """`waiting`: what no instance has taken; `state`: of its model, where the scheduler holds it."""

    __slots__ = (
        "asked", "busy", "deadline_ns", "id", "idle_ns", "is_closed", "is_offered", "place", "state", "waiting"
    )  # fmt: skip

    def __init__(self, id_: Key) -> None:
        self.id = id_
        self.waiting: deque[InferRequest] = deque()
        self.busy: InferRequest | None = None  # that an instance has taken
        self.is_offered = False  # the first that waits may be in a batch
        self.is_closed = False  # no more comes of it
        self.place: tuple[int, int] | None = None  # slot, instance
        self.deadline_ns = NEVER
        self.idle_ns = 0  # since when it is so
        self.state: dict[str, Any] = {}
        self.asked: tuple[str, ...] = ()  # outputs, by the client of what is busy


class SequenceBatcher:
    """The sequences of one model. All times are nanoseconds of one clock."""

    timed_out = "timeout of the corresponding sequence has been expired"

    def __init__(
        self,
        rules: SequenceRules,
        n_instances: int,
        ready: Callable[[InferRequest], None],
        null: Callable[[InferRequest], InferRequest],
    ) -> None:
        """ready: called with a request that is the next of its sequence, before it may be in a batch
        null: what stands in the place of a slot without a request, beside one like this"""
        self._rules, self._ready, self._null = rules, ready, null
        # Places are in use, free again (a heap), or were never used: a configuration may have any number of them.
        self._slots: list[dict[int, Sequence]] = [{} for _ in range(n_instances)]
        self._free: list[tuple[int, int]] = []
        self._n_used, self._n_places = 0, rules.n_slots * n_instances
        self._by_id: dict[Key, deque[Sequence]] = {}  # those that are not over; of an id the newest is last
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()  # those without a slot
        self._idle: OrderedDict[Sequence, None] = OrderedDict()  # with a slot and nothing to do, the longest first
        self._offered = [BatchQueue(rules.batches or BatchRules()) for _ in range(n_instances)]
        self._wait_until_ns = [NEVER] * n_instances
        self._next_deadline_ns = NEVER
        self._n_waiting = 0
        self._gone: dict[int, list[tuple[int, int]]] = {}  # instances that are, and their places that are free
        self._lost: OrderedDict[Key, tuple[str, int]] = OrderedDict()  # sequences that were there: where, and when

    def __len__(self) -> int:
        return self._n_waiting

    @property
    def n_sequences(self) -> int:
        """That are not over."""
        return sum(map(len, self._by_id.values()))

    # ------------------------------------------------------------------ requests

    def put(self, request: InferRequest, now_ns: int) -> None:
        """raises StatusError, in Triton's words"""
        model, id_ = self._rules.model, request.correlation_id
        if request.batch_size > 1:
            what = "must specify batch-size 1 due to requirements of sequence batcher"
            raise invalid(f"inference request to model '{model}' {what}")
        if not id_:
            raise invalid(f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID")
        key = request.tenant, id_
        line = self._by_id.get(key)
        last = line[-1] if line else None
        if request.flags & START:
            self._lost.pop(key, None)
            sequence = Sequence(key)
            self._by_id.setdefault(key, deque()).append(sequence)
            self._backlog[sequence] = None
        elif (last is None or last.is_closed) and key in self._lost:
            raise self.was_lost(id_, self._lost[key][0])
        elif last is None or last.is_closed:
            what = "must specify the START flag on the first request of the sequence"
            raise invalid(f"inference request for sequence {id_} to model '{model}' {what}")
        else:
            sequence, last = last, None
        request.queued_ns, request.sequence = now_ns, sequence
        sequence.waiting.append(request)
        sequence.is_closed = bool(request.flags & END)
        self._n_waiting += 1
        self._idle.pop(sequence, None)
        if last is not None and not last.is_closed:
            log.warning("%s: sequence %s begins again before it has ended", model, id_)
            last.is_closed = True
            self._end_if_over(last)
        self._fill(now_ns)
        self._offer(sequence, now_ns)
        if sequence.place is None and request.timeout_us:
            sequence.deadline_ns = min(sequence.deadline_ns, now_ns + request.timeout_us * 1000)
            self._next_deadline_ns = min(self._next_deadline_ns, sequence.deadline_ns)

    def leave(self, request: InferRequest, now_ns: int) -> list[InferRequest]:
        """It is cancelled: whatever of its sequence waits from it on, taken out; none where it does not wait."""
        sequence = request.sequence
        if sequence is None or request not in sequence.waiting:
            return []
        kept = list(sequence.waiting).index(request)
        gone = list(sequence.waiting)[kept:]
        if not kept:
            self._unoffer(sequence)
        for _ in gone:
            sequence.waiting.pop()
        self._n_waiting -= len(gone)
        sequence.is_closed = True
        self._end_if_over(sequence)
        self._fill(now_ns)
        return gone

    def done(self, request: InferRequest, now_ns: int) -> None:
        """It was computed, and the next of its sequence may be."""
        sequence = request.sequence
        if sequence is None or sequence.busy is not request:
            return
        sequence.busy = None
        self._end_if_over(sequence)
        self._fill(now_ns)
        if sequence.place is not None and not sequence.waiting:
            sequence.idle_ns = now_ns
            self._idle[sequence] = None
        self._offer(sequence, now_ns)

    def expired(self, now_ns: int) -> list[InferRequest]:
        """End sequences that are idle for too long, then those that waited too long for a slot: their requests."""
        while self._idle and now_ns - (sequence := next(iter(self._idle))).idle_ns >= self._rules.idle_ns:
            sequence.is_closed = True
            self._end_if_over(sequence)
        while self._lost and now_ns - next(iter(self._lost.values()))[1] >= self._rules.idle_ns:
            self._lost.popitem(last=False)
        self._fill(now_ns)
        if now_ns < self._next_deadline_ns:
            return []
        refused: list[InferRequest] = []
        for sequence in [s for s in self._backlog if now_ns >= s.deadline_ns]:
            refused += sequence.waiting
            self._n_waiting -= len(sequence.waiting)
            sequence.waiting.clear()
            sequence.is_closed = True
            self._end_if_over(sequence)
        self._next_deadline_ns = min((s.deadline_ns for s in self._backlog), default=NEVER)
        return refused

    def was_lost(self, id_: Id, instance: str) -> StatusError:
        what = f"inference request for sequence {id_} to model '{self._rules.model}'"
        why = f"instance {instance}, which had the sequence, ended, and what it knew of it is lost"
        return StatusError(Code.UNAVAILABLE, f"{what}: {why}; begin it again with the START flag")

    def lost(self, instance: int, name: str, now_ns: int) -> list[InferRequest]:
        """An instance, by its number, knows nothing any more: its sequences are over; their requests that wait.

        Until `found` it is given no other. Whatever comes of these within the idle time is refused, but for a START.
        """
        self._gone.setdefault(instance, [])
        gone: list[InferRequest] = []
        for sequence in list(self._slots[instance].values()):
            self._unoffer(sequence)
            gone += sequence.waiting
            sequence.waiting.clear()
            if not sequence.is_closed:
                self._lost[sequence.id] = name, now_ns
                self._lost.move_to_end(sequence.id)
            sequence.is_closed = True
            self._end_if_over(sequence)
        self._n_waiting -= len(gone)
        self._fill(now_ns)
        return gone

    def found(self, instance: int, now_ns: int) -> None:
        """It is there again."""
        for place in self._gone.pop(instance, ()):
            heapq.heappush(self._free, place)
        self._fill(now_ns)

    def holders(self, request: InferRequest) -> set[int] | None:
        """Instances one of which must be done with what it computes before anything happens to a request that waits.

        None: something may happen sooner, by a client who ends a sequence, or by one that is idle for too long
        """
        sequence = self._by_id[request.sequence.id][0]  # those of an id come one after the other
        holding = [sequence] if sequence.place is not None else [s for slots in self._slots for s in slots.values()]
        if request.sequence is sequence and sequence.place is not None:
            return {sequence.place[1]}
        if not holding or any(one.busy is None for one in holding):
            return None
        return {one.place[1] for one in holding if one.place is not None}

    def finish(self, now_ns: int) -> None:
        """No request comes any more: what waits is computed, and nothing waits for more of a sequence."""
        for sequence in list(self._everybody()):
            sequence.is_closed = True
            self._end_if_over(sequence)
        self._fill(now_ns)

    def drained(self) -> list[InferRequest]:
        """All that wait, taken out; with what is being computed, their sequences are over."""
        found = [request for sequence in self._everybody() for request in sequence.waiting]
        for sequence in list(self._everybody()):
            self._unoffer(sequence)
            sequence.waiting.clear()
            sequence.is_closed = True
            self._end_if_over(sequence)
        self._n_waiting = 0
        return found

    # ------------------------------------------------------------------ batches

    def take(self, now_ns: int, instance: int) -> Batch | None:
        """What an instance that computes nothing is to compute; None: nothing now, ask again when it is `due_ns`."""
        self._wait_until_ns[instance] = NEVER
        batch = self._direct(now_ns, instance) if self._rules.batches is None else self._offered[instance].take(now_ns)
        for request in batch.requests if batch is not None else ():
            sequence = request.sequence
            sequence.waiting.popleft()
            sequence.busy, sequence.is_offered = request, False
            self._n_waiting -= 1
        return batch

    def due_ns(self) -> int | None:
        """When `expired` or `take` would say something else than they did, though nothing comes."""
        idle_ns = next(iter(self._idle)).idle_ns + self._rules.idle_ns if self._idle else NEVER
        offered = (due_ns for queue in self._offered if (due_ns := queue.due_ns()) is not None)
        due_ns = min(idle_ns, self._next_deadline_ns, *self._wait_until_ns, *offered)
        return due_ns if due_ns < NEVER else None

    def _direct(self, now_ns: int, instance: int) -> Batch | None:
        rules, slots = self._rules, self._slots[instance]
        ready = {slot: one.waiting[0] for slot, one in sorted(slots.items()) if one.is_offered}
        if not ready:
            return None
        oldest_ns = min(request.queued_ns for request in ready.values())
        if rules.delay_ns and len(ready) < rules.least_ready and now_ns - oldest_ns < rules.delay_ns:
            self._wait_until_ns[instance] = oldest_ns + rules.delay_ns
            return None
        first = next(iter(ready.values()))
        taken = {slot: request for slot, request in ready.items() if request.shape_key == first.shape_key}
        closed = Closed.DELAY
        if not rules.max_size:
            closed = Closed.SINGLE
        elif len(taken) < len(ready):
            closed = Closed.SHAPE
        elif len(taken) == rules.n_slots:
            closed = Closed.FULL
        elif rules.delay_ns and len(ready) >= rules.least_ready > 0:
            closed = Closed.SLOTS
        places = tuple(taken[slot] if slot in taken else self._null(first) for slot in range(max(taken) + 1))
        return Batch(tuple(taken.values()), len(places), closed, places)

    # ------------------------------------------------------------------ slots

    def _everybody(self) -> Iterator[Sequence]:
        for line in self._by_id.values():
            yield from line

    def _end_if_over(self, sequence: Sequence) -> None:
        """Its slot is free then; whoever calls this fills it, once all that is to be over is."""
        if not sequence.is_closed or sequence.waiting or sequence.busy is not None:
            return
        line = self._by_id[sequence.id]
        line.remove(sequence)
        if not line:
            del self._by_id[sequence.id]
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)
        if sequence.place is not None:
            slot, instance = sequence.place
            del self._slots[instance][slot]
            sequence.place = None
            heapq.heappush(self._free, (slot, instance))

    def _fill(self, now_ns: int) -> None:
        """Give free slots to those that wait for one, the first of their id, in their order."""
        while self._backlog and self._has_place():
            sequence = next((s for s in self._backlog if self._by_id[s.id][0] is s), None)
            if sequence is None:
                return
            del self._backlog[sequence]
            sequence.place = slot, instance = self._free_place()
            self._slots[instance][slot] = sequence
            self._offer(sequence, now_ns)

    def _has_place(self) -> bool:
        """Whether one is free, of an instance that is there; those of others are put aside on the way to it."""
        if len(self._gone) == len(self._slots):
            return False
        while self._free and (gone := self._gone.get(self._free[0][1])) is not None:
            gone.append(heapq.heappop(self._free))
        while not self._free and self._n_used < self._n_places:
            slot, instance = divmod(self._n_used, len(self._slots))
            if instance not in self._gone:
                break
            self._gone[instance].append((slot, instance))
            self._n_used += 1
        return bool(self._free) or self._n_used < self._n_places

    def _free_place(self) -> tuple[int, int]:
        """The lowest slot, of the instances in turn."""
        if self._free:
            return heapq.heappop(self._free)
        self._n_used += 1
        return divmod(self._n_used - 1, len(self._slots))

    def _offer(self, sequence: Sequence, now_ns: int) -> None:
        """The next of it may be in a batch."""
        if sequence.place is None or sequence.is_offered or not sequence.waiting or sequence.busy is not None:
            return
        request, sequence.is_offered = sequence.waiting[0], True
        self._ready(request)
        if self._rules.batches is not None:
            self._offered[sequence.place[1]].put(request, now_ns)

    def _unoffer(self, sequence: Sequence) -> None:
        if sequence.is_offered and sequence.place is not None:
            self._offered[sequence.place[1]].leave(sequence.waiting[0])
        sequence.is_offered = False
