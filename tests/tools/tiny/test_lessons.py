"""What a lesson asks for can be known from the lesson."""

import random
import re
from itertools import pairwise

import pytest

from tools.tiny.grammar import agrees, parse_story
from tools.tiny.items import LETTERS
from tools.tiny.lessons import SECOND_LESSONS, again, ladder, lesson, lesson_share, letters, lookups


@pytest.mark.parametrize("seed", range(30))
def test_words_are_said_again_in_order(seed: int) -> None:
    (first, _), *repeats = again(random.Random(seed))
    assert repeats and all(text.split()[1:] == first.split()[3:] and known for text, known in repeats)


@pytest.mark.parametrize("seed", range(60))
def test_looked_up_answers_agree_with_what_was_told(seed: int) -> None:
    (told, _), *rest = lookups(random.Random(seed))
    readings = parse_story(told)
    assert readings is not None, told
    facts = [claim for reading in readings for claim in reading]
    answers = [text.strip() for text, known in rest if known]
    assert len(answers) == len(readings)
    assert all(agrees(answer, facts) for answer in answers), (told, answers)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("drill", [letters, ladder])
def test_letters_are_those_of_the_list(seed: int, drill: object) -> None:
    assert drill in (letters, ladder)
    parts = letters(random.Random(seed)) if drill is letters else ladder(random.Random(seed))
    listed = dict(re.findall(r"^([A-D])\. (.+)$", "".join(text for text, _ in parts), re.MULTILINE))
    assert sorted(listed) == list(LETTERS)
    by_word = {word: letter for letter, word in listed.items()}
    for (asked, _), (answer, known) in pairwise(parts):
        if known:
            key = re.search(r"stands for (\w+)\?", asked) or re.search(r"- (\w+)", asked)
            assert key is not None
            assert answer.strip() == (listed | by_word)[key[1]]


def test_lessons_are_most_of_the_beginning_and_little_of_the_rest() -> None:
    assert lesson_share(0) > 0.6 > lesson_share(SECOND_LESSONS) > 0.4
    assert lesson_share(10**6) == pytest.approx(0.1)
    assert lesson(random.Random(1), 0) == lesson(random.Random(1), 1)
