"""Products of E4M3 weights: each code, exact sums at every edge, the same bits whatever else is in a batch."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.errors import CheckpointError
from millrace.kernels.convert.ref import pack_rows, to_bf16
from millrace.kernels.declare import RowFormat, WeightFormat
from millrace.kernels.layout import matrix_bytes, row_bytes
from millrace.kernels.library import usable_isas
from millrace.kernels.matmul.pack import interleave_codes, pack_codes, pack_matrix, rounded_e4m3
from tests.support.one_step import Machine, run_kernel

F32 = NDArray[np.float32]
Array = NDArray[np.generic]


def value_of(code: int) -> float:
    """By the table of E4M3 (arXiv:2209.05433, section 3): 4 bits of exponent, 3 of mantissa, no infinity."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


NAN = (0x7F, 0xFF)
VALUES = np.array([np.nan if code in NAN else value_of(code) for code in range(256)])
CODES = np.array([code for code in range(256) if code not in NAN], np.uint8)


def matrix(codes: NDArray[np.uint8], scales: NDArray[np.floating[Any]] | float = 1.0) -> QuantisedMatrix:
    wide = np.broadcast_to(np.asarray(scales, np.float32).reshape(-1, 1), (len(codes), 1)).copy()
    return QuantisedMatrix(codes.view(np.int8), wide, 0, 8, e4m3=True)


def multiply(x: F32, w: QuantisedMatrix, machine: Machine) -> F32:
    (M, K), N = x.shape, len(w.codes)
    packed = pack_codes(w, WeightFormat.FP8)
    assert packed.nbytes == matrix_bytes(WeightFormat.FP8, N, K, 0)
    params = {
        "rows": 0, "n": N, "k": K, "format": RowFormat.BF16, "weights": WeightFormat.FP8,
        "x_stride": row_bytes(RowFormat.BF16, K, 0), "y_stride": N,
    }  # fmt: skip
    operands: dict[str, Array | None] = {
        "x": pack_rows(x, RowFormat.BF16, 0),
        "w": packed,
        "y": np.zeros((M, N), np.float32),
    }
    return run_kernel("matmul", operands, params, [M], machine)["y"].view(np.float32).reshape(M, N)


def test_the_table_is_that_of_the_format() -> None:
    known = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.flatnonzero(np.isnan(known)).tolist() == [*NAN]
    np.testing.assert_array_equal(known, VALUES)
    np.testing.assert_array_equal(matrix(CODES[None]).values()[0], VALUES[CODES])


@pytest.mark.parametrize("M", [1, 254])  # decoded in the loop, and brought before it
def test_every_code_times_its_scale(M: int, machine: Machine) -> None:
    """Rows that are 1 in one place take out one weight of each output: nothing is summed but zeros."""
    scales = np.random.default_rng(1).uniform(0.001, 3, 33).astype(np.float32)
    codes = np.stack([np.roll(CODES, n) for n in range(33)])
    expected = (VALUES[codes].astype(np.float32) * scales[:, None]).T
    w, x = matrix(codes, scales), np.eye(254, dtype=np.float32)
    for first in range(0, 254, M) if M > 1 else (0, 1, 100, 253):
        assert (multiply(x[first : first + M], w, machine) == expected[first : first + M]).all()


@pytest.mark.parametrize("K", [1, 2, 3, 31, 64, 127, 128, 129, 257])
@pytest.mark.parametrize("N", [1, 31, 32, 33, 64])
def test_sums_of_integers_are_exact(N: int, K: int, machine: Machine) -> None:
    """Codes that are integers, or subnormal ones that a scale of 2^9 makes such; scales are powers of two."""
    rng = np.random.default_rng([N, K])
    for name, choice in (("normal", np.flatnonzero((VALUES % 1 == 0) & (np.abs(VALUES) <= 16))),
                         ("subnormal", np.flatnonzero(np.abs(VALUES) < 2.0**-6))):  # fmt: skip
        codes = rng.choice(choice.astype(np.uint8), (N, K))
        scales = 2.0 ** rng.integers(0, 3, N) * (1 if name == "normal" else 512)
        for M in (1, 2, 3, 4, 5, 12, 13, 14, 15, 17):
            x = rng.integers(-255, 256, (M, K)).astype(np.float32)
            truth = x.astype(np.float64) @ (VALUES[codes] * scales[:, None]).T
            assert np.abs(x).sum(axis=1).max() * 16 < 2**24, "every sum is an integer that a float32 holds"
            assert (multiply(x, matrix(codes, scales), machine) == truth).all(), f"{name}, {M} rows"


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((17, 300), np.float32), rounded_e4m3(rng.standard_normal((97, 300), np.float32))
    alone = np.concatenate([multiply(x[m : m + 1], w, Machine(usable_isas()[0])) for m in range(17)])
    for isa in usable_isas():
        for M in range(1, 18):
            for tile_rows in (0, 2):
                assert (multiply(x[:M], w, Machine(isa, 1 + M % 3, tile_rows)) == alone[:M]).all(), (isa, M, tile_rows)


def test_long_rows_have_the_sums_of_bfloat16() -> None:
    """The bits are those of bfloat16's own sums: blocks of 128 inputs, each pair the odd product first."""
    K, rng = (1 << 16) + 2, np.random.default_rng(4)
    x, codes = rng.standard_normal((15, K), np.float32), rng.choice(CODES, (1, K))
    w = pack_matrix(VALUES[codes].astype(np.float32), WeightFormat.BF16, 0)
    params = {
        "rows": 0, "n": 1, "k": K, "format": RowFormat.BF16, "weights": WeightFormat.BF16,
        "x_stride": row_bytes(RowFormat.BF16, K, 0), "y_stride": 1,
    }  # fmt: skip
    operands: dict[str, Array | None] = {
        "x": pack_rows(x, RowFormat.BF16, 0),
        "w": w,
        "y": np.zeros((15, 1), np.float32),
    }
    for isa in usable_isas():
        in_bf16 = run_kernel("matmul", operands, params, [15], Machine(isa))["y"].view(np.float32)
        found = multiply(x, matrix(codes, 0.25), Machine(isa))
        assert (found[:, 0] == in_bf16 * np.float32(0.25)).all(), isa
        np.testing.assert_allclose(
            found[:, 0], to_bf16(x).astype(np.float64) @ VALUES[codes[0]] / 4, rtol=1e-3, atol=0.5
        )


def test_gate_and_up_are_interleaved_with_their_scales() -> None:
    rng = np.random.default_rng(5)
    gate, up = (matrix(rng.choice(CODES, (19, 12)), rng.uniform(0.1, 1, 19)) for _ in range(2))
    both = interleave_codes(gate, up).dequantise()
    for first in (0, 16):
        n = min(16, 19 - first)
        np.testing.assert_array_equal(both[2 * first : 2 * first + n], gate.dequantise()[first : first + n])
        np.testing.assert_array_equal(both[2 * first + 16 : 2 * first + 16 + n], up.dequantise()[first : first + n])


@pytest.mark.parametrize("seed", range(2))
def test_rounding_takes_the_nearest_code(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((9, 33)) * 10.0 ** rng.integers(-4, 3, (9, 1))).astype(np.float32)
    made = rounded_e4m3(w)
    scales = np.abs(w).max(axis=1, keepdims=True) / np.float32(448)
    assert (made.scales == scales).all() and np.abs(made.values()).max(axis=1).tolist() == [448.0] * 9
    nearest = np.abs(w[:, :, None] / scales.astype(np.float64)[:, :, None] - VALUES[CODES]).min(axis=2)
    off = np.abs(made.values() - w / scales.astype(np.float64))
    np.testing.assert_allclose(off, nearest, rtol=1e-5, atol=1e-6)


def test_rounding_at_the_edges() -> None:
    w = np.zeros((3, 8), np.float32)
    w[1, 2], w[2] = -448, np.float32(1e-38)
    made = rounded_e4m3(w)
    assert not made.dequantise()[0].any() and made.dequantise()[1, 2] == -448
    assert np.abs(made.dequantise()[2] - 1e-38).max() <= 1e-38 / 16 and (made.scales >= 2.0**-126).all()
    w[0, 0] = np.inf
    with pytest.raises(CheckpointError, match="not finite"):
        rounded_e4m3(w)
