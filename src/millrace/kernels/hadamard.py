"""Inputs of a product in another basis, in which none of them stands out, before they are rounded to eight bits.

One outlier in a group of inputs decides the scale of all of them. A Hadamard matrix spreads it evenly: with H = H^T and
H H = 1, x H times (w H)^T is x times w^T, while the largest element of x H is about three times its root mean square
whatever x looks like. Weights are transformed once, when they are packed; activations where they are rounded.
source: QuaRot (arXiv:2404.00456), whose rotations span the model's width; here each group by itself
"""

import numpy as np
from numpy.typing import NDArray

from millrace.kernels.arrays import Array

LARGEST_BLOCK = 128  # elements that are mixed with each other: of more, KL on a real model was no smaller (docs/log.md)


def hadamard(x: Array, group: int) -> NDArray[np.float32]:
    """x (M, K): each group, in blocks of powers of two, the largest first, times the Hadamard matrix of its block.

    In float32, step by step as the kernels do it: the bits are theirs.
    """
    y = x.astype(np.float32)  # a copy
    for start in range(0, y.shape[1], group):
        at, end = start, min(start + group, y.shape[1])
        while at < end:
            size = min(LARGEST_BLOCK, 1 << (end - at).bit_length() - 1)
            y[:, at : at + size] = _of_block(y[:, at : at + size])
            at += size
    return y


def _of_block(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x (M, n), n a power of two, times Sylvester's matrix of size n over sqrt(n)."""
    n = x.shape[1]
    now = np.ascontiguousarray(x.T)  # sums of whole rows are several times as fast
    other = np.empty_like(now)
    distance = 1
    while distance < n:
        pairs, found = (a.reshape(n // (2 * distance), 2, distance, -1) for a in (now, other))
        np.add(pairs[:, 0], pairs[:, 1], out=found[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=found[:, 1])
        now, other, distance = other, now, 2 * distance
    return now.T * np.float32(1 / np.sqrt(n))
