"""What a change of a matrix costs its product: the mean square error of the output, from the Gram matrix alone.

For y = W x, the sum over outputs of the mean of (dW x)^2 is tr(dW G dW^T) with G the mean of x x^T (K, K).
"""

import numpy as np

from millrace.compress.grid import Array, Floats, Grid, Scales, codes_of, fitted, grouped, runs, slabs

_PRODUCT = 1 << 22  # weights multiplied at once: more than are rounded, as products of few rows are slow
CLIPS = tuple(1 - i / 20 for i in range(1, 10))  # AutoAWQ's shares of a group's range


def output_error(off: Array, gram: Array) -> float:
    """tr(dW G dW^T). off (N, K): dW, in float32 here; sums are float64."""
    found = 0.0
    for rows in slabs(off.shape[0], off.shape[1], _PRODUCT):
        part = off[rows].astype(np.float32, copy=False)
        found += float(np.multiply(part @ gram, part).sum(dtype=np.float64))
    return max(found, 0.0)


def relative_error(w: Array, values: Array, gram: Array) -> float:
    """Of the output's energy: a layer's sensitivity to being stored as `values` (N, K)."""
    whole = output_error(w, gram)
    return output_error(w - values, gram) / whole if whole else 0.0


def clipped(w: Array, gram: Array, grid: Grid, shares: tuple[float, ...] = CLIPS) -> Scales:
    """The scales whose groups' own outputs lose least: of each group and row the best share of its range.

    gram: of it the diagonal blocks count, those of a group with itself; source: AWQ's clip search (arXiv:2306.00978),
    which takes 512 tokens where this takes all
    """
    best = fitted(w, grid)
    least = _group_errors(w, best, gram, grid)
    scales, minimums = best.scales.copy(), None if best.minimums is None else best.minimums.copy()
    for share in shares:
        tried = fitted(w, grid, share=share)
        error = _group_errors(w, tried, gram, grid)
        better = error < least
        least = np.where(better, error, least)
        scales[better] = tried.scales[better]
        if minimums is not None and tried.minimums is not None:
            minimums[better] = tried.minimums[better]
    return Scales(scales, minimums)


def _group_errors(w: Array, scales: Scales, gram: Array, grid: Grid) -> Floats:
    """(N, G)"""
    N, K = w.shape
    found, size = np.empty(scales.scales.shape, np.float32), grid.group_of(K)
    steps, zeros = (values[:, :, None] for values in scales.wide())
    for rows in slabs(N, K):
        for inputs, groups in runs(K, size):
            x = grouped(w[rows, inputs].astype(np.float32, copy=False), groups)
            own = steps[rows, groups], zeros[rows, groups]
            off = (codes_of(x, *own, grid) - own[1]) * own[0] - x  # (N, G, n)
            for g in range(groups.start, groups.stop):
                at = slice(g * size, min((g + 1) * size, K))
                part = off[:, g - groups.start]
                found[rows, g] = np.multiply(part @ gram[at, at], part).sum(axis=1)
    return found
