"""Finds the cheapest mix whose measured loss is within a bound, by bisection over the best mixes of all costs.

Statistics predict each layer's loss in each format, assuming that losses add up; the effect on answers must be
measured. So mixes are sorted by predicted loss, and measurements decide.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.compress.measure.accuracy import Loss
from millrace.compress.search.mixed_precision import Candidate, Mix
from millrace.errors import ConfigError

MAX_MIXES = 255  # so that at most eight are measured
PERPLEXITY, KL = "perplexity", "KL"
_MAX_NATS = 50.0  # whose exponential is finite
_MAX_BOUND = 10.0  # maximum bound of either kind
_MAX_DIGITS = 9  # decimals that the expressions below accept
_PERCENT, _NATS = re.compile(r"([0-9.]{1,12})\s?%"), re.compile(r"kl:([0-9.]{1,12}(?:e-?[0-9]{1,2})?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MaxLoss:
    """A bound on the loss. kind: KL in nats per token, or PERPLEXITY: its relative growth (0.01 is 1 %).

    The growth is the larger of that on the text and that on text written by the source itself, exp(KL) - 1: on one text
    perplexity may fall by chance, which says nothing about the loss.
    """

    kind: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "MaxLoss":
        """Parse "1%" or "kl:0.01". raises ConfigError"""
        for kind, pattern, unit in ((PERPLEXITY, _PERCENT, 0.01), (KL, _NATS, 1.0)):
            result = pattern.fullmatch(text.strip())
            number = result[1] if result else "."
            if number != "." and number.count(".") <= 1 and 0 < (bound := float(number) * unit) <= _MAX_BOUND:
                return cls(kind, bound)
        raise ConfigError(
            f"--max-loss is {text!r:.60}",
            '"1%", growth of perplexity up to 1000%, or "kl:0.01", nats a token up to 10', "correct it",
        )  # fmt: skip

    def loss_value(self, loss: Loss) -> float:
        if self.kind == KL:
            return loss.kl
        return max(loss.perplexity / loss.source_perplexity, math.exp(min(loss.kl, _MAX_NATS))) - 1

    def format_value(self, value: float) -> str:
        """Format a loss of this kind: "+0.83 %" or "0.0123"."""
        return f"{100 * value:+.3g} %" if self.kind == PERPLEXITY else f"{value:.3g}"

    def as_flag(self, value: float) -> str | None:
        """Format a loss for `parse`, rounded up to about three digits; None if it exceeds the maximum bound."""
        unit, form = (0.01, "{}%") if self.kind == PERPLEXITY else (1.0, "kl:{}")
        if value > _MAX_BOUND:
            return None
        digits = min(max(0, 2 - math.floor(math.log10(value / unit))), _MAX_DIGITS)
        least = math.ceil(value / unit * 10**digits)
        texts = (form.format(f"{n / 10**digits:.{digits}f}") for n in (least, least + 1))
        return next((text for text in texts if value <= self.parse(text).bound), None)


@dataclass(frozen=True, slots=True)
class LossBoundSearch:
    """Result. mixes: cheapest first; measured: losses by mix number; cheapest: number of the best mix in bounds"""

    mixes: Sequence[Mix]
    measured: Mapping[int, float]
    cheapest: int

    def predicted(self, number: int) -> float | None:
        """Predict a mix's loss in the bound's unit: the statistics' loss, scaled to fit the measured mixes.

        None if the measurements allow no fit, e.g. with losses below zero.
        """
        pairs = [(self.mixes[n].loss, loss) for n, loss in self.measured.items()]
        ratios = [loss / raw for raw, loss in pairs if raw > 0 and loss > 0]
        return float(np.exp(np.mean(np.log(ratios)))) * self.mixes[number].loss if ratios else None


def candidates(
    losses: Mapping[str, Mapping[str, float]], costs: Mapping[str, Mapping[str, float]]
) -> dict[str, list[Candidate]]:
    """Return the candidates by layer: all formats with both a loss and a cost."""
    return {
        layer: [Candidate(format, costs[layer][format], loss) for format, loss in layer_losses.items()]
        for layer, layer_losses in losses.items()
    }


def searched(mixes: Sequence[Mix], bound: MaxLoss, measure: Callable[[int, Mix], float]) -> LossBoundSearch:
    """Bisect: measure the middle one of the remaining mixes, and continue below or above it.

    The next mix depends only on whether the previous ones were within the bound. So with the same costs a looser bound
    never yields a more expensive mix, however noisy the measurements are.
    measure: called with a mix's number and the mix. raises ConfigError if no measured mix is within the bound
    """
    measured: dict[int, float] = {}
    low, high = 0, len(mixes)  # the answer is in low .. high; `high` itself is within the bound, or past the last mix
    while low < high:
        middle = (low + high) // 2
        measured[middle] = measure(middle, mixes[middle])
        if measured[middle] <= bound.bound:
            high = middle
        else:
            low = middle + 1
    if high == len(mixes):
        best = min(measured.values())
        raised = bound.as_flag(best)
        looser = f"raise --max-loss to {raised} or more, or " if raised else ""
        raise ConfigError(
            f"no mix keeps within a loss of {bound.format_value(bound.bound)} ({bound.kind}): the best found has "
            f"{bound.format_value(best)}", "a bound that can be kept",
            f"{looser}leave the model as it is",
        )  # fmt: skip
    return LossBoundSearch(mixes, measured, high)


def compressed(mixes: Sequence[Mix], floats: str) -> list[Mix]:
    """Return the mixes that compress at least one layer."""
    return [mix for mix in mixes if any(c.format != floats for c in mix.chosen.values())]
