"""Pack weights of which single outputs are read, for the second step of a two-step head: output by output."""

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.kernels.layout import byte_row_bytes, n_groups, padded_k, up


def pack_byte_rows(q: QuantisedMatrix) -> NDArray[np.uint8]:
    """q (N, K) of 8 bits -> N rows: code + 128 with every group padded to a multiple of 8, then the float16 scales."""
    N, K = q.codes.shape
    out = np.zeros((N, byte_row_bytes(K, q.group)), np.uint8)
    at = 0
    for g in range(n_groups(K, q.group)):
        part = q.codes[:, g * q.group : (g + 1) * q.group]
        out[:, at : at + part.shape[1]] = (part.astype(np.int16) + 128).astype(np.uint8)
        out[:, at + part.shape[1] : at + up(part.shape[1], 8)] = 128
        at += up(part.shape[1], 8)
    assert at == padded_k(K, q.group)
    scales = np.ascontiguousarray(q.scales).view(np.uint8)
    out[:, at : at + scales.shape[1]] = scales
    return out.reshape(-1)
