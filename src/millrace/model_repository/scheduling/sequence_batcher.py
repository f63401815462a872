"""Triton's sequence batcher: decides which requests of which sequences run together, as a pure function of time.

A sequence begins with a request flagged START and occupies a slot of one instance until it ends; its requests run there
in order, one at a time. It ends when the request flagged END has finished, when none of its requests waited or ran for
the idle time, when a waiting request is cancelled (earlier ones still run), or when another sequence with its id
begins. Sequences without a free slot wait in order, each after those with its own id; only there the timeout of a
request applies, and it is that of the sequence.

Strategy `direct`: a batch has one place per slot of the instance. Places of slots without a request, or with other
shapes, hold null requests, so that a sequence always has the same place. Strategy `oldest`: the next requests of an
instance's sequences are batched by the dynamic batcher.

As in `dynamic_batcher.py`, nothing here waits or reads a clock.
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
from millrace.model_repository.scheduling.dynamic_batcher import NEVER, Batch, BatchQueue, BatchRules, CloseReason

log = logging.getLogger(__name__)
Id = int | str
Key = tuple[str, Id]  # tenant (empty without several API keys) and correlation ID


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """Rules of a sequence batcher. n_slots: per instance. min_ready: filled slots that `direct` waits for, 0 for none.
    batches: the batching rules of strategy `oldest`
    """

    model: str
    n_slots: int
    max_size: int = 0  # 0 if the model does not batch
    idle_ns: int = 1_000_000_000
    delay_ns: int = 0
    min_ready: int = 0
    batches: BatchRules | None = None

    @classmethod
    def from_config(cls, config: ModelConfig) -> "SequenceRules":
        """Return the rules of a completed configuration with sequence batching."""
        batching, size = config.sequence_batching, config.max_batch_size
        assert batching is not None, config.name
        rules = cls(config.name, max(1, size), size, batching.max_sequence_idle_microseconds * 1000)
        if (oldest := batching.oldest) is not None:
            delay_ns = oldest.max_queue_delay_microseconds * 1000
            batches = BatchRules(size, frozenset(oldest.preferred_batch_size), delay_ns)
            return replace(rules, n_slots=max(oldest.max_candidate_sequences, 0) or rules.n_slots, batches=batches)
        if (direct := batching.direct) is None or not direct.minimum_slot_utilization:
            return rules
        delay_ns = direct.max_queue_delay_microseconds * 1000
        return replace(
            rules, delay_ns=delay_ns, min_ready=_min_ready_slots(direct.minimum_slot_utilization, rules.n_slots)
        )


def _min_ready_slots(utilization: float, n_slots: int) -> int:
    """Return the fewest slots that reach the utilization, computed in float32 as in the protocol."""

    def is_enough(n: int) -> bool:
        return bool(np.float32(n) / np.float32(n_slots) >= np.float32(utilization))

    # bisection, because a configuration may have 2**31 slots
    return bisect_left(range(1, n_slots + 1), True, key=is_enough) + 1


class InferSequence:
    """A sequence. waiting: requests that no instance has taken. state: the model's implicit state"""

    __slots__ = (
        "busy", "deadline_ns", "id", "idle_ns", "is_closed", "is_offered", "place", "requested_outputs", "state",
        "waiting",
    )  # fmt: skip

    def __init__(self, id_: Key) -> None:
        self.id = id_
        self.waiting: deque[InferRequest] = deque()
        self.busy: InferRequest | None = None  # in execution
        self.is_offered = False  # its first waiting request may join a batch
        self.is_closed = False  # accepts no further requests
        self.place: tuple[int, int] | None = None  # slot, instance
        self.deadline_ns = NEVER
        self.idle_ns = 0  # start of idling
        self.state: dict[str, Any] = {}
        self.requested_outputs: tuple[str, ...] = ()  # outputs that the client of `busy` requested


class SequenceBatcher:
    """Sequence batcher of one model. All times are nanoseconds of one clock."""

    timed_out = "timeout of the corresponding sequence has been expired"

    def __init__(
        self,
        rules: SequenceRules,
        n_instances: int,
        ready: Callable[[InferRequest], None],
        null: Callable[[InferRequest], InferRequest],
    ) -> None:
        """ready: called with the next request of a sequence before it may join a batch.
        null: returns a null request for an empty slot, with the shapes of the given request
        """
        self._rules, self._ready, self._null_request = rules, ready, null
        # Places are in use, free again (a heap) or never used, because a configuration may have any number of them.
        self._slots: list[dict[int, InferSequence]] = [{} for _ in range(n_instances)]
        self._free: list[tuple[int, int]] = []
        self._n_used, self._n_places = 0, rules.n_slots * n_instances
        self._by_id: dict[Key, deque[InferSequence]] = {}  # open sequences; the newest of an id is last
        self._backlog: OrderedDict[InferSequence, None] = OrderedDict()  # sequences without a slot
        self._idle: OrderedDict[InferSequence, None] = OrderedDict()  # with a slot, no request; longest idle first
        self._offered = [BatchQueue(rules.batches or BatchRules()) for _ in range(n_instances)]
        self._wait_until_ns = [NEVER] * n_instances
        self._next_deadline_ns = NEVER
        self._n_waiting = 0
        self._lost_instances: dict[int, list[tuple[int, int]]] = {}  # lost instances, with their free places
        self._lost_sequences: OrderedDict[Key, tuple[str, int]] = (
            OrderedDict()
        )  # their sequences: instance name and time of loss

    def __len__(self) -> int:
        return self._n_waiting

    @property
    def n_sequences(self) -> int:
        """Number of open sequences."""
        return sum(map(len, self._by_id.values()))

    # ------------------------------------------------------------------ requests

    def put(self, request: InferRequest, now_ns: int) -> None:
        """Queue a request. raises StatusError with Triton's text"""
        model, id_ = self._rules.model, request.correlation_id
        if request.batch_size > 1:
            message = "must specify batch-size 1 due to requirements of sequence batcher"
            raise invalid(f"inference request to model '{model}' {message}")
        if not id_:
            raise invalid(f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID")
        key = request.tenant, id_
        line = self._by_id.get(key)
        last = line[-1] if line else None
        if request.flags & START:
            self._lost_sequences.pop(key, None)
            sequence = InferSequence(key)
            self._by_id.setdefault(key, deque()).append(sequence)
            self._backlog[sequence] = None
        elif (last is None or last.is_closed) and key in self._lost_sequences:
            raise self.lost_error(id_, self._lost_sequences[key][0])
        elif last is None or last.is_closed:
            message = "must specify the START flag on the first request of the sequence"
            raise invalid(f"inference request for sequence {id_} to model '{model}' {message}")
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

    def cancel(self, request: InferRequest, now_ns: int) -> list[InferRequest]:
        """Remove and return a waiting request and those behind it; empty if it does not wait."""
        sequence = request.sequence
        if sequence is None or request not in sequence.waiting:
            return []
        index = list(sequence.waiting).index(request)
        gone = list(sequence.waiting)[index:]
        if not index:
            self._unoffer(sequence)
        for _ in gone:
            sequence.waiting.pop()
        self._n_waiting -= len(gone)
        sequence.is_closed = True
        self._end_if_over(sequence)
        self._fill(now_ns)
        return gone

    def finish_request(self, request: InferRequest, now_ns: int) -> None:
        """Record that a request has finished, so that the next of its sequence may run."""
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

    def take_expired(self, now_ns: int) -> list[InferRequest]:
        """End idle sequences; then end those that timed out waiting for a slot, and return their requests."""
        while self._idle and now_ns - (sequence := next(iter(self._idle))).idle_ns >= self._rules.idle_ns:
            sequence.is_closed = True
            self._end_if_over(sequence)
        while self._lost_sequences and now_ns - next(iter(self._lost_sequences.values()))[1] >= self._rules.idle_ns:
            self._lost_sequences.popitem(last=False)
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

    def lost_error(self, id_: Id, instance: str) -> StatusError:
        message = f"inference request for sequence {id_} to model '{self._rules.model}'"
        reason = f"instance {instance}, which had the sequence, ended, and what it knew of it is lost"
        return StatusError(Code.UNAVAILABLE, f"{message}: {reason}; begin it again with the START flag")

    def lose_instance(self, instance: int, name: str, now_ns: int) -> list[InferRequest]:
        """End all sequences of a lost instance and return their waiting requests.

        It gets no sequences until `restore_instance`. For the idle time, further requests of these except START fail.
        """
        self._lost_instances.setdefault(instance, [])
        gone: list[InferRequest] = []
        for sequence in list(self._slots[instance].values()):
            self._unoffer(sequence)
            gone += sequence.waiting
            sequence.waiting.clear()
            if not sequence.is_closed:
                self._lost_sequences[sequence.id] = name, now_ns
                self._lost_sequences.move_to_end(sequence.id)
            sequence.is_closed = True
            self._end_if_over(sequence)
        self._n_waiting -= len(gone)
        self._fill(now_ns)
        return gone

    def restore_instance(self, instance: int, now_ns: int) -> None:
        """Make a restarted instance available again."""
        for place in self._lost_instances.pop(instance, ()):
            heapq.heappush(self._free, place)
        self._fill(now_ns)

    def finish(self, now_ns: int) -> None:
        """Close all sequences; waiting requests are still computed."""
        for sequence in list(self._all_sequences()):
            sequence.is_closed = True
            self._end_if_over(sequence)
        self._fill(now_ns)

    def drain(self) -> list[InferRequest]:
        """Remove and return all waiting requests; their sequences end after the requests in execution."""
        requests = [request for sequence in self._all_sequences() for request in sequence.waiting]
        for sequence in list(self._all_sequences()):
            self._unoffer(sequence)
            sequence.waiting.clear()
            sequence.is_closed = True
            self._end_if_over(sequence)
        self._n_waiting = 0
        return requests

    # ------------------------------------------------------------------ batches

    def take(self, now_ns: int, instance: int) -> Batch | None:
        """Return the batch that an idle instance should compute; None if there is none before `due_ns`."""
        self._wait_until_ns[instance] = NEVER
        batch = self._direct(now_ns, instance) if self._rules.batches is None else self._offered[instance].take(now_ns)
        for request in batch.requests if batch is not None else ():
            sequence = request.sequence
            sequence.waiting.popleft()
            sequence.busy, sequence.is_offered = request, False
            self._n_waiting -= 1
        return batch

    def due_ns(self) -> int | None:
        """Return when the results of `take_expired` or `take` change if no request arrives."""
        idle_ns = next(iter(self._idle)).idle_ns + self._rules.idle_ns if self._idle else NEVER
        offered = (due_ns for queue in self._offered if (due_ns := queue.due_ns()) is not None)
        due_ns = min(idle_ns, self._next_deadline_ns, *self._wait_until_ns, *offered)
        return due_ns if due_ns < NEVER else None

    def _direct(self, now_ns: int, instance: int) -> Batch | None:
        rules, slots = self._rules, self._slots[instance]
        ready = {slot: sequence.waiting[0] for slot, sequence in sorted(slots.items()) if sequence.is_offered}
        if not ready:
            return None
        oldest_ns = min(request.queued_ns for request in ready.values())
        if rules.delay_ns and len(ready) < rules.min_ready and now_ns - oldest_ns < rules.delay_ns:
            self._wait_until_ns[instance] = oldest_ns + rules.delay_ns
            return None
        first = next(iter(ready.values()))
        chosen = {slot: request for slot, request in ready.items() if request.shape_key == first.shape_key}
        closed = CloseReason.DELAY
        if not rules.max_size:
            closed = CloseReason.SINGLE
        elif len(chosen) < len(ready):
            closed = CloseReason.SHAPE
        elif len(chosen) == rules.n_slots:
            closed = CloseReason.FULL
        elif rules.delay_ns and len(ready) >= rules.min_ready > 0:
            closed = CloseReason.SLOTS
        places = tuple(chosen[slot] if slot in chosen else self._null_request(first) for slot in range(max(chosen) + 1))
        return Batch(tuple(chosen.values()), len(places), closed, places)

    # ------------------------------------------------------------------ slots

    def _all_sequences(self) -> Iterator[InferSequence]:
        for line in self._by_id.values():
            yield from line

    def _end_if_over(self, sequence: InferSequence) -> None:
        """Remove an ended sequence and free its slot; the caller fills free slots afterwards."""
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
        """Give free slots to waiting sequences in order, only the first of each id."""
        while self._backlog and self._has_place():
            sequence = next((s for s in self._backlog if self._by_id[s.id][0] is s), None)
            if sequence is None:
                return
            del self._backlog[sequence]
            sequence.place = slot, instance = self._free_place()
            self._slots[instance][slot] = sequence
            self._offer(sequence, now_ns)

    def _has_place(self) -> bool:
        """Return whether an available instance has a free place; places of lost instances are set aside."""
        if len(self._lost_instances) == len(self._slots):
            return False
        while self._free and (gone := self._lost_instances.get(self._free[0][1])) is not None:
            gone.append(heapq.heappop(self._free))
        while not self._free and self._n_used < self._n_places:
            slot, instance = divmod(self._n_used, len(self._slots))
            if instance not in self._lost_instances:
                break
            self._lost_instances[instance].append((slot, instance))
            self._n_used += 1
        return bool(self._free) or self._n_used < self._n_places

    def _free_place(self) -> tuple[int, int]:
        """Return the lowest free slot, round-robin over instances."""
        if self._free:
            return heapq.heappop(self._free)
        self._n_used += 1
        return divmod(self._n_used - 1, len(self._slots))

    def _offer(self, sequence: InferSequence, now_ns: int) -> None:
        """Let the next request of a sequence join a batch."""
        if sequence.place is None or sequence.is_offered or not sequence.waiting or sequence.busy is not None:
            return
        request, sequence.is_offered = sequence.waiting[0], True
        self._ready(request)
        if self._rules.batches is not None:
            self._offered[sequence.place[1]].put(request, now_ns)

    def _unoffer(self, sequence: InferSequence) -> None:
        if sequence.is_offered and sequence.place is not None:
            self._offered[sequence.place[1]].remove(sequence.waiting[0])
        sequence.is_offered = False
