"""The supported tensor types of GGUF: the layout of a block of weights, and the exact values that it represents.

Every type has a byte layout and a float32 formula, in ggml's order of operations. In shapes, B is the number of blocks.
source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h (layouts) and ggml-quants.c (formulas)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix

Blocks = np.ndarray[Any, np.dtype[Any]]  # (B,) of a type's layout
Floats = NDArray[np.float32]

# w = scale * (code - 8); byte i of codes: weight i in the low nibble, weight i + 16 in the high one
Q4_0 = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
# w = scale * code + minimum
Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)])
# w = scale * (code - 16); bit i of `high` is the fifth bit of weight i
Q5_0 = np.dtype([("scale", "<f2"), ("high", "<u4"), ("codes", "u1", 16)])
Q5_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("high", "<u4"), ("codes", "u1", 16)])
Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])
# 8 runs of 32 weights, w = scale * s * code - minimum * m with 6-bit s and m of the run (`_run_scales`);
# 32 bytes of codes hold two runs, the first in the low nibbles
Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("runs", "u1", 12), ("codes", "u1", (4, 32))])
# bit r of byte i of `high` is the fifth bit of weight i of run r
Q5_K = np.dtype(
    [("scale", "<f2"), ("minimum", "<f2"), ("runs", "u1", 12), ("high", "u1", 32), ("codes", "u1", (4, 32))]
)
# 16 runs of 16 weights, w = scale * s * (code - 32); halves of 128 weights in four quarters of 32: the low nibbles of
# both rows of codes, then the high ones; quarter q has its bits 4 and 5 in bits 2q and 2q + 1 of `high`
Q6_K = np.dtype([("codes", "u1", (2, 2, 32)), ("high", "u1", (2, 32)), ("runs", "i1", 16), ("scale", "<f2")])
# Four bits choose one of 16 numbers (`_IQ4`), which are 8-bit integers: w = scale * number
IQ4_NL = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
# 8 runs of 32 weights, w = scale * (s - 32) * number; s has its low 4 bits in `low`, two runs in a byte, and its upper
# 2 bits in bits 2r and 2r + 1 of `high`
IQ4_XS = np.dtype([("scale", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("codes", "u1", (8, 16))])
# w = 2 ** (exponent - 128) * number of `_MXFP4`, twice the value of the 4-bit float E2M1 (OCP Microscaling Formats 1.0)
MXFP4 = np.dtype([("exponent", "u1"), ("codes", "u1", 16)])
assert [t.itemsize for t in (IQ4_NL, IQ4_XS, MXFP4)] == [18, 136, 17]
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_HALF_EXPONENTS = 104, 143  # exponents whose scales are float16: 2 ** -24 to 2 ** 15
assert [t.itemsize for t in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0)] == [18, 20, 22, 24, 34]
assert [t.itemsize for t in (Q4_K, Q5_K, Q6_K)] == [144, 176, 210]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `name` as in llama.cpp; a block has `weights` weights in `layout.itemsize` bytes."""

    name: str
    weights: int
    layout: np.dtype[Any]
    dequantise: Callable[[Blocks], Floats] | None = None  # (B,) -> (B, weights); None: plain floats
    format: QuantisedFormat | None = None  # format of the integers that `in_codes` returns; None: plain floats

    @property
    def nbytes(self) -> int:
        return self.layout.itemsize

    @property
    def dtype(self) -> str:
        """Return the type's name in `TensorInfo`: "float16", "q4_k"."""
        return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(self.name, self.name.lower())


def stored_format(dtype: str) -> QuantisedFormat | None:
    """Return the integer format of a type, by its name in `TensorInfo`; None for floats."""
    return next(kind.format for kind in TYPES.values() if kind.dtype == dtype)


def in_codes(kind: BlockType, blocks: Blocks) -> QuantisedMatrix:
    """(B,) -> a matrix with one row per block that represents w exactly. Only for types with a `format`."""
    assert kind.format, kind
    scales = _half_scales(blocks) if kind.name == "MXFP4" else blocks["scale"]
    stored_format, build = kind.format, partial(QuantisedMatrix, _codes(kind.name, blocks), scales[:, None])
    if kind.name == "IQ4_XS":
        return build(stored_format.group, stored_format.bits, scale_levels=_iq4_levels(blocks))
    if not stored_format.minimums:
        return build(
            stored_format.group, stored_format.bits, scale_levels=blocks["runs"] if stored_format.two_levels else None
        )
    minimums = blocks["minimum"][:, None]
    if not stored_format.two_levels:
        return build(stored_format.group, stored_format.bits, minimums)
    return build(
        stored_format.group, stored_format.bits, -minimums, *_run_levels(blocks["runs"])
    )  # ggml subtracts the minimums


def is_exact_in_codes(kind: BlockType, blocks: Blocks) -> bool:
    """Return whether `in_codes` represents these blocks: MXFP4's scales can be too small or too large for float16."""
    if kind.name != "MXFP4":
        return True
    low, high = _HALF_EXPONENTS
    outside = (blocks["exponent"] < low) | (blocks["exponent"] > high)
    return not bool(_codes(kind.name, blocks[outside]).any())


def _half_scales(blocks: Blocks) -> NDArray[np.float16]:
    """Return the scales (B,) of MXFP4; 0 for those outside of float16's range, whose codes are all 0."""
    low, high = _HALF_EXPONENTS
    exponents = blocks["exponent"].astype(np.int32)
    scales = np.ldexp(np.float32(1), np.clip(exponents, low, high) - 128).astype(np.float16)
    return np.where((low <= exponents) & (exponents <= high), scales, np.float16(0))


def _codes(name: str, blocks: Blocks) -> NDArray[np.int8]:
    """(B,) -> (B, weights) in the order of the weights; codes of symmetric types are signed."""
    match name:
        case "Q4_0":
            return (_nibbles(blocks["codes"]) - np.uint8(8)).view(np.int8)
        case "Q5_0":
            return (_five_bits(blocks) - np.uint8(16)).view(np.int8)  # wraps around, and is read as signed: -16 .. 15
        case "Q4_1":
            return _nibbles(blocks["codes"]).view(np.int8)
        case "Q5_1":
            return _five_bits(blocks).view(np.int8)
        case "Q4_K":
            return _as_row(_nibbles(blocks["codes"]))
        case "Q5_K":
            high = (blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
            low = _nibbles(blocks["codes"]).reshape(-1, 8, 32)
            return _as_row(low | np.left_shift(high, np.uint8(4)))
        case "Q6_K":
            low = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=2)  # (B, 2, 4, 32)
            high = (blocks["high"][:, :, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
            return _as_row((low | high << 4) - np.uint8(32))
        case "IQ4_NL":
            return _IQ4[_nibbles(blocks["codes"])]
        case "IQ4_XS":
            return _IQ4[_nibbles(blocks["codes"])].reshape(-1, 256)
        case "MXFP4":
            return _MXFP4[_nibbles(blocks["codes"])]
    codes: NDArray[np.int8] = blocks["codes"]
    assert name == "Q8_0", name
    return codes


def _as_row(codes: NDArray[Any]) -> NDArray[np.int8]:
    """Reshape the codes of blocks of 256 weights to (B, 256)."""
    return codes.reshape(-1, 256).view(np.int8)


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(..., n) -> (..., 2n): the low nibbles, then the high ones."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _five_bits(blocks: Blocks) -> NDArray[np.uint8]:
    high = (blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return _nibbles(blocks["codes"]) | np.left_shift(high.astype(np.uint8), np.uint8(4))


def _column(blocks: Blocks, field: str) -> Floats:
    """(B,) float16 -> (B, 1) float32"""
    column: Floats = blocks[field].astype(np.float32)[:, None]
    return column


def _floats(blocks: Blocks, name: str) -> Floats:
    return _codes(name, blocks).astype(np.float32)


def _symmetric(name: str) -> Callable[[Blocks], Floats]:
    return lambda blocks: _column(blocks, "scale") * _floats(blocks, name)


def _affine(name: str) -> Callable[[Blocks], Floats]:
    return lambda blocks: _column(blocks, "scale") * _floats(blocks, name) + _column(blocks, "minimum")


def _run_levels(packed: NDArray[np.uint8]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """(B, 12) -> s and m (B, 8), 6 bits each.

    Runs 0-3 are in the low 6 bits of bytes 0-3 (s) and 4-7 (m). Runs 4-7 have their low 4 bits in bytes 8-11 (s in the
    low nibble, m in the high one) and their upper 2 bits in the top of bytes 0-3 (s) and 4-7 (m).
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    m = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return s.view(np.int8), m.view(np.int8)


def _k_runs(name: str) -> Callable[[Blocks], Floats]:
    def dequantise(blocks: Blocks) -> Floats:
        s, m = (levels.astype(np.float32) for levels in _run_levels(blocks["runs"]))
        scale, minimum = (_column(blocks, "scale") * s)[:, :, None], (_column(blocks, "minimum") * m)[:, :, None]
        return (scale * _floats(blocks, name).reshape(-1, 8, 32) - minimum).reshape(-1, 256)

    return dequantise


def _q6_k(blocks: Blocks) -> Floats:
    scale = _column(blocks, "scale") * blocks["runs"].astype(np.float32)
    values: Floats = scale[:, :, None] * _floats(blocks, "Q6_K").reshape(-1, 16, 16)
    return values.reshape(-1, 256)


def _iq4_levels(blocks: Blocks) -> NDArray[np.int8]:
    """(B,) of IQ4_XS -> the runs' levels (B, 8): -32 to 31."""
    runs = np.arange(8)
    low = (blocks["low"][:, runs // 2] >> (4 * (runs % 2)).astype(np.uint8)) & 15
    high = ((blocks["high"][:, None] >> (2 * runs).astype(np.uint16)) & 3).astype(np.uint8)
    return ((low | high << 4).view(np.int8) - np.int8(32)).astype(np.int8)


def _iq4_xs(blocks: Blocks) -> Floats:
    scale = _column(blocks, "scale") * _iq4_levels(blocks).astype(np.float32)
    values: Floats = scale[:, :, None] * _floats(blocks, "IQ4_XS").reshape(-1, 8, 32)
    return values.reshape(-1, 256)


def _mxfp4(blocks: Blocks) -> Floats:
    scales = np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128)
    values: Floats = scales.astype(np.float32)[:, None] * _floats(blocks, "MXFP4")
    return values


# by the numbers of ggml's enum ggml_type
TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, np.dtype("<f4")),
    1: BlockType("F16", 1, np.dtype("<f2")),
    30: BlockType("BF16", 1, np.dtype(ml_dtypes.bfloat16)),
    2: BlockType("Q4_0", 32, Q4_0, _symmetric("Q4_0"), QuantisedFormat(4, 32)),
    3: BlockType("Q4_1", 32, Q4_1, _affine("Q4_1"), QuantisedFormat(4, 32, minimums=True)),
    6: BlockType("Q5_0", 32, Q5_0, _symmetric("Q5_0"), QuantisedFormat(5, 32)),
    7: BlockType("Q5_1", 32, Q5_1, _affine("Q5_1"), QuantisedFormat(5, 32, minimums=True)),
    8: BlockType("Q8_0", 32, Q8_0, _symmetric("Q8_0"), QuantisedFormat(8, 32)),
    12: BlockType("Q4_K", 256, Q4_K, _k_runs("Q4_K"), QuantisedFormat(4, 32, minimums=True, two_levels=True)),
    13: BlockType("Q5_K", 256, Q5_K, _k_runs("Q5_K"), QuantisedFormat(5, 32, minimums=True, two_levels=True)),
    14: BlockType("Q6_K", 256, Q6_K, _q6_k, QuantisedFormat(6, 16, two_levels=True)),
    20: BlockType("IQ4_NL", 32, IQ4_NL, _symmetric("IQ4_NL"), QuantisedFormat(8, 32)),
    23: BlockType("IQ4_XS", 256, IQ4_XS, _iq4_xs, QuantisedFormat(8, 32, two_levels=True)),
    39: BlockType("MXFP4", 32, MXFP4, _mxfp4, QuantisedFormat(8, 32)),
}
_UNSUPPORTED = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def type_name(number: int) -> str:
    """Return the name of a tensor type, for messages."""
    return _UNSUPPORTED.get(number, str(number))
