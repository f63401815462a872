"""Why a layer loses what it loses, as far as the numbers at hand tell; nothing is measured for it but one rounding.

N outputs, K inputs of a matrix w (N, K).
"""

from collections.abc import Mapping
from statistics import median
from typing import Literal

import msgspec
import numpy as np

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.compress.calibration.statistics import InputStatistics
from millrace.compress.checkpoint.tensor_layout import Matrix
from millrace.compress.measure.reconstruction_error import relative_error
from millrace.compress.methods.quantization_grid import Array, grouped, runs, slabs

_HUNDREDTH = 100
_HEAVY, _PEAKED = 1.5, 1.15  # times what is usual in the model: what is called a reason
_LEAST_HEAVY = 0.1  # of the energy: below it no input is heavy, whatever others are


class LayerDiagnostics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one layer.

    error: share that was lost; of: of whose energy: its output's, or its weights' where nothing is known of its
        inputs; "" where a record of an earlier version does not say
    nearest: the same by rounding to nearest in the whole range of the same grid; None where that is what was done
    plain: what `nearest` stands for where that is no rounding, in words that "by" goes before
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
    of: Literal["output", "weights", ""] = ""
    plain: str = ""


def figures(
    w: Array, group: int, error: float, x: InputStatistics | None, *, nearest: float | None = None, plain: str = ""
) -> LayerDiagnostics:
    """Of w (N, K) as it was given. x: its input, of which errors are then; group: inputs of one; 0 for a whole row"""
    return LayerDiagnostics(
        error=error, peak=peak(w, group), nearest=nearest, heavy=heavy(x) if x else None,
        of="output" if x else "weights", plain=plain,
    )  # fmt: skip


def lost(w: Array, matrix: Matrix, x: InputStatistics | None) -> float:
    """The share that is off in `made`: of the output's energy where the input is known, or else of the weights'."""
    if x is not None:
        return relative_error(w, matrix.dequantise(), x.gram)
    off = energy = 0.0
    for rows in slabs(*w.shape):
        exact = w[rows].astype(np.float64)
        off += float(np.square(_rows(matrix, rows) - exact).sum())
        energy += float(np.square(exact).sum())
    return off / energy if energy else 0.0


def _rows(matrix: Matrix, rows: slice) -> Array:
    if isinstance(matrix, QuantisedMatrix):
        return matrix.each(lambda array: array[rows]).dequantise()
    return type(matrix)(matrix.codes[rows], matrix.scales[rows]).dequantise()


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


def usual(layers: Mapping[str, LayerDiagnostics]) -> LayerDiagnostics:
    """The medians over all layers of a model, each of those that have it."""

    def middle(name: str) -> float | None:
        values = [value for one in layers.values() if (value := getattr(one, name)) is not None]
        return median(values) if values else None

    return LayerDiagnostics(
        error=middle("error") or 0.0, peak=middle("peak") or 0.0, nearest=middle("nearest"), heavy=middle("heavy"),
        moved=middle("moved"),
    )  # fmt: skip


def reasons(one: LayerDiagnostics, of_all: LayerDiagnostics) -> list[str]:
    """What stands out beside what is usual in this model; nothing is said where nothing does."""
    result = []
    if one.heavy is not None and of_all.heavy is not None and one.heavy >= max(_HEAVY * of_all.heavy, _LEAST_HEAVY):
        result.append(
            f"1 % of its inputs carry {one.heavy:.0%} of their energy (usual here: {of_all.heavy:.0%}): what their "
            "weights lose counts that much more"
        )
    if one.peak >= _PEAKED * of_all.peak:
        result.append(
            f"the largest weights of its groups are {one.peak:.1f} times the root mean square (usual here: "
            f"{of_all.peak:.1f}): steps are as large as they ask for"
        )
    return result
