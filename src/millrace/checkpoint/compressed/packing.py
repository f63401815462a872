"""Codes packed into 32-bit words, as in pack-quantized files; the only module that shifts these bits.

    4 bits  [R][ceil(C / 8)] int32, code + 8 of column 8i + j in bits 4j .. 4j + 3 of word i
    8 bits  [R][ceil(C / 4)] int32, code + 128 of column 4i + j in bits 8j .. 8j + 7
Words are little endian; columns beyond the last are zero bits.
source: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized/helpers.py
"""

import numpy as np
from numpy.typing import NDArray

BITS = (4, 8)


def words_of(n: int, bits: int) -> int:
    """Return the number of words for n codes."""
    return -(-n * bits // 32)


def pack(codes: NDArray[np.int8], bits: int) -> NDArray[np.int32]:
    """Pack codes (R, C) in -2^(bits-1) .. 2^(bits-1)-1 into words (R, words_of(C, bits))."""
    R, C = codes.shape
    unsigned = np.zeros((R, words_of(C, bits) * 32 // bits), np.uint8)
    # unsigned overflow gives the right value for negative codes
    np.add(codes.view(np.uint8), np.uint8(1 << bits - 1), out=unsigned[:, :C])
    packed = unsigned if bits == 8 else unsigned[:, ::2] | unsigned[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(packed).view("<i4")


def unpack(words: NDArray[np.int32], bits: int, n: int) -> NDArray[np.int8]:
    """Unpack words (R, words_of(n, bits)) into codes (R, n)."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return (packed[:, :n] - np.uint8(128)).view(np.int8)
    unsigned = np.empty((len(packed), packed.shape[1] * 2), np.uint8)
    unsigned[:, ::2] = packed & 15
    unsigned[:, 1::2] = packed >> np.uint8(4)
    return (unsigned[:, :n] - np.uint8(8)).view(np.int8)
