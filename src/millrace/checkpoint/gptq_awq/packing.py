"""Codes packed into 32-bit words, as in GPTQ's and AWQ's files.

A word is little endian, and codes are dense bits: 32 codes in `bits` words, so that a code of 3 bits may lie in two.
AWQ's gemm layout has the eight codes of a word in another order.
source: GPTQModel's qlinear packing; AutoAWQ's WQLinear_GEMM and WQLinear_GEMV
"""

import numpy as np
from numpy.typing import NDArray

BITS = (2, 3, 4, 8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, that each nibble holds
_WORD = 32


def unpack(words: NDArray[np.int32], bits: int, n: int) -> NDArray[np.uint8]:
    """Unpack words (words_of(n, bits), C) along their first axis into unsigned codes (n, C)."""
    blocks = -(-len(words) // bits)
    padded = np.zeros((blocks * bits, words.shape[1]), np.uint32)
    padded[: len(words)] = words.view(np.uint32)
    of_blocks = padded.reshape(blocks, bits, -1)
    codes = np.empty((blocks, _WORD, words.shape[1]), np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for i in range(_WORD):
        word, shift = divmod(i * bits, _WORD)
        low = of_blocks[:, word] >> np.uint32(shift)
        if shift + bits > _WORD:
            low = low | of_blocks[:, word + 1] << np.uint32(_WORD - shift)
        codes[:, i] = low & mask
    return codes.reshape(blocks * _WORD, -1)[:n]


def in_awq_order(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return codes (n, C) of AWQ's gemm words, unpacked along the first axis, in the order of their columns."""
    result = np.empty_like(codes)
    for nibble, column in enumerate(AWQ_ORDER):
        result[column :: len(AWQ_ORDER)] = codes[nibble :: len(AWQ_ORDER)]
    return result
