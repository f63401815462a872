"""Which layer gets which format, so that all together lose least within a size: a knapsack, by gain for each bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """One format of one layer. bits: of the whole matrix, with scales; loss: of the model, as far as losses add up"""

    format: str
    bits: float
    loss: float


class _Step(NamedTuple):
    """From one candidate of a layer to the next better one on its hull."""

    gain: float  # for each bit
    layer: str
    to: Candidate
    bits: float


def mixed(layers: Mapping[str, Sequence[Candidate]], budget_bits: float) -> dict[str, Candidate]:
    """One candidate for each layer, within the budget: from the smallest of each, the step of most gain for each bit
    first, and what does not fit is passed over.

    With more budget than that of one step beside it, no choice is better by more than that step's gain.
    raises ConfigError where even the smallest do not fit
    """
    hulls = {layer: _hull(candidates) for layer, candidates in layers.items()}
    chosen = {layer: hull[0] for layer, hull in hulls.items()}
    left = budget_bits - sum(c.bits for c in chosen.values())
    if left < 0:
        least = budget_bits - left
        raise ConfigError(
            f"a budget of {budget_bits:,.0f} bits for all weights", f"at least {least:,.0f}, the smallest formats",
            "raise it, or offer smaller formats",
        )  # fmt: skip
    steps = [
        _Step((a.loss - b.loss) / (b.bits - a.bits), layer, b, b.bits - a.bits)
        for layer, hull in hulls.items()
        for a, b in pairwise(hull)
    ]
    passed_over: set[str] = set()
    for step in sorted(steps, key=lambda s: s.gain, reverse=True):  # along a hull gains fall: its steps stay in order
        if step.layer in passed_over or step.bits > left:
            passed_over.add(step.layer)
            continue
        chosen[step.layer], left = step.to, left - step.bits
    return chosen


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """From the smallest on, those of which each gains more for its bits than going on to any later one would."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.bits, c.loss)):
        if found and candidate.loss >= found[-1].loss:
            continue
        while len(found) > 1 and _slope(found[-2], candidate) >= _slope(found[-2], found[-1]):
            found.pop()
        found.append(candidate)
    return found


def _slope(a: Candidate, b: Candidate) -> float:
    return (a.loss - b.loss) / (b.bits - a.bits)
