"""Why a layer loses what it loses, as far as the numbers at hand tell; nothing is measured for it but one rounding.

N outputs, K inputs of a matrix w (N, K).
"""

from collections.abc import Mapping
from statistics import median

import msgspec
import numpy as np

from millrace.compress.grid import Array, grouped, runs, slabs
from millrace.compress.statistics import InputStatistics

_HUNDREDTH = 100
_HEAVY, _PEAKED = 1.5, 1.15  # times what is usual in the model: what is called a reason
_LEAST_HEAVY = 0.1  # of the energy: below it no input is heavy, whatever others are


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one layer.

    error: share that was lost: of its output's energy, or of its weights' where nothing is known of its inputs
    nearest: the same by rounding to nearest in the whole range of the same grid; None where that is what was done
    peak: the largest |w| of a group, in root mean squares of the weights: to nearest, a symmetric grid of steps
        amax / 7.5 loses about peak^2 / 675 of their energy
    heavy: of the inputs' energy, the share in the hundredth of them that have most; None where it is not known
    moved: the largest to the smallest factor of scales that were moved into it; None where none were
    """

    error: float
    peak: float
    nearest: float | None = None
    heavy: float | None = None
    moved: float | None = None


def peak(w: Array, group: int) -> float:
    """group: inputs of one; 0 for a whole row. A root mean square over groups, each with as many weights as it has."""
    largest = energy = 0.0
    K = w.shape[1]
    for rows in slabs(*w.shape):
        for inputs, groups in runs(K, group or K):
            x = np.abs(grouped(w[rows, inputs].astype(np.float64), groups))
            largest += float(np.square(x.max(axis=2)).sum()) * x.shape[2]
            energy += float(np.square(x).sum())
    return (largest / energy) ** 0.5 if energy else 0.0


def heavy(x: InputStatistics) -> float:
    """Of an input's energy, what its largest hundredth has, at least one of them."""
    energy = np.sort(x.gram.diagonal().astype(np.float64))[::-1]
    total = float(energy.sum())
    return float(energy[: -(-len(energy) // _HUNDREDTH)].sum()) / total if total else 0.0


def usual(layers: Mapping[str, Figures]) -> Figures:
    """The medians over all layers of a model, each of those that have it."""

    def middle(name: str) -> float | None:
        values = [value for one in layers.values() if (value := getattr(one, name)) is not None]
        return median(values) if values else None

    return Figures(
        error=middle("error") or 0.0, peak=middle("peak") or 0.0, nearest=middle("nearest"), heavy=middle("heavy"),
        moved=middle("moved"),
    )  # fmt: skip


def reasons(one: Figures, of_all: Figures) -> list[str]:
    """What stands out beside what is usual in this model; nothing is said where nothing does."""
    found = []
    if one.heavy is not None and of_all.heavy is not None and one.heavy >= max(_HEAVY * of_all.heavy, _LEAST_HEAVY):
        found.append(
            f"1 % of its inputs carry {one.heavy:.0%} of their energy (usual here: {of_all.heavy:.0%}): what their "
            "weights lose counts that much more"
        )
    if one.peak >= _PEAKED * of_all.peak:
        found.append(
            f"the largest weights of its groups are {one.peak:.1f} times the root mean square (usual here: "
            f"{of_all.peak:.1f}): steps are as large as they ask for"
        )
    return found
