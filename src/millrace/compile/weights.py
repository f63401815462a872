"""Constants as the packed bytes that kernels read; packing itself happens when the engine is written."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.compile.program import Packed
from millrace.graph.types import Array, Constant, Value
from millrace.kernels.declare import WeightFormat
from millrace.kernels.layout import byte_row_bytes, matrix_bytes, up
from millrace.kernels.matmul.pack import interleave_codes, interleave_halves, pack_codes, pack_matrix
from millrace.kernels.matmul.quantise import quantise_matrix, stored_codes
from millrace.kernels.rescore.pack import pack_byte_rows

_BITS = {WeightFormat.W8: 8, WeightFormat.W4: 4}


def _sizes(value: Value) -> tuple[int, ...]:
    return tuple(d for d in value.shape if isinstance(d, int))


def _constant(value: Value) -> Constant:
    assert value.constant, f"{value} is computed in the step, not a constant"
    return value.constant


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pack_vector(value: Value, kind: str) -> Packed:
    """Norm weights, biases, rotary tables: float32, as they are."""
    constant, shape = _constant(value), _sizes(value)
    nbytes = int(np.prod(shape)) * 4
    return Packed(
        _name(constant), constant.origin, shape, "f32", nbytes, lambda: _bytes(constant.load().astype(np.float32))
    )


def pack_table(value: Value, kind: str) -> Packed:
    """The embedding table, row by row, in float32 or bfloat16."""
    constant, shape = _constant(value), _sizes(value)
    dtype = np.dtype(np.float32) if kind == "f32" else np.dtype(ml_dtypes.bfloat16)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return Packed(_name(constant), constant.origin, shape, kind, nbytes, lambda: _bytes(constant.load().astype(dtype)))


def pack_weight(values: Sequence[Value], format: WeightFormat, group: int, name: str) -> Packed:
    """A matrix in panels; two of them are interleaved as gate and up."""
    constants, (n, k) = [_constant(v) for v in values], _sizes(values[0])
    gated = len(constants) == 2
    rows = 2 * up(n, 16) if gated else n

    def pack() -> NDArray[np.uint8]:
        codes = stored_codes(constants, _BITS[format], group) if format in _BITS else None
        if codes:
            return pack_codes(interleave_codes(*codes) if gated else codes[0], format)
        arrays = [c.load() for c in constants]
        whole = interleave_halves(*(a.astype(np.float32) for a in arrays)) if gated else arrays[0]
        return pack_matrix(whole, format, group)  # type: ignore[arg-type]

    origin = tuple(o for c in constants for o in c.origin)
    return Packed("+".join(origin), origin, (rows, k), name, matrix_bytes(format, rows, k, group), pack)


def pack_bytes(value: Value, group: int) -> Packed:
    """A matrix of 8-bit codes, output by output."""
    constant, (n, k) = _constant(value), _sizes(value)

    def pack() -> NDArray[np.uint8]:
        stored = stored_codes([constant], 8, group)
        return pack_byte_rows(stored[0] if stored else quantise_matrix(constant.load().astype(np.float32), 8, group))

    nbytes = n * byte_row_bytes(k, group)
    return Packed(_name(constant), constant.origin, (n, k), f"w8g{group} by output", nbytes, pack)


def _name(constant: Constant) -> str:
    return "+".join(constant.origin)
