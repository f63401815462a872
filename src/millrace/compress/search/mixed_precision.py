"""Chooses a format per layer to minimize the total loss within a budget: a knapsack, greedy by gain per cost.

Costs are bits, bytes or seconds: anything that adds up over layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """One format of one layer. cost: of the whole matrix; loss: contribution to the model's, assuming additivity"""

    format: str
    cost: float
    loss: float


class _Step(NamedTuple):
    """A step from one candidate of a layer to the next better one on its convex hull."""

    gain: float  # per unit of cost
    layer: str
    to: Candidate
    cost: float


@dataclass(frozen=True, slots=True)
class Mix:
    """A format per layer, and the sums over the layers."""

    cost: float
    loss: float
    chosen: Mapping[str, Candidate]

    @classmethod
    def from_candidates(cls, chosen: Mapping[str, Candidate]) -> "Mix":
        return cls(sum(c.cost for c in chosen.values()), sum(c.loss for c in chosen.values()), chosen)


Layers = Mapping[str, Sequence[Candidate]]


def mixed(layers: Layers, budget: float, unit: str = "bits") -> dict[str, Candidate]:
    """Choose a candidate per layer within the budget.

    Starts with the cheapest of each layer, then takes steps in order of gain per cost, skipping those that do not fit.

    The loss exceeds the optimum's by at most the gain of one step.
    raises ConfigError if even the cheapest candidates do not fit
    """
    chosen, steps = _steps(layers)
    left = budget - sum(c.cost for c in chosen.values())
    if left < 0:
        raise ConfigError(
            f"a budget of {budget:,.6g} {unit} for all weights",
            f"at least {budget - left:,.6g}, those of the cheapest formats", "raise it, or offer smaller formats",
        )  # fmt: skip
    passed_over: set[str] = set()
    for step in steps:
        if step.layer in passed_over or step.cost > left:
            passed_over.add(step.layer)
            continue
        chosen[step.layer], left = step.to, left - step.cost
    return chosen


def frontier(layers: Layers, max_mixes: int) -> list[Mix]:
    """Return at most `max_mixes` mixes, from the cheapest to the one with the least loss, spaced by number of steps.

    Each is optimal for its cost: no other choice has at most that cost and less loss (the hull of all choices is the
    sum of the layers' hulls). Each mix keeps or improves every layer's format of the previous one.
    """
    chosen, steps = _steps(layers)
    every = max(1, -(-len(steps) // max(max_mixes - 1, 1)))
    result = [Mix.from_candidates(dict(chosen))]
    for number, step in enumerate(steps, 1):
        chosen[step.layer] = step.to
        if number % every == 0 or number == len(steps):
            result.append(Mix.from_candidates(dict(chosen)))
    return result


def _steps(layers: Layers) -> tuple[dict[str, Candidate], list[_Step]]:
    """Return the cheapest candidate per layer, and all steps from there, by gain per cost (also in order per layer)."""
    hulls = {layer: _hull(candidates) for layer, candidates in layers.items()}
    steps = [
        _Step((a.loss - b.loss) / (b.cost - a.cost), layer, b, b.cost - a.cost)
        for layer, hull in hulls.items()
        for a, b in pairwise(hull)
    ]
    return {layer: hull[0] for layer, hull in hulls.items()}, sorted(steps, key=lambda s: s.gain, reverse=True)


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the convex hull of candidates, cheapest first: gain per cost decreases from step to step."""
    result: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.cost, c.loss)):
        if result and candidate.loss >= result[-1].loss:
            continue
        while len(result) > 1 and _slope(result[-2], candidate) >= _slope(result[-2], result[-1]):
            result.pop()
        result.append(candidate)
    return result


def _slope(a: Candidate, b: Candidate) -> float:
    return (a.loss - b.loss) / (b.cost - a.cost)
