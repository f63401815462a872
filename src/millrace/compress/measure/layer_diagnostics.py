"""Diagnoses a layer's loss from available figures; the only extra work is one rounding to nearest.

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
_HEAVY, _PEAKED = 1.5, 1.15  # ratio to the model's median from which a figure is a reason
_LEAST_HEAVY = 0.1  # share of the energy below which inputs are never heavy


class LayerDiagnostics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Diagnostics of a layer.

    error: share that is lost; of: whose energy it is a share of: its output's, or its weights' if nothing is known of
        its inputs; "" in older records
    nearest: the error of rounding to nearest in the full range of the same grid; None if that is the method
    plain: the baseline of `nearest` if it is not rounding, as words after "by"
    peak: the largest |w| of a group, relative to the root mean square of the weights: rounding to nearest on a
        symmetric grid of steps amax / 7.5 loses about peak^2 / 675 of their energy
    heavy: the share of the inputs' energy in the largest 1 % of them; None if unknown
    moved: ratio of the largest to the smallest factor of scales folded into it; None if there are none
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
    """Return diagnostics of an original w (N, K). x: its input, if known, to weigh errors; group: 0 for a whole row"""
    return LayerDiagnostics(
        error=error, peak=peak(w, group), nearest=nearest, heavy=heavy(x) if x else None,
        of="output" if x else "weights", plain=plain,
    )  # fmt: skip


def relative_loss(w: Array, matrix: Matrix, x: InputStatistics | None) -> float:
    """Return the relative error of `matrix`: of the output's energy if the input is known, else of the weights'."""
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
        return matrix.map_rows(lambda array: array[rows]).dequantise()
    return type(matrix)(matrix.codes[rows], matrix.scales[rows]).dequantise()


def peak(w: Array, group: int) -> float:
    """Return the peak: root mean square over groups, weighted by their sizes. group: 0 for a whole row"""
    largest = energy = 0.0
    K = w.shape[1]
    for rows in slabs(*w.shape):
        for inputs, groups in runs(K, group or K):
            x = np.abs(grouped(w[rows, inputs].astype(np.float64), groups))
            largest += float(np.square(x.max(axis=2)).sum()) * x.shape[2]
            energy += float(np.square(x).sum())
    return (largest / energy) ** 0.5 if energy else 0.0


def heavy(x: InputStatistics) -> float:
    """Return the share of an input's energy in its largest 1 % of elements, at least one."""
    energy = np.sort(x.gram.diagonal().astype(np.float64))[::-1]
    total = float(energy.sum())
    return float(energy[: -(-len(energy) // _HUNDREDTH)].sum()) / total if total else 0.0


def usual(layers: Mapping[str, LayerDiagnostics]) -> LayerDiagnostics:
    """Return the medians over a model's layers, each over the layers that have the figure."""

    def middle(name: str) -> float | None:
        values = [value for one in layers.values() if (value := getattr(one, name)) is not None]
        return median(values) if values else None

    return LayerDiagnostics(
        error=middle("error") or 0.0, peak=middle("peak") or 0.0, nearest=middle("nearest"), heavy=middle("heavy"),
        moved=middle("moved"),
    )  # fmt: skip


def reasons(layer: LayerDiagnostics, of_all: LayerDiagnostics) -> list[str]:
    """Return the figures that stand out compared with the model's medians; none if nothing does."""
    result = []
    if layer.heavy is not None and of_all.heavy is not None and layer.heavy >= max(_HEAVY * of_all.heavy, _LEAST_HEAVY):
        result.append(
            f"1 % of its inputs carry {layer.heavy:.0%} of their energy (usual here: {of_all.heavy:.0%}): what their "
            "weights lose counts that much more"
        )
    if layer.peak >= _PEAKED * of_all.peak:
        result.append(
            f"the largest weights of its groups are {layer.peak:.1f} times the root mean square (usual here: "
            f"{of_all.peak:.1f}): steps are as large as they ask for"
        )
    return result
