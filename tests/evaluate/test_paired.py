"""Intervals and McNemar's test beside values from the definitions."""

import math

import pytest

from millrace.evaluate.paired import Paired, Verdict, paired, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (5, 10, 0.23659, 0.76341), (81, 263, 0.25526, 0.36618)],
)  # the last one: Newcombe 1998, table I
def test_wilson(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right, n) == pytest.approx((low, high), abs=1e-4)


def test_no_questions_say_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_flips() -> None:
    right = [0, 1, 2, 3, 0, 1]
    before, now = [0, 0, 2, 3, 1, 2], [0, 1, 1, 3, 0, 3]
    found = paired(*([Verdict(c, c == r) for c, r in zip(given, right, strict=True)] for given in (now, before)))
    assert found == Paired(6, gained=2, lost=1, changed=4)
    assert found.difference == pytest.approx(1 / 6)
    error = math.sqrt(3 - 1 / 6) / 6
    assert found.interval == pytest.approx((1 / 6 - 1.959964 * error, 1 / 6 + 1.959964 * error))


def test_a_difference_is_never_beyond_all_of_it() -> None:
    """Of few questions: four of five became right, whose plain interval would reach to 115 %."""
    assert Paired(5, gained=4, lost=0, changed=4).interval == pytest.approx((0.8 - 1.959964 * math.sqrt(0.8) / 5, 1))
    assert Paired(5, gained=0, lost=4, changed=4).interval == pytest.approx((-1, 1.959964 * math.sqrt(0.8) / 5 - 0.8))


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 5), (2, 11), (40, 61)])
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    assert Paired(1000, gained, lost, n).p_value == pytest.approx(min(1.0, 2 * tail))
