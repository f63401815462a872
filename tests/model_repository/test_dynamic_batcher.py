"""The dynamic batcher against its rules."""

import pytest
from hypothesis import given, settings

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import Batch, BatchQueue, BatchRules, CloseReason, QueueRules
from tests.support.batching_rules import RULES, STEPS, Model, request
from tests.support.drawn import examples


@settings(max_examples=examples(300))
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
            assert queue.remove(gone) == (gone in model.order())
            model.gone([gone])
        elif what == "take":
            assert queue.take_expired(now) == sorted(model.expire(now), key=model.level)
            batch = queue.take(now)
            taken = model.take(now)
            assert list(batch.requests if batch else ()) == taken
            assert batch is None or batch.size == sum(r.batch_size for r in taken)
            due = queue.due_ns()
            if batch is None and model.order():  # it is woken no later than when something changes, and not for ever
                assert due is not None and now < due <= min(r.queued_ns for r in model.order()[:1]) + rules.delay_ns
        assert len(queue) == len(model.order())


def closes(rules: BatchRules, *sizes: int, now: int = 0, shapes: str = "") -> list[tuple[int, CloseReason]]:
    queue = BatchQueue(rules)
    for i, size in enumerate(sizes):
        queue.put(request(size, shapes[i : i + 1]), 0)
    found: list[tuple[int, CloseReason]] = []
    while (batch := queue.take(now)) is not None:
        found.append((batch.size, batch.close_reason))
    return found


def test_why_a_batch_closed() -> None:
    waits = BatchRules(max_size=8, preferred=frozenset({4}), delay_ns=100)
    assert closes(waits, 1, 1) == [], "two more, and it is a preferred one"
    assert closes(waits, 1, 1, now=100) == [(2, CloseReason.DELAY)]
    assert closes(waits, 2, 2, 2) == [(4, CloseReason.PREFERRED)], "and the last one waits"
    assert closes(waits, 2, 2, 2, now=100) == [(6, CloseReason.DELAY)], "whatever is there"
    assert closes(waits, 3, 3) == [(3, CloseReason.FULL)], "6 is beyond every preferred size"
    assert closes(waits, 8) == [(8, CloseReason.FULL)]
    assert closes(waits, 1, 1, 1, shapes="aab") == [(2, CloseReason.SHAPE)]
    at_once = BatchRules(max_size=8, preferred=frozenset({4}))
    assert closes(at_once, *[1] * 6) == [(4, CloseReason.PREFERRED), (2, CloseReason.DELAY)]
    assert closes(BatchRules(), 5, 5) == [(5, CloseReason.SINGLE), (5, CloseReason.SINGLE)]


def test_whoever_waits_is_woken_in_time() -> None:
    rules = BatchRules(max_size=8, preferred=frozenset({8}), delay_ns=100, default=QueueRules(timeout_ns=40))
    queue = BatchQueue(rules)
    assert queue.due_ns() is None
    one = request()
    queue.put(one, 5)
    assert queue.take(5) is None and queue.due_ns() == 46, "its time-out comes before its delay"
    assert queue.take_expired(45) == [] and queue.take_expired(46) == [one]
    assert queue.take(46) is None and queue.due_ns() is None


def test_time_counts_from_arrival_but_of_a_request_that_comes_again() -> None:
    queue, one = BatchQueue(BatchRules(default=QueueRules(timeout_ns=5000))), request()
    one.received_ns = 1000
    queue.put(one, 4000)
    assert queue.take_expired(6000) == [] and queue.take_expired(6001) == [one]
    queue.put(one, 20_000)
    assert queue.take_expired(25_000) == [] and queue.take_expired(25_001) == [one]


def test_a_request_may_shorten_its_time_and_never_lengthen_it() -> None:
    for said_us, ends_ns in ((1, 1000), (9, 5000)):
        queue = BatchQueue(BatchRules(default=QueueRules(timeout_ns=5000, may_override=True)))
        queue.put(request(timeout_us=said_us), 0)
        assert queue.take_expired(ends_ns) == [] and len(queue.take_expired(ends_ns + 1)) == 1


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
    assert queue.remove(first) and not queue.remove(first)
    assert queue.take(0) == Batch((second,), 1, CloseReason.DELAY)


def test_priorities_that_nobody_waits_at_are_forgotten() -> None:
    queue = BatchQueue(BatchRules(max_size=1, n_levels=1 << 40))
    for priority in range(1, 100):
        request = InferRequest({})
        request.priority, request.batch_size = priority, 1
        queue.put(request, 0)
        batch = queue.take(0)
        assert batch is not None and batch.requests == (request,)
    assert len(queue._levels) == 1
