"""Which layer gets which format, so that all together lose least within a budget: a knapsack, by gain for each cost.

Costs are bits, bytes or seconds: whatever adds up over the layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """One format of one layer. cost: of the whole matrix; loss: of the model, as far as losses add up"""

    format: str
    cost: float
    loss: float


class _Step(NamedTuple):
    """From one candidate of a layer to the next better one on its hull."""

    gain: float  # for each unit of cost
    layer: str
    to: Candidate
    cost: float


@dataclass(frozen=True, slots=True)
class Mix:
    """A format for each layer, and the sums over them."""

    cost: float
    loss: float
    chosen: Mapping[str, Candidate]

    @classmethod
    def of(cls, chosen: Mapping[str, Candidate]) -> "Mix":
        return cls(sum(c.cost for c in chosen.values()), sum(c.loss for c in chosen.values()), chosen)


Layers = Mapping[str, Sequence[Candidate]]


def mixed(layers: Layers, budget: float, unit: str = "bits") -> dict[str, Candidate]:
    """One candidate for each layer, within the budget: from the cheapest of each, the step of most gain for its cost
    first, and what does not fit is passed over.

    With more budget than that of one step beside it, no choice is better by more than that step's gain.
    raises ConfigError where even the cheapest do not fit
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


def frontier(layers: Layers, most: int) -> list[Mix]:
    """At most so many mixes, from the cheapest of all to the one that loses least, evenly by number of steps.

    Each is the best for its own cost: no other choice has that cost or less and loses less (the hull of all choices
    is the sum of the layers' hulls). Of two neighbours the later keeps or betters every layer's format.
    """
    chosen, steps = _steps(layers)
    every = max(1, -(-len(steps) // max(most - 1, 1)))
    result = [Mix.of(dict(chosen))]
    for number, step in enumerate(steps, 1):
        chosen[step.layer] = step.to
        if number % every == 0 or number == len(steps):
            result.append(Mix.of(dict(chosen)))
    return result


def _steps(layers: Layers) -> tuple[dict[str, Candidate], list[_Step]]:
    """The cheapest of each layer, and all steps up from there: most gain first, and so each layer's in their order."""
    hulls = {layer: _hull(candidates) for layer, candidates in layers.items()}
    steps = [
        _Step((a.loss - b.loss) / (b.cost - a.cost), layer, b, b.cost - a.cost)
        for layer, hull in hulls.items()
        for a, b in pairwise(hull)
    ]
    return {layer: hull[0] for layer, hull in hulls.items()}, sorted(steps, key=lambda s: s.gain, reverse=True)


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """From the cheapest on, those of which each gains more for its cost than going on to any later one would."""
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
