"""The cheapest mix whose measured loss is within a bound: bisection along the best mixes of all costs.

Statistics say what each layer loses in each format, as far as such losses add up; how much that is in answers is only
known by measuring. So the mixes are put in order by what they should lose, and what is measured decides.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.compress.measure.accuracy import Loss
from millrace.compress.search.mixed_precision import Candidate, Mix
from millrace.errors import ConfigError

MOST_MIXES = 255  # so that eight are measured at most
PERPLEXITY, KL = "perplexity", "KL"
_MOST_NATS = 50.0  # whose exponential is still a number
_MOST = 10.0  # bound, of either kind
_MOST_DIGITS = 9  # behind its point: what the expressions below take
_PERCENT, _NATS = re.compile(r"([0-9.]{1,12})\s?%"), re.compile(r"kl:([0-9.]{1,12}(?:e-?[0-9]{1,2})?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MaxLoss:
    """kind: KL, in nats a token; or PERPLEXITY, of which it is the growth beside the source's (0.01 is 1 %): on the
    text, or on text as the source itself would write it, where it is exp(KL) - 1, whichever is larger. On one text it
    may fall by luck, and then it says nothing of what was lost
    """

    kind: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "MaxLoss":
        """ "1%" or "kl:0.01". raises ConfigError"""
        for kind, pattern, unit in ((PERPLEXITY, _PERCENT, 0.01), (KL, _NATS, 1.0)):
            result = pattern.fullmatch(text.strip())
            number = result[1] if result else "."
            if number != "." and number.count(".") <= 1 and 0 < (bound := float(number) * unit) <= _MOST:
                return cls(kind, bound)
        raise ConfigError(
            f"--max-loss is {text!r:.60}",
            '"1%", growth of perplexity up to 1000%, or "kl:0.01", nats a token up to 10', "correct it",
        )  # fmt: skip

    def of(self, loss: Loss) -> float:
        if self.kind == KL:
            return loss.kl
        return max(loss.perplexity / loss.source_perplexity, math.exp(min(loss.kl, _MOST_NATS))) - 1

    def format_value(self, value: float) -> str:
        """A loss of this kind: "+0.83 %" or "0.0123"."""
        return f"{100 * value:+.3g} %" if self.kind == PERPLEXITY else f"{value:.3g}"

    def as_flag(self, value: float) -> str | None:
        """A loss of this kind as `parse` reads it, rounded up to about three digits; None for one beyond all bounds."""
        unit, form = (0.01, "{}%") if self.kind == PERPLEXITY else (1.0, "kl:{}")
        if value > _MOST:
            return None
        digits = min(max(0, 2 - math.floor(math.log10(value / unit))), _MOST_DIGITS)
        least = math.ceil(value / unit * 10**digits)
        texts = (form.format(f"{n / 10**digits:.{digits}f}") for n in (least, least + 1))
        return next((text for text in texts if value <= self.parse(text).bound), None)


@dataclass(frozen=True, slots=True)
class LossBoundSearch:
    """mixes: cheapest first; measured: losses by number; cheapest: number of the cheapest mix within the bound"""

    mixes: Sequence[Mix]
    measured: Mapping[int, float]
    cheapest: int

    def predicted(self, number: int) -> float | None:
        """In the bound's unit: what statistics say of it, times what fits those that were measured best; None where
        these say nothing, as of losses below zero."""
        pairs = [(self.mixes[n].loss, loss) for n, loss in self.measured.items()]
        ratios = [loss / raw for raw, loss in pairs if raw > 0 and loss > 0]
        return float(np.exp(np.mean(np.log(ratios)))) * self.mixes[number].loss if ratios else None


def candidates(
    losses: Mapping[str, Mapping[str, float]], costs: Mapping[str, Mapping[str, float]]
) -> dict[str, list[Candidate]]:
    """By layer, every format that both know."""
    return {
        layer: [Candidate(format, costs[layer][format], loss) for format, loss in of.items()]
        for layer, of in losses.items()
    }


def searched(mixes: Sequence[Mix], bound: MaxLoss, measure: Callable[[int, Mix], float]) -> LossBoundSearch:
    """Measures a mix in the middle of those that are left, and goes on below it or above, until one is found.

    Which mix is measured next depends on nothing but whether the ones before were within: so a looser bound, with
    the same costs, never ends at a dearer mix, however unevenly losses were measured.
    measure: of a mix and its number. raises ConfigError where none that was measured is within, with the best of them
    """
    measured: dict[int, float] = {}
    low, high = 0, len(mixes)  # the answer is in low .. high; `high` itself is within, or beyond the last
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
    """Without those that leave every layer as it is."""
    return [mix for mix in mixes if any(c.format != floats for c in mix.chosen.values())]
