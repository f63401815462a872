"""The sequence batcher against its rules, in simulated time."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.model_repository.config.autocomplete import complete_config
from millrace.model_repository.config.pbtxt_binder import read_config
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import BatchRules, CloseReason
from millrace.model_repository.scheduling.sequence_batcher import SequenceBatcher, SequenceRules
from tests.support.drawn import SEEDS, examples
from tests.support.sequence_rules import DIRECT, END, NO_START, OLDEST, START, STEPS, Both, queue_of, request


@settings(max_examples=examples(250))
@given(st.one_of(DIRECT, OLDEST), st.integers(1, 2), STEPS)
def test_what_is_taken_when_is_what_the_rules_say(
    rules: SequenceRules, n_instances: int, steps: list[tuple[Any, ...]]
) -> None:
    both = Both(rules, n_instances)
    for what, *how in steps:
        both.step(what, *how)
    both.end()


@settings(max_examples=examples(10))
@given(SEEDS)
def test_and_long_schedules_too(seed: int) -> None:
    rng = Random(seed)
    n_slots, max_size = rng.randint(1, 4), rng.randint(2, 4)
    if rng.random() < 0.5:
        batches = BatchRules(max_size, frozenset({rng.randint(1, max_size)}), 2_000)
        rules = SequenceRules("m", n_slots, max_size, 8_000, batches=batches)
    else:
        rules = SequenceRules("m", max_size, max_size, 8_000, 2_000, min_ready=max_size)
    both = Both(rules, rng.randint(1, 2))
    load = ["put"] * rng.randint(1, 5)  # from idle to full
    for _ in range(800):
        what = rng.choice(
            [
                *load,
                "wait",
                *["take"] * 3,
                *["done"] * 3,
                rng.choice(["cancel", "take", "take", "lose", "find", "find"]),
            ]
        )
        how: dict[str, tuple[object, ...]] = {
            "put": (rng.randint(1, 6), rng.choice([0, 0, START, END]), rng.choice("aaab"), rng.choice([0, 0, 3])),
            "wait": (rng.choice([1_000, 2_000, 3_000]),), "done": (rng.randint(0, 3),), "cancel": (rng.randint(0, 9),),
            "lose": (rng.randint(0, 1),), "find": (rng.randint(0, 1),),
        }  # fmt: skip
        both.step(what, *how.get(what, ()))
    both.end()


def taken(queue: SequenceBatcher, now: int = 0, instance: int = 0) -> tuple[list[object], CloseReason | None]:
    batch = queue.take(now, instance)
    if batch is None:
        return [], None
    return [r.correlation_id if r.id != "null" else None for r in batch.executed_requests], batch.close_reason


def test_a_sequence_stays_at_its_place_and_empty_ones_are_filled() -> None:
    queue = queue_of(SequenceRules("m", n_slots=3, max_size=3))
    for id_ in (1, 2, 3, 4):
        queue.put(request(id_, START), 0)
    assert taken(queue) == ([1, 2, 3], CloseReason.FULL), "and 4 waits for a place"
    assert taken(queue) == ([], None), "they are being computed"


def test_the_backlog_takes_the_place_that_is_free() -> None:
    queue = queue_of(SequenceRules("m", n_slots=2, max_size=2))
    first = [request(1, START), request(2, START | END), request(3, START), request(3, END)]
    for one in first:
        queue.put(one, 0)
    assert taken(queue) == ([1, 2], CloseReason.FULL)
    queue.finish_request(first[0], 1)
    assert taken(queue) == ([], None), "1 has nothing to compute, 3 no place"
    queue.finish_request(first[1], 1)
    assert taken(queue) == ([None, 3], CloseReason.DELAY), "at the place of 2"
    assert queue.n_sequences == 2


def test_why_a_direct_batch_closed() -> None:
    waits = SequenceRules("m", n_slots=4, max_size=4, delay_ns=100, min_ready=2)
    queue = queue_of(waits)
    queue.put(request(1, START), 5)
    assert taken(queue, 5) == ([], None) and queue.due_ns() == 105
    queue.put(request(2, START), 6)
    assert taken(queue, 6) == ([1, 2], CloseReason.SLOTS)
    queue.put(request(3, START), 10)
    assert taken(queue, 109) == ([], None) and taken(queue, 110) == ([None, None, 3], CloseReason.DELAY)
    queue = queue_of(SequenceRules("m", n_slots=2, max_size=2))
    queue.put(request(1, START, "a"), 0)
    queue.put(request(2, START, "b"), 0)
    assert taken(queue) == ([1], CloseReason.SHAPE) and taken(queue) == ([None, 2], CloseReason.DELAY)
    queue = queue_of(SequenceRules("m", n_slots=1))
    queue.put(request(1, START), 0)
    assert taken(queue) == ([1], CloseReason.SINGLE)


def test_the_words_of_what_is_no_part_of_a_sequence() -> None:
    queue = queue_of(SequenceRules("m", n_slots=1))
    begins = "inference request"
    for made, words in (
        (request(0, START), f"{begins} to model 'm' must specify a non-zero or non-empty correlation ID"),
        (request("", START), f"{begins} to model 'm' must specify a non-zero or non-empty correlation ID"),
        (request(7), f"{begins} for sequence 7 to model 'm' {NO_START}"),
        (request("seven", END), f"{begins} for sequence seven to model 'm' {NO_START}"),
    ):
        with pytest.raises(StatusError) as refused:
            queue.put(made, 0)
        assert (refused.value.code, str(refused.value)) == (Code.INVALID_ARG, words)
    two = request(7, START)
    two.batch_size = 2
    with pytest.raises(StatusError) as refused:
        queue.put(two, 0)
    words = f"{begins} to model 'm' must specify batch-size 1 due to requirements of sequence batcher"
    assert (refused.value.code, str(refused.value)) == (Code.INVALID_ARG, words)
    assert queue.n_sequences == len(queue) == 0


def test_ids_that_are_numbers_and_strings_are_different() -> None:
    queue = queue_of(SequenceRules("m", n_slots=4, max_size=4))
    queue.put(request(1, START), 0)
    with pytest.raises(StatusError, match="for sequence 1 "):
        queue.put(request("1"), 0)


def test_a_sequence_with_an_id_waits_for_the_one_before_it() -> None:
    queue = queue_of(SequenceRules("m", n_slots=2, max_size=2))
    first, second, other = request(1, START | END), request(1, START), request(2, START)
    for one in (first, second, other):
        queue.put(one, 0)
    assert taken(queue) == ([1, 2], CloseReason.FULL)
    assert first.sequence.busy is first and other.sequence.busy is other
    queue.finish_request(first, 1)
    assert taken(queue) == ([1], CloseReason.DELAY) and second.sequence.busy is second


def test_slots_of_instances_are_taken_in_turn() -> None:
    queue = queue_of(SequenceRules("m", n_slots=2, max_size=2), n_instances=2)
    for id_ in (1, 2, 3):
        queue.put(request(id_, START), 0)
    assert taken(queue, instance=1) == ([2], CloseReason.DELAY)
    assert taken(queue, instance=0) == ([1, 3], CloseReason.FULL)


def test_any_number_of_slots_takes_no_memory() -> None:
    text = "max_batch_size: 2147483647 sequence_batching { direct { minimum_slot_utilization: 0.5 } }"
    read = read_config(text.encode(), Path("config.pbtxt"))
    rules = SequenceRules.from_config(complete_config(read.config, "m", ("model.py",))[0])
    assert (rules.n_slots, rules.min_ready) == (2**31 - 1, 2**30 - 32), "which float32 rounds to half of them"
    queue = queue_of(rules, n_instances=3)
    for id_ in range(1, 9):
        queue.put(request(id_, START), 0)
    assert taken(queue, instance=1) == ([2, 5, 8], CloseReason.DELAY)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", SequenceRules("m", 8, 8)),
        ("direct {}", SequenceRules("m", 8, 8)),
        ("direct { max_queue_delay_microseconds: 5 }", SequenceRules("m", 8, 8)),
        (
            "direct { max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.125 }",
            SequenceRules("m", 8, 8, delay_ns=5000, min_ready=1),
        ),
        ("direct { minimum_slot_utilization: 0.126 }", SequenceRules("m", 8, 8, min_ready=2)),
        ("direct { minimum_slot_utilization: 0.001 }", SequenceRules("m", 8, 8, min_ready=1)),
        ("direct { minimum_slot_utilization: 1 }", SequenceRules("m", 8, 8, min_ready=8)),
        ("max_sequence_idle_microseconds: 7", SequenceRules("m", 8, 8, idle_ns=7000)),
        ("oldest {}", SequenceRules("m", 8, 8, batches=BatchRules(8, frozenset({8})))),
        (
            "oldest { max_candidate_sequences: 3 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 9 }",
            SequenceRules("m", 3, 8, batches=BatchRules(8, frozenset({2}), 9000)),
        ),
    ],
)
def test_rules_of_a_configuration(said: str, expected: SequenceRules) -> None:
    text = f"max_batch_size: 8 sequence_batching {{ {said} }}"
    read = read_config(text.encode(), Path("config.pbtxt"))
    assert SequenceRules.from_config(complete_config(read.config, "m", ("model.py",))[0]) == expected
