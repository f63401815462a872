"""Effect of a change of a matrix on its matmul: the mean square error of the output, from the Gram matrix only.

For y = W x, the sum over outputs of the mean of (dW x)^2 is tr(dW G dW^T) with G the mean of x x^T (K, K).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.compress.methods.quantization_grid import Array, Floats, Grid, Scales, fitted, nearest, slabs

_PRODUCT = 1 << 22  # weights multiplied at once: more than are rounded at once, because matmuls of few rows are slow
CLIPS = tuple(1 - i / 20 for i in range(1, 10))  # AutoAWQ's shares of a group's range
_N_PASSES = 3  # passes over a row's groups; a fourth has almost no effect


def output_error(off: Array, gram: Array) -> float:
    """Return tr(dW G dW^T). off: dW (N, K), in float32 here; sums are float64"""
    result = 0.0
    for rows in slabs(off.shape[0], off.shape[1], _PRODUCT):
        part = off[rows].astype(np.float32, copy=False)
        result += float(np.multiply(part @ gram, part).sum(dtype=np.float64))
    return max(result, 0.0)


def relative_error(w: Array, values: Array, gram: Array) -> float:
    """Return the share of the output's energy that is lost if w is stored as `values` (N, K)."""
    total = output_error(w, gram)
    return output_error(w - values, gram) / total if total else 0.0


def clipped(w: Array, gram: Array, grid: Grid, shares: tuple[float, ...] = CLIPS, per_row: bool = False) -> Scales:
    """Return the scales that minimize each group's own output error: the best share of each group's range.

    Symmetric codes have one more value below zero than above: each range is tried with both signs of its scale.
    per_row: then choose each group's range in turn to minimize the error of the whole row's output, given the others'
    gram: without per_row only its diagonal blocks are used, of each group with itself; source: AWQ's clip search
    (arXiv:2306.00978), which uses 512 tokens; this uses all
    """
    tried = _ranges(w, grid, shares)
    N, K = w.shape
    best = np.empty((N, tried[0].scales.shape[1]), np.intp)
    for rows in slabs(N, K, _PRODUCT // len(tried)):
        part = w[rows].astype(np.float32, copy=False)
        off = np.stack([nearest(part, one.select_rows(rows), grid) - part for one in tried])
        best[rows] = _least(off, gram, grid.group_of(K), _N_PASSES if per_row else 0)
    return _chosen(tried, best)


def _ranges(w: Array, grid: Grid, shares: tuple[float, ...]) -> list[Scales]:
    """Return the candidate ranges of groups, the full one first."""
    result = [fitted(w, grid, share=share) for share in (1.0, *shares)]
    return result if grid.minimums else [Scales(sign * one.scales) for one in result for sign in (1, -1)]


def _chosen(tried: Sequence[Scales], best: NDArray[np.intp]) -> Scales:
    """Return the scales with each group's best candidate. best: its index, (N, G)"""

    def of_groups(every: Sequence[NDArray[np.float16]]) -> NDArray[np.float16]:
        result: NDArray[np.float16] = np.take_along_axis(np.stack(every), best[None], axis=0)[0]
        return result

    minimums = [one.minimums for one in tried if one.minimums is not None]
    return Scales(of_groups([one.scales for one in tried]), of_groups(minimums) if minimums else None)


def _least(off: Floats, gram: Array, size: int, n_passes: int) -> NDArray[np.intp]:
    """Return the index of the range with the least error per group, (N, G).

    off: the errors with C ranges, (C, N, K); size: of a group
    """
    C, N, K = off.shape
    groups = [slice(start, min(start + size, K)) for start in range(0, K, size)]
    own = np.empty((C, N, len(groups)), np.float32)
    for g, at in enumerate(groups):
        part = off[:, :, at]
        own[:, :, g] = np.multiply(part @ gram[at, at], part).sum(axis=2)
    best: NDArray[np.intp] = own.argmin(axis=0)
    rows = np.arange(N)
    if not n_passes or len(groups) == 1:
        return best
    now = np.concatenate([off[best[:, g], rows, at] for g, at in enumerate(groups)], axis=1)
    for _ in range(n_passes):
        before = best.copy()
        for g, at in enumerate(groups):
            now[:, at] = 0
            cross = np.multiply(off[:, :, at], now @ gram[:, at]).sum(axis=2)
            best[:, g] = (own[:, :, g] + 2 * cross).argmin(axis=0)
            now[:, at] = off[best[:, g], rows, at]
        if (best == before).all():
            break
    return best
