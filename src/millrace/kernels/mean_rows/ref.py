"""Reference of mean_rows."""

import numpy as np

from millrace.kernels.arrays import Array, IntArray


def mean_rows(x: Array, lengths: IntArray) -> Array:
    """x (T, N), lengths (S,), which add up to T -> (S, N): the mean of each sequence's rows, in the precision of x."""
    ends = np.cumsum(lengths)
    return np.stack([x[end - n : end].mean(axis=0) for n, end in zip(lengths, ends, strict=True)])
