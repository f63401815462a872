"""Which requests wait, and which of them are computed together: Triton's dynamic batcher, as a function of time.

Nothing here waits or looks at a clock: whoever owns a queue says what time it is, and asks again when it is due.

Requests are looked at by priority, then age; those whose time is over and whose policy is to delay stand behind the
others of their priority. A batch is a beginning of that order. It ends before a request of other shapes, or that is too
large for it. Of the beginnings, the longest whose size is a preferred one is taken; where there is none, or the oldest
has waited for the delay, the longest; and nothing as long as more may come in time.
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
# In the order in which they came; whoever is in the middle leaves at once. A plain dictionary would look at all that
# left before its first.
_Line = OrderedDict[InferRequest, None]


class Closed(Enum):
    """Why a batch has no more requests."""

    SINGLE = "single"  # the model's requests are computed one by one
    FULL = "full"  # one more would make it too large
    PREFERRED = "preferred"
    DELAY = "delay"  # the oldest may not wait longer, or none may wait
    SHAPE = "shape"  # the next has other shapes, or other inputs
    SLOTS = "slots"  # so many of an instance's sequences have a request as are waited for

    __hash__ = object.__hash__  # Enum's own is written in Python, and looked up by every request


@dataclass(frozen=True, slots=True)
class Batch:
    """places: what an instance is given, where that is more than the requests, as slots without one are filled"""

    requests: tuple[InferRequest, ...]
    size: int  # of all their items, and places
    closed: Closed
    places: tuple[InferRequest, ...] = ()

    @property
    def given(self) -> tuple[InferRequest, ...]:
        return self.places or self.requests


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Of the requests of one priority. 0: no time-out, no limit"""

    timeout_ns: int = 0
    delays: bool = False  # those whose time is over, in place of refusing them
    may_override: bool = False  # a request may say a shorter time
    max_size: int = 0

    @classmethod
    def of(cls, policy: QueuePolicy) -> "QueueRules":
        delays = policy.timeout_action is TimeoutAction.DELAY
        timeout_ns = policy.default_timeout_microseconds * 1000
        return cls(timeout_ns, delays, policy.allow_timeout_override, policy.max_queue_size)


@dataclass(frozen=True, slots=True)
class BatchRules:
    """max_size: 0 where requests are computed one by one. levels: of priorities that have rules of their own"""

    max_size: int = 0
    preferred: frozenset[int] = frozenset()
    delay_ns: int = 0
    n_levels: int = 0
    default_level: int = 0
    default: QueueRules = QueueRules()
    levels: Mapping[int, QueueRules] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig) -> "BatchRules":
        """config: completed"""
        said = config.dynamic_batching
        if config.sequence_batching is not None:
            return cls._of_sequences(config.sequence_batching, config.max_batch_size)
        if said is None:
            return cls()
        return cls(
            max_size=config.max_batch_size,
            preferred=frozenset(said.preferred_batch_size),
            delay_ns=said.max_queue_delay_microseconds * 1000,
            n_levels=said.priority_levels,
            default_level=said.default_priority_level,
            default=QueueRules.of(said.default_queue_policy) if said.default_queue_policy else QueueRules(),
            levels={level: QueueRules.of(policy) for level, policy in said.priority_queue_policy.items()},
        )

    @classmethod
    def _of_sequences(cls, said: SequenceBatching, max_size: int) -> "BatchRules":
        strategy = said.oldest or said.direct
        delay_ns = strategy.max_queue_delay_microseconds * 1000 if strategy else 0
        preferred = frozenset(said.oldest.preferred_batch_size) if said.oldest else frozenset[int]()
        return cls(max_size=max_size, preferred=preferred, delay_ns=delay_ns)


class _Level:
    """The requests of one priority; `late` are those whose time is over, behind the others."""

    __slots__ = ("late", "rules", "waiting")

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self.waiting = _Line()
        self.late = _Line()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.late)


class BatchQueue:
    """The requests of one model that no instance has taken. All times are nanoseconds of one clock."""

    def __init__(self, rules: BatchRules) -> None:
        self._rules = rules
        self._most_preferred = max(rules.preferred, default=0)
        self._levels: dict[int, _Level] = {}  # by priority, the first goes first
        self._next_deadline_ns = NEVER
        self._wait_until_ns = NEVER
        self._closed_alone: dict[int, Closed] = {}  # by the size of a request

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def put(self, request: InferRequest, now_ns: int) -> None:
        """raises StatusError where the queue of its priority is full"""
        level = self._level_of(request)
        rules = level.rules
        if rules.max_size and len(level) >= rules.max_size:
            raise StatusError(Code.UNAVAILABLE, f"{request.named}Exceeds maximum queue size")
        timeout_ns = rules.timeout_ns
        if rules.may_override and request.timeout_us:
            timeout_ns = min(timeout_ns or NEVER, request.timeout_us * 1000)
        since_ns = now_ns if request.queued_ns else request.received_ns or now_ns  # not of one that comes again
        request.queued_ns, request.ready_ns = request.queued_ns or now_ns, now_ns
        request.deadline_ns = since_ns + timeout_ns if timeout_ns else NEVER
        self._next_deadline_ns = min(self._next_deadline_ns, request.deadline_ns)
        level.waiting[request] = None

    def put_back(self, requests: Sequence[InferRequest]) -> None:
        """Those that were taken last, where they were: before all that came after them."""
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
            # Only those that hold requests: clients may name as many priorities as there are numbers.
            self._levels = {p: one for p, one in sorted(self._levels.items()) if one is level or len(one)}
        return level

    def alone(self, request: InferRequest) -> Batch:
        """The batch that it would be if it was put and taken at once, where nothing waits and nothing delays."""
        size = request.batch_size or 1
        return Batch((request,), size, self.closed_alone(size))

    def closed_alone(self, size: int) -> Closed:
        """Why a batch of one request of that size, for which nothing waits and nothing delays, has no more."""
        closed = self._closed_alone.get(size)
        if closed is None:
            other, request = BatchQueue(self._rules), InferRequest({})
            request.batch_size = size
            other.put(request, 0)
            batch = other.take(0)
            assert batch is not None, "there is a delay"
            closed = self._closed_alone[size] = batch.closed
        return closed

    def expired(self, now_ns: int) -> list[InferRequest]:
        """Those that are refused because they waited too long, taken out; those that are only delayed are moved."""
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

    def leave(self, request: InferRequest) -> bool:
        """Take it out, in constant time; False: it is not here any more."""
        level = self._levels.get(self._priority(request))
        for line in (level.waiting, level.late) if level is not None else ():
            if request in line:
                del line[request]
                return True
        return False

    def drained(self) -> list[InferRequest]:
        """All of them, taken out."""
        everybody = list(self._in_order())
        self._levels.clear()
        return everybody

    def take(self, now_ns: int) -> Batch | None:
        """What is to be computed now; None where nothing is, or more may come: ask again when it is `due_ns`."""
        self._wait_until_ns = NEVER
        if not self._rules.max_size:
            return self._first(1, Closed.SINGLE)
        n, closed, oldest_ns = self._chosen(now_ns)
        if n and closed is None:
            self._wait_until_ns = oldest_ns + self._rules.delay_ns
            return None
        return self._first(n, closed) if closed is not None else None

    def due_ns(self) -> int | None:
        """When `expired` or `take` would say something else than they did, though nothing comes."""
        due_ns = min(self._wait_until_ns, self._next_deadline_ns + 1)
        return due_ns if due_ns < NEVER else None

    def _chosen(self, now_ns: int) -> tuple[int, Closed | None, int]:
        """So many of the first, why no more (None: there may be), and since when the oldest of them waits."""
        rules, key = self._rules, None
        n = size = 0
        oldest_ns = NEVER
        best: tuple[int, Closed] | None = None
        end: Closed | None = None
        for request in self._in_order():
            items = request.batch_size or 1
            if n == 0:
                key = request.shape_key
            else:
                if best is None and size + items > self._most_preferred:
                    best = n, Closed.FULL
                if size + items > rules.max_size:
                    end = Closed.FULL
                    break
                if request.shape_key != key:
                    end = Closed.SHAPE
                    break
            n, size, oldest_ns = n + 1, size + items, min(oldest_ns, request.ready_ns)
            if size in rules.preferred:
                best = n, Closed.FULL if size == rules.max_size else Closed.PREFERRED
            if size == rules.max_size:
                end = Closed.FULL
                break
        is_over = rules.delay_ns > 0 and now_ns - oldest_ns >= rules.delay_ns
        if best is not None and not is_over:
            return *best, oldest_ns
        if end is None and n:
            at_once = Closed.DELAY if is_over or not rules.delay_ns else None
            end = Closed.FULL if not is_over and size >= self._most_preferred else at_once
        return n, end, oldest_ns

    def _priority(self, request: InferRequest) -> int:
        said = request.priority
        return said if 1 <= said <= self._rules.n_levels else self._rules.default_level

    def _in_order(self) -> Iterator[InferRequest]:
        for level in self._levels.values():
            yield from level.waiting
            yield from level.late

    def _first(self, n: int, closed: Closed) -> Batch | None:
        """Taken out; None where there is none."""
        taken: list[InferRequest] = []
        for level in self._levels.values():
            for line in (level.waiting, level.late):
                while line and len(taken) < n:
                    taken.append(line.popitem(last=False)[0])
        return Batch(tuple(taken), sum(r.batch_size or 1 for r in taken), closed) if taken else None


def _line(requests: Iterable[InferRequest]) -> _Line:
    return _Line.fromkeys(requests)
