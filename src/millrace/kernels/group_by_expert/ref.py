"""Reference of group_by_expert."""

import numpy as np

from millrace.kernels.arrays import IntArray


def group_by_expert(experts: IntArray, n: int) -> tuple[IntArray, IntArray, IntArray]:
    """experts (T, A) -> row_of (T * A,), places (T, A), starts (n + 1,), as in the operator; int32."""
    pairs = experts.reshape(-1)
    order = np.argsort(pairs, kind="stable")
    places = np.empty(len(pairs), np.int32)
    places[order] = np.arange(len(pairs), dtype=np.int32)
    starts = np.searchsorted(pairs[order], np.arange(n + 1)).astype(np.int32)
    return (order // experts.shape[1]).astype(np.int32), places.reshape(experts.shape), starts
