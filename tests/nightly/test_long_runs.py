"""The random tests of the fast suite, with many more seeds."""

import random

import pytest

from tests.runtime import test_loop

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]
N_SCHEDULES, N_MODELS = 4000, 500


def seeds(n: int) -> list[int]:
    """Others each night; a failure names its own."""
    first = random.SystemRandom().randrange(10**9)
    return list(range(first, first + n))


def test_any_schedule_gives_the_solo_answers() -> None:
    for seed in seeds(N_SCHEDULES):
        try:
            test_loop.test_any_schedule_gives_the_solo_answers(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def test_answers_agree_with_the_plain_model() -> None:
    for seed in seeds(N_MODELS):
        try:
            test_loop.test_answers_agree_with_the_plain_model(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
