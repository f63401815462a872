"""What a lesson asks for can be known from the lesson."""

import random
import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from tools.tiny import lessons
from tools.tiny.grammar import agrees, claim, parse_story
from tools.tiny.items import LETTERS, is_held_out, sum_key
from tools.tiny.lessons import Part

_ASKED_FOR = re.compile(r"(?:stands for|letter is|Find|answer is|Choose|-) (\w+)[?.]?:?(?:\n|$)")


def _listed(parts: list[Part]) -> dict[str, str]:
    return dict(re.findall(r"^([A-D])\. (.+)$", "".join(text for text, _ in parts), re.MULTILINE))


@pytest.mark.parametrize("seed", range(30))
def test_words_are_said_again_in_order(seed: int) -> None:
    (first, _), *repeats = lessons.again(random.Random(seed))
    assert repeats and all(text.split()[1:] == first.split()[3:] and known for text, known in repeats)


@pytest.mark.parametrize("seed", range(60))
def test_looked_up_answers_agree_with_what_was_told(seed: int) -> None:
    (told, _), *rest = lessons.lookups(random.Random(seed))
    readings = parse_story(told)
    assert readings is not None, told
    facts = [claim for reading in readings for claim in reading]
    answers = [text.strip() for text, known in rest if known]
    assert len(answers) == len(readings)
    assert all(agrees(answer, facts) for answer in answers), (told, answers)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("drill", [lessons.letters, lessons.ladder, lessons.climb])
def test_letters_are_those_of_the_list(seed: int, drill: Callable[[random.Random], list[Part]]) -> None:
    parts = drill(random.Random(seed))
    listed = _listed(parts)
    assert sorted(listed) == list(LETTERS)
    both_ways = listed | {word: letter for letter, word in listed.items()}
    for (asked, _), (answer, known) in pairwise(parts):
        named = _ASKED_FOR.findall(asked)
        if known and named:  # a small choice names its word in a told fact instead
            assert answer.strip() == both_ways[named[0]]


@pytest.mark.parametrize("seed", range(60))
def test_a_small_choice_has_the_told_answer(seed: int) -> None:
    (asked, _), (answer, _) = parts = lessons.small_choice(random.Random(seed))
    story, _, question = asked.partition("\n\n")
    readings = parse_story(story)
    assert readings is not None
    value = _listed(parts)[answer.strip()]
    facts = [dict(claim.slots) for reading in readings for claim in reading]
    assert any(value in fact.values() and fact["who"] in question for fact in facts)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_marks_say_which_option_is_right(seed: int, kept: float) -> None:
    rng = random.Random(seed)
    (asked, _), (answer, _) = lessons.small_choice(rng)
    parts = lessons.with_marks(rng, asked, answer, kept)
    whole = "".join(text for text, _ in parts)
    assert parts[-1] == (answer, True) and whole.endswith("Answer:" + answer)
    assert re.sub(r"^([A-D]\. .+) (yes|no)$", r"\1", whole, flags=re.MULTILINE) == asked + answer
    marks = dict(re.findall(r"^([A-D])\. .+ (yes|no)$", whole, re.MULTILINE))
    assert all((mark == "yes") == (letter == answer.strip()) for letter, mark in marks.items())
    assert len(marks) == 4 or kept < 1


def test_lessons_are_most_of_the_beginning_and_little_of_the_rest() -> None:
    share = lessons.lesson_share
    assert share(0) > 0.6 > share(lessons.SECOND_LESSONS) > 0.4 < share(lessons.THIRD_LESSONS)
    assert share(10**6) == pytest.approx(0.15)


@pytest.mark.parametrize("seed", range(60))
def test_rows_of_sums_are_right_and_step_over_what_is_held_out(seed: int) -> None:
    whole = "".join(text for text, _ in lessons.sums_in_a_row(random.Random(seed)))
    if whole.startswith("Count:"):
        counted = [int(n) for n in whole.split()[1:]]
        assert {b - a for a, b in pairwise(counted)} in ({1}, {-1})
        return
    rows = re.findall(r"^(\d+) ([+-]) (\d+) = (\d+)\.$", whole, re.MULTILINE)
    assert len(rows) == whole.count("\n") >= 1
    for a, sign, b, result in rows:
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        relation, slot = ("sum", "sum") if sign == "+" else ("difference", "difference")
        assert not is_held_out(sum_key(claim(relation, a=a, b=b, **{slot: result})))
