"""What a change of a matrix costs its product: the mean square error of the output, from the Gram matrix alone.

For y = W x, the sum over outputs of the mean of (dW x)^2 is tr(dW G dW^T) with G the mean of x x^T (K, K).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.compress.methods.quantization_grid import Array, Floats, Grid, Scales, fitted, nearest, slabs

_PRODUCT = 1 << 22  # weights multiplied at once: more than are rounded, as products of few rows are slow
CLIPS = tuple(1 - i / 20 for i in range(1, 10))  # AutoAWQ's shares of a group's range
_TURNS = 3  # through a row's groups: a fourth changes next to nothing


def output_error(off: Array, gram: Array) -> float:
    """tr(dW G dW^T). off (N, K): dW, in float32 here; sums are float64."""
    result = 0.0
    for rows in slabs(off.shape[0], off.shape[1], _PRODUCT):
        part = off[rows].astype(np.float32, copy=False)
        result += float(np.multiply(part @ gram, part).sum(dtype=np.float64))
    return max(result, 0.0)


def relative_error(w: Array, values: Array, gram: Array) -> float:
    """Of the output's energy: a layer's sensitivity to being stored as `values` (N, K)."""
    total = output_error(w, gram)
    return output_error(w - values, gram) / total if total else 0.0


def clipped(w: Array, gram: Array, grid: Grid, shares: tuple[float, ...] = CLIPS, per_row: bool = False) -> Scales:
    """The scales whose groups' own outputs lose least: of each group and row the best share of its range.

    Symmetric codes have one more below zero than above: each range is tried with its scale of either sign.
    whole: then each group in turn has the range with which the whole output of its row loses least beside the others'
    gram: otherwise the diagonal blocks count, those of a group with itself; source: AWQ's clip search
    (arXiv:2306.00978), which takes 512 tokens where this takes all
    """
    tried = _ranges(w, grid, shares)
    N, K = w.shape
    best = np.empty((N, tried[0].scales.shape[1]), np.intp)
    for rows in slabs(N, K, _PRODUCT // len(tried)):
        part = w[rows].astype(np.float32, copy=False)
        off = np.stack([nearest(part, one.of(rows), grid) - part for one in tried])
        best[rows] = _least(off, gram, grid.group_of(K), _TURNS if per_row else 0)
    return _chosen(tried, best)


def _ranges(w: Array, grid: Grid, shares: tuple[float, ...]) -> list[Scales]:
    """That a group may have, the whole one first."""
    result = [fitted(w, grid, share=share) for share in (1.0, *shares)]
    return result if grid.minimums else [Scales(sign * one.scales) for one in result for sign in (1, -1)]


def _chosen(tried: Sequence[Scales], best: NDArray[np.intp]) -> Scales:
    """best (N, G): which of them each group has."""

    def of_groups(every: Sequence[NDArray[np.float16]]) -> NDArray[np.float16]:
        result: NDArray[np.float16] = np.take_along_axis(np.stack(every), best[None], axis=0)[0]
        return result

    minimums = [one.minimums for one in tried if one.minimums is not None]
    return Scales(of_groups([one.scales for one in tried]), of_groups(minimums) if minimums else None)


def _least(off: Floats, gram: Array, size: int, turns: int) -> NDArray[np.intp]:
    """off (C, N, K): of C ranges -> (N, G): that with the least error of each group; size: of a group"""
    C, N, K = off.shape
    groups = [slice(start, min(start + size, K)) for start in range(0, K, size)]
    own = np.empty((C, N, len(groups)), np.float32)
    for g, at in enumerate(groups):
        part = off[:, :, at]
        own[:, :, g] = np.multiply(part @ gram[at, at], part).sum(axis=2)
    best: NDArray[np.intp] = own.argmin(axis=0)
    rows = np.arange(N)
    if not turns or len(groups) == 1:
        return best
    now = np.concatenate([off[best[:, g], rows, at] for g, at in enumerate(groups)], axis=1)
    for _ in range(turns):
        before = best.copy()
        for g, at in enumerate(groups):
            now[:, at] = 0
            cross = np.multiply(off[:, :, at], now @ gram[:, at]).sum(axis=2)
            best[:, g] = (own[:, :, g] + 2 * cross).argmin(axis=0)
            now[:, at] = off[best[:, g], rows, at]
        if (best == before).all():
            break
    return best
