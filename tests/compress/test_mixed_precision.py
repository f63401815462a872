"""Mixes against all that there are."""

from itertools import pairwise, product

import numpy as np
import pytest

from millrace.compress.search.mixed_precision import Candidate, frontier, mixed
from millrace.errors import ConfigError


@pytest.mark.parametrize("seed", range(20))
def test_no_mix_is_better_by_more_than_one_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = {
        f"layer{i}": [Candidate(str(b), b * size, float(loss)) for b, loss in zip((4, 5, 8, 16), losses, strict=True)]
        for i, (size, losses) in enumerate(zip(rng.integers(1, 20, 5), rng.uniform(0, 9, (5, 4)), strict=True))
    }
    smallest = sum(min(c.cost for c in of) for of in layers.values())
    most = max(c[0].loss - min(x.loss for x in c) for c in layers.values())
    for budget in np.linspace(smallest, 4 * smallest, 7):
        found = mixed(layers, budget)
        bits, loss = sum(c.cost for c in found.values()), sum(c.loss for c in found.values())
        every = [w for w in product(*layers.values()) if sum(c.cost for c in w) <= budget]
        best = min(sum(c.loss for c in way) for way in every)
        assert set(found) == set(layers) and bits <= budget and best - 1e-9 <= loss <= best + most + 1e-9
        if budget >= 4 * smallest:
            assert loss == pytest.approx(best), "with room for everything, the best of each"


def test_the_first_bits_go_where_they_help_most() -> None:
    layers = {n: [Candidate("4", 4, loss), Candidate("8", 8, loss / 100)] for n, loss in (("a", 1), ("b", 5), ("c", 3))}
    assert {n: c.format for n, c in mixed(layers, 16).items()} == {"a": "4", "b": "8", "c": "4"}
    assert {n: c.format for n, c in mixed(layers, 21).items()} == {"a": "4", "b": "8", "c": "8"}
    worse = {"a": [Candidate("4", 4, 1.0), Candidate("5", 5, 2.0), Candidate("8", 8, 0.5)]}
    assert mixed(worse, 7)["a"].format == "4", "more bits that lose more are none"


def test_a_budget_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match="budget of 3 bits"):
        mixed({"a": [Candidate("4", 4, 1.0)]}, 3)


@pytest.mark.parametrize("seed", range(20))
def test_mixes_along_the_frontier_are_the_best_of_their_cost(seed: int) -> None:
    """Beside all choices that there are. Costs are seconds: no format is always the cheapest."""
    rng = np.random.default_rng(seed)
    layers = {
        f"layer{i}": [Candidate(str(j), float(cost), float(loss)) for j, (cost, loss) in enumerate(pairs)]
        for i, pairs in enumerate(rng.uniform(0.1, 1, (5, 4, 2)))
    }
    every = [(sum(c.cost for c in way), sum(c.loss for c in way)) for way in product(*layers.values())]
    found = frontier(layers, 1000)
    for mix in found:
        least = min(loss for cost, loss in every if cost <= mix.cost + 1e-9)
        assert mix.loss == pytest.approx(least)
        assert mix.cost == pytest.approx(sum(c.cost for c in mix.chosen.values())) and set(mix.chosen) == set(layers)
    assert found[0].cost == pytest.approx(min(cost for cost, _ in every))
    assert found[-1].loss == pytest.approx(min(loss for _, loss in every))
    for a, b in pairwise(found):
        assert a.cost < b.cost and a.loss > b.loss and all(b.chosen[n].loss <= a.chosen[n].loss for n in layers)
    some = frontier(layers, 4)
    assert len(some) <= 4 and (some[0], some[-1]) == (found[0], found[-1]) and all(mix in found for mix in some)
