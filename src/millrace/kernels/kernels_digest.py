"""A digest of the meaning of an engine's bytes to the kernels: engines with another meaning are refused."""

import hashlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import SUPER_BLOCK, QuantisedMatrix
from millrace.kernels.catalogue import declarations_digest
from millrace.kernels.declare import RowFormat, WeightFormat
from millrace.kernels.layout import n_groups, row_bytes
from millrace.kernels.matmul.pack import (
    hadamard,
    interleave_codes,
    interleave_halves,
    pack_codes,
    pack_matrix,
    rounded_e4m3,
)
from millrace.kernels.rescore.pack import pack_byte_rows

_N, _K, _GROUPS = 19, 45, (12, 32)  # not a multiple of a panel, of a line, of a group
_LONG = 300  # longer than a super-block


@cache
def kernels_digest() -> str:
    """Digest the kernels' declarations and the packing of weights, which is sampled on small matrices."""
    digest = hashlib.blake2b(declarations_digest().encode(), digest_size=8)
    digest.update(repr([row_bytes(f, _K, group) for f in RowFormat for group in (0, *_GROUPS)]).encode())
    numbers = np.arange(-400, _N * _K - 400).reshape(_N, _K)
    floats = interleave_halves(numbers.astype(np.float32), -numbers.astype(np.float32))
    for format in (WeightFormat.F32, WeightFormat.BF16):
        digest.update(pack_matrix(floats, format, 0).tobytes())
    wide = np.arange(2 * _LONG, dtype=np.float32).reshape(2, _LONG)
    digest.update(b"".join(hadamard(wide, group).tobytes() for group in (*_GROUPS, _LONG)))  # which rows are met with
    for format, bits in ((WeightFormat.W8, 8), (WeightFormat.W4, 4)):
        for group in _GROUPS:
            codes = (numbers % (1 << bits) - (1 << bits - 1)).astype(np.int8)
            scales = np.arange(_N * n_groups(_K, group), dtype=np.float16).reshape(_N, -1)
            gate, up = QuantisedMatrix(codes, scales, group, bits), QuantisedMatrix(-1 - codes, -scales, group, bits)
            digest.update(pack_codes(interleave_codes(gate, up), format).tobytes())
            digest.update(pack_byte_rows(gate).tobytes() if bits == 8 else b"")
        for minimums, levels in ((True, False), (True, True), *([(False, True)] if bits == 8 else [])):
            digest.update(pack_codes(_sample(bits, 32 if minimums else 16, minimums, levels), format).tobytes())
    digest.update(pack_codes(rounded_e4m3(floats), WeightFormat.FP8).tobytes())
    return digest.hexdigest()


def _sample(bits: int, group: int, minimums: bool, levels: bool) -> QuantisedMatrix:
    """Return a matrix in one of the formats of checkpoints' weights."""
    groups = n_groups(_LONG, group)

    def numbers(width: int, dtype: type[np.generic], start: int) -> NDArray[Any]:
        return (np.arange(start, start + _N * width) % 64).astype(dtype).reshape(_N, width)

    codes, upper = numbers(_LONG, np.int8, 1) % 16, n_groups(_LONG, SUPER_BLOCK) if levels else groups
    return QuantisedMatrix(
        codes, numbers(upper, np.float16, 2), group, bits,
        numbers(upper, np.float16, 3) if minimums else None,
        numbers(groups, np.int8, 4) if levels else None,
        numbers(groups, np.int8, 5) if levels and minimums else None,
    )  # fmt: skip
