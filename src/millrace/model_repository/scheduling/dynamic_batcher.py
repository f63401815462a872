"""Triton's dynamic batcher: queues requests and decides which are computed together, as a pure function of time.

Nothing here waits or reads a clock: the owner of a queue passes the time in, and calls again when the queue is due.

Requests are ordered by priority, then age; timed-out requests with the policy DELAY come last within their priority.
A batch is a prefix of that order. It ends before a request that has other shapes or does not fit. Among the prefixes,
the longest one of a preferred size is taken. If there is none, or the oldest request has waited for the queue delay,
the longest prefix is taken; otherwise the batcher waits for further requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from millrace.model_repository.config.enums import TimeoutAction
from millrace.model_repository.config.model_config import ModelConfig, QueuePolicy, SequenceBatching
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError

NEVER = 1 << 63
# In order of arrival, with removal in constant time. A plain dictionary would scan removed entries to find its first.
_Line = OrderedDict[InferRequest, None]


class CloseReason(Enum):
    """Why a batch contains no further requests."""

    SINGLE = "single"  # the model does not batch
    FULL = "full"  # another request would exceed the maximum size
    PREFERRED = "preferred"
    DELAY = "delay"  # the queue delay of the oldest request is over, or zero
    SHAPE = "shape"  # the next request has other shapes or inputs
    SLOTS = "slots"  # enough sequence slots of the instance have a request

    __hash__ = object.__hash__  # Enum's own is slow Python code, and called for every request


@dataclass(slots=True)  # not frozen, which would make creating it slower
class Batch:
    """A batch. places: the requests passed to the instance, if empty sequence slots are filled with null requests"""

    requests: tuple[InferRequest, ...]
    size: int  # total batch size of requests and null requests
    close_reason: CloseReason
    places: tuple[InferRequest, ...] = ()

    @property
    def executed_requests(self) -> tuple[InferRequest, ...]:
        return self.places or self.requests


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Queue policy of one priority. 0: no timeout, no limit"""

    timeout_ns: int = 0
    delays: bool = False  # delay timed-out requests instead of rejecting them
    may_override: bool = False  # a request may set a shorter timeout
    max_size: int = 0

    @classmethod
    def from_policy(cls, policy: QueuePolicy) -> "QueueRules":
        delays = policy.timeout_action is TimeoutAction.DELAY
        timeout_ns = policy.default_timeout_microseconds * 1000
        return cls(timeout_ns, delays, policy.allow_timeout_override, policy.max_queue_size)


@dataclass(frozen=True, slots=True)
class BatchRules:
    """Batching rules of a model. max_size: 0 if it does not batch. levels: queue policies of single priorities"""

    max_size: int = 0
    preferred: frozenset[int] = frozenset()
    delay_ns: int = 0
    n_levels: int = 0
    default_level: int = 0
    default: QueueRules = QueueRules()
    levels: Mapping[int, QueueRules] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: ModelConfig) -> "BatchRules":
        """Return the rules of a completed configuration."""
        batching = config.dynamic_batching
        if config.sequence_batching is not None:
            return cls._from_sequences(config.sequence_batching, config.max_batch_size)
        if batching is None:
            return cls()
        return cls(
            max_size=config.max_batch_size,
            preferred=frozenset(batching.preferred_batch_size),
            delay_ns=batching.max_queue_delay_microseconds * 1000,
            n_levels=batching.priority_levels,
            default_level=batching.default_priority_level,
            default=QueueRules.from_policy(batching.default_queue_policy)
            if batching.default_queue_policy
            else QueueRules(),
            levels={level: QueueRules.from_policy(policy) for level, policy in batching.priority_queue_policy.items()},
        )

    @classmethod
    def _from_sequences(cls, batching: SequenceBatching, max_size: int) -> "BatchRules":
        strategy = batching.oldest or batching.direct
        delay_ns = strategy.max_queue_delay_microseconds * 1000 if strategy else 0
        preferred = frozenset(batching.oldest.preferred_batch_size) if batching.oldest else frozenset[int]()
        return cls(max_size=max_size, preferred=preferred, delay_ns=delay_ns)


class _Level:
    """The requests of one priority; timed-out ones are in `late`, behind the others."""

    __slots__ = ("late", "rules", "waiting")

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self.waiting = _Line()
        self.late = _Line()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.late)


class BatchQueue:
    """Requests of one model that no instance has taken. All times are nanoseconds of one clock."""

    def __init__(self, rules: BatchRules) -> None:
        self._rules = rules
        self._max_preferred = max(rules.preferred, default=0)
        self._levels: dict[int, _Level] = {}  # by priority, the lowest number first
        self._next_deadline_ns = NEVER
        self._wait_until_ns = NEVER
        self._single_close_reasons: dict[int, CloseReason] = {}  # by request size

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def put(self, request: InferRequest, now_ns: int) -> None:
        """Queue a request. raises StatusError if the queue of its priority is full"""
        level = self._level_of(request)
        rules = level.rules
        if rules.max_size and len(level) >= rules.max_size:
            raise StatusError(Code.UNAVAILABLE, f"{request.error_prefix}Exceeds maximum queue size")
        timeout_ns = rules.timeout_ns
        if rules.may_override and request.timeout_us:
            timeout_ns = min(timeout_ns or NEVER, request.timeout_us * 1000)
        # the timeout of a rescheduled request restarts
        since_ns = now_ns if request.queued_ns else request.received_ns or now_ns
        request.queued_ns, request.ready_ns = request.queued_ns or now_ns, now_ns
        request.deadline_ns = since_ns + timeout_ns if timeout_ns else NEVER
        self._next_deadline_ns = min(self._next_deadline_ns, request.deadline_ns)
        level.waiting[request] = None

    def put_back(self, requests: Sequence[InferRequest]) -> None:
        """Return the requests taken last to the front of their queues."""
        for request in reversed(requests):
            waiting = self._level_of(request).waiting
            waiting[request] = None
            waiting.move_to_end(request, last=False)
            self._next_deadline_ns = min(self._next_deadline_ns, request.deadline_ns)

    def _level_of(self, request: InferRequest) -> _Level:
        priority = self._priority(request)
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(self._rules.levels.get(priority, self._rules.default))
            # Drop empty levels: clients may use any number of priorities.
            self._levels = {p: queue for p, queue in sorted(self._levels.items()) if queue is level or len(queue)}
        return level

    def single_batch(self, request: InferRequest) -> Batch:
        """Return the batch of a request that arrives while nothing is queued. The rules must have no delay."""
        size = request.batch_size or 1
        close_reason = self._single_close_reasons.get(size)
        if close_reason is None:
            queue, sample = BatchQueue(self._rules), InferRequest({})
            sample.batch_size = size
            queue.put(sample, 0)
            batch = queue.take(0)
            assert batch is not None, "there is a delay"
            close_reason = self._single_close_reasons[size] = batch.close_reason
        return Batch((request,), size, close_reason)

    def take_expired(self, now_ns: int) -> list[InferRequest]:
        """Remove and return timed-out requests to reject; move those that are only delayed behind the others."""
        if now_ns <= self._next_deadline_ns:
            return []
        refused: list[InferRequest] = []
        self._next_deadline_ns = NEVER
        for level in self._levels.values():
            over = [r for r in level.waiting if now_ns > r.deadline_ns]
            if over:
                level.waiting = _line(r for r in level.waiting if now_ns <= r.deadline_ns)
                if level.rules.delays:
                    level.late.update(_line(over))
                else:
                    refused.extend(over)
            self._next_deadline_ns = min(self._next_deadline_ns, *(r.deadline_ns for r in level.waiting), NEVER)
        return refused

    def remove(self, request: InferRequest) -> bool:
        """Remove a request in constant time; False if it is no longer queued."""
        level = self._levels.get(self._priority(request))
        for line in (level.waiting, level.late) if level is not None else ():
            if request in line:
                del line[request]
                return True
        return False

    def drain(self) -> list[InferRequest]:
        """Remove and return all requests."""
        requests = list(self._in_order())
        self._levels.clear()
        return requests

    def take(self, now_ns: int) -> Batch | None:
        """Return the batch to compute now; None if nothing waits or more may arrive: call again at `due_ns`."""
        self._wait_until_ns = NEVER
        if not self._rules.max_size:
            return self._pop_single()
        n, closed, oldest_ns = self._choose(now_ns)
        if n and closed is None:
            self._wait_until_ns = oldest_ns + self._rules.delay_ns
            return None
        return self._pop(n, closed) if closed is not None else None

    def due_ns(self) -> int | None:
        """Return when the results of `take_expired` or `take` change if no request arrives."""
        due_ns = min(self._wait_until_ns, self._next_deadline_ns + 1)
        return due_ns if due_ns < NEVER else None

    def _choose(self, now_ns: int) -> tuple[int, CloseReason | None, int]:
        """Return the length of the batch, its close reason (None: wait for more) and the oldest arrival time."""
        rules, key = self._rules, None
        n = size = 0
        oldest_ns = NEVER
        best: tuple[int, CloseReason] | None = None
        end: CloseReason | None = None
        for request in self._in_order():
            items = request.batch_size or 1
            if n == 0:
                key = request.shape_key
            else:
                if best is None and size + items > self._max_preferred:
                    best = n, CloseReason.FULL
                if size + items > rules.max_size:
                    end = CloseReason.FULL
                    break
                if request.shape_key != key:
                    end = CloseReason.SHAPE
                    break
            n, size, oldest_ns = n + 1, size + items, min(oldest_ns, request.ready_ns)
            if size in rules.preferred:
                best = n, CloseReason.FULL if size == rules.max_size else CloseReason.PREFERRED
            if size == rules.max_size:
                end = CloseReason.FULL
                break
        is_over = rules.delay_ns > 0 and now_ns - oldest_ns >= rules.delay_ns
        if best is not None and not is_over:
            return *best, oldest_ns
        if end is None and n:
            immediate_reason = CloseReason.DELAY if is_over or not rules.delay_ns else None
            end = CloseReason.FULL if not is_over and size >= self._max_preferred else immediate_reason
        return n, end, oldest_ns

    def _priority(self, request: InferRequest) -> int:
        priority = request.priority
        return priority if 1 <= priority <= self._rules.n_levels else self._rules.default_level

    def _in_order(self) -> Iterator[InferRequest]:
        for level in self._levels.values():
            yield from level.waiting
            yield from level.late

    def _pop_single(self) -> Batch | None:
        """Remove the first request and return it as a batch; None if there is none."""
        for level in self._levels.values():
            line = level.waiting or level.late
            if line:
                request, _ = line.popitem(last=False)
                return Batch((request,), request.batch_size or 1, CloseReason.SINGLE)
        return None

    def _pop(self, n: int, closed: CloseReason) -> Batch | None:
        """Remove the first `n` requests and return them as a batch; None if there are none."""
        requests: list[InferRequest] = []
        for level in self._levels.values():
            for line in (level.waiting, level.late):
                while line and len(requests) < n:
                    requests.append(line.popitem(last=False)[0])
        return Batch(tuple(requests), sum(r.batch_size or 1 for r in requests), closed) if requests else None


def _line(requests: Iterable[InferRequest]) -> _Line:
    return _Line.fromkeys(requests)
