"""Intervals and McNemar's test beside values from the definitions."""

import math

import pytest

from millrace.evaluate.paired_comparison import Paired, Verdict, paired, wilson


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
    error = math.sqrt((5 / 8 - 1 / 64) / 8)  # of 3 gained and 2 lost among 8
    assert found.interval == pytest.approx((1 / 8 - 1.959964 * error, 1 / 8 + 1.959964 * error))


def test_a_difference_is_never_beyond_all_of_it() -> None:
    """Of few questions: five of five became right, which would reach to 123 %."""
    low, high = Paired(5, gained=5, lost=0, changed=5).interval
    assert 0 < low < 1 == high
    assert Paired(5, gained=0, lost=5, changed=5).interval == (-high, -low)


@pytest.mark.parametrize("chances", [(0.0, 0.0), (0.03, 0.0), (0.03, 0.03), (0.2, 0.05), (0.3, 0.3), (0.0, 0.5)])
def test_the_interval_holds_the_difference_as_often_as_it_says(chances: tuple[float, float]) -> None:
    """Over all outcomes of 40 questions, each weighed by how likely it is. Without a flip the plain interval has no
    width: of a chance of 3 % it would hold the difference 70 times of 100."""
    n, (up, down) = 40, chances
    held = 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            low, high = Paired(n, gained, lost, 0).interval
            if low <= up - down <= high:
                ways = math.comb(n, gained) * math.comb(n - gained, lost)
                held += ways * up**gained * down**lost * (1 - up - down) ** (n - gained - lost)
    assert held > 0.93


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 5), (2, 11), (40, 61)])
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    assert Paired(1000, gained, lost, n).p_value == pytest.approx(min(1.0, 2 * tail))
