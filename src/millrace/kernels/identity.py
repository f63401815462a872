"""What an engine's bytes mean to the kernels, as a digest: engines of another meaning are refused, not misread."""

import hashlib
from functools import cache

import numpy as np

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.kernels.catalogue import declarations_digest
from millrace.kernels.declare import RowFormat, WeightFormat
from millrace.kernels.layout import n_groups, row_bytes
from millrace.kernels.matmul.pack import interleave_codes, interleave_halves, pack_codes, pack_matrix
from millrace.kernels.rescore.pack import pack_byte_rows

_N, _K, _GROUPS = 19, 45, (12, 32)  # no multiple of a panel, of a line, of a group


@cache
def kernels_digest() -> str:
    """Of the kernels' declarations and of where packing puts each byte: taken from what it makes of small matrices."""
    digest = hashlib.blake2b(declarations_digest().encode(), digest_size=8)
    digest.update(repr([row_bytes(f, _K, group) for f in RowFormat for group in (0, *_GROUPS)]).encode())
    numbers = np.arange(-400, _N * _K - 400).reshape(_N, _K)
    floats = interleave_halves(numbers.astype(np.float32), -numbers.astype(np.float32))
    for format in (WeightFormat.F32, WeightFormat.BF16):
        digest.update(pack_matrix(floats, format, 0).tobytes())
    for format, bits in ((WeightFormat.W8, 8), (WeightFormat.W4, 4)):
        for group in _GROUPS:
            codes = (numbers % (1 << bits) - (1 << bits - 1)).astype(np.int8)
            scales = np.arange(_N * n_groups(_K, group), dtype=np.float16).reshape(_N, -1)
            gate, up = QuantisedMatrix(codes, scales, group, bits), QuantisedMatrix(-1 - codes, -scales, group, bits)
            digest.update(pack_codes(interleave_codes(gate, up), format).tobytes())
            digest.update(pack_byte_rows(gate).tobytes() if bits == 8 else b"")
    return digest.hexdigest()
