"""Arrivals have the rate, the spread and the ramp that they are asked for."""

import random
from itertools import islice

import numpy as np
import pytest

from millrace.bench.load.arrivals import Arrivals

N = 20_000


def times(arrivals: Arrivals, n: int, seed: int = 1) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array(list(islice(arrivals.times(random.Random(seed)), n)))


@pytest.mark.parametrize(
    "pattern, burstiness, variation",
    [("constant", 1, 0), ("poisson", 1, 1), ("gamma", 1, 1), ("gamma", 0.25, 2), ("gamma", 4, 0.5)],
)
def test_rate_and_variation(pattern: str, burstiness: float, variation: float) -> None:
    """The gaps of a gamma process of shape k vary by 1 / sqrt(k) of their mean."""
    gaps = np.diff(times(Arrivals(50, pattern, burstiness), N))
    assert gaps.mean() == pytest.approx(1 / 50, rel=4 * variation / np.sqrt(N) + 1e-9)
    assert gaps.std() * 50 == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_a_constant_rate_begins_at_once_and_keeps_its_beat() -> None:
    assert times(Arrivals(4, "constant"), 5).tolist() == [0, 0.25, 0.5, 0.75, 1.0]


def test_a_ramp_grows_to_the_rate() -> None:
    """After t seconds of a ramp of R: rate t^2 / (2 R) requests; behind it, the rate itself."""
    at = times(Arrivals(100, "constant", ramp_s=10), 2000)
    for t in (1.0, 5.0, 10.0):
        assert abs(np.count_nonzero(at < t) - 100 * t * t / 20) <= 1
    assert np.diff(at[at > 10]) == pytest.approx(0.01)


def test_a_seed_says_all() -> None:
    arrivals = Arrivals(5, "gamma", 0.5)
    assert times(arrivals, 50, 3).tolist() == times(arrivals, 50, 3).tolist() != times(arrivals, 50, 4).tolist()
