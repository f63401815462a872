"""Wilson's interval against published values, and at its edges."""

import pytest

from tools.tiny.shares import Share, count


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)  # Newcombe 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<857, table I, method 3
def test_wilson_interval(right: int, of: int, low: float, high: float) -> None:
    assert Share(right, of).interval == pytest.approx((low, high), abs=5e-5)


def test_nothing_measured_says_nothing() -> None:
    assert Share(0, 0).interval == (0.0, 1.0)
    assert count([True, False, True]) == Share(2, 3)
