"""Matrix products of every numerics class, on sizes around every boundary, against float64."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.graph.expressions import Tree, evaluate
from millrace.kernels.convert.ref import pack_rows, to_bf16, to_q8
from millrace.kernels.declare import RowFormat, WeightFormat
from millrace.kernels.expression import compile_tree
from millrace.kernels.layout import row_bytes, up
from millrace.kernels.library import usable_isas
from millrace.kernels.matmul import ref
from millrace.kernels.matmul.pack import interleave_halves, pack_matrix, rounded_codes, rounded_e4m3
from tests.support.emulated_amx import KERNEL_ISAS
from tests.support.one_step import Machine, run_kernel
from tests.support.tolerance import assert_no_worse

CLASSES = {
    "f32": (RowFormat.F32, WeightFormat.F32),
    "bf16": (RowFormat.BF16, WeightFormat.BF16),
    "bf16 by tiles": (RowFormat.BF16, WeightFormat.BF16),
    "w8a8": (RowFormat.Q8, WeightFormat.W8),
    "w4a8": (RowFormat.Q8, WeightFormat.W4),
    "w8a16": (RowFormat.BF16, WeightFormat.W8),
    "w4a16": (RowFormat.BF16, WeightFormat.W4),
    "fp8a16": (RowFormat.BF16, WeightFormat.FP8),
}
F32 = NDArray[np.float32]


def multiply(kind: str, x: F32, w: F32, group: int, machine: Machine, **more: Any) -> F32:
    """x (M, K) times w (N, K) through the kernel; more: bias, residual, gated with a tree."""
    format, weights = CLASSES[kind]
    (M, K), N, group = x.shape, w.shape[0], group if weights in (WeightFormat.W8, WeightFormat.W4) else 0
    rows = x if format == RowFormat.F32 else pack_rows(x, format, group)
    width, packed = int(more["width"]) if "width" in more else N, int("packed" in more)
    y_stride = int(more["packed"]) if packed else width
    code, numbers = compile_tree(more["tree"], 2) if "tree" in more else ([], [])
    operands = {
        "x": rows, "w": pack_matrix(w, weights, group), "bias": more.get("bias"), "residual": more.get("residual"),
        "y": np.zeros((M, y_stride // (1 + packed)), np.float32),
    }  # fmt: skip
    params = {
        "rows": 0, "n": N, "k": K, "group": group, "x_group": group, "format": format, "weights": weights,
        "x_stride": row_bytes(format, K, group), "y_stride": y_stride, "packed": packed, "gated": int("tree" in more),
        "tiles": int(kind.endswith("tiles")), "code": code, "imm": numbers,
    }  # fmt: skip
    return run_kernel("matmul", operands, params, [M], machine)["y"].view(np.float32).reshape(M, -1)


def exact(kind: str, x: F32, w: F32, group: int) -> NDArray[np.floating[Any]]:
    """The class's own arithmetic in float64: rounding and quantising are given, the sums are exact."""
    wide = x.astype(np.float64)
    match kind:
        case "f32":
            return ref.matmul(wide, w.astype(np.float64))
        case "bf16" | "bf16 by tiles":
            return ref.matmul_bf16(wide, w)
        case "w8a8" | "w4a8":
            return ref.matmul_q8(to_q8(x, group), rounded_codes(w, int(kind[1]), group))
        case "fp8a16":
            return ref.matmul_a16(wide, rounded_e4m3(w))
        case _:
            return ref.matmul_a16(wide, rounded_codes(w, int(kind[1]), group))


def plain(kind: str, x: F32, w: F32, group: int) -> F32:
    """The same product in float32 by NumPy, one output after the other."""
    y = np.zeros((x.shape[0], w.shape[0]), np.float32)
    left = to_bf16(x) if kind.startswith("bf16") or kind.endswith("a16") else x
    right = w
    if kind.startswith("bf16"):
        right = to_bf16(w)
    elif kind == "fp8a16":
        right = rounded_e4m3(w).values().astype(np.float32)
    elif kind != "f32":
        right = rounded_codes(w, int(kind[1]), group).dequantise().astype(np.float32)
        left = to_q8(x, group).dequantise().astype(np.float32) if kind.endswith("a8") else left
    for k in range(x.shape[1]):
        y += left[:, k, None] * right[None, :, k]
    return y * rounded_e4m3(w).scales.T if kind == "fp8a16" else y


def operands(M: int, N: int, K: int, seed: int) -> tuple[F32, F32]:
    rng = np.random.default_rng([seed, M, N, K])
    return rng.standard_normal((M, K), np.float32), rng.standard_normal((N, K), np.float32) * np.float32(0.05)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "M, N, K, group",
    [
        (1, 1, 1, 4), (1, 32, 128, 128), (2, 33, 129, 128), (3, 31, 127, 32), (5, 64, 256, 64), (13, 65, 100, 12),
        (14, 96, 260, 128), (15, 7, 36, 4), (16, 160, 320, 128), (29, 130, 72, 20), (43, 40, 516, 256),
    ],
)  # fmt: skip
def test_product(kind: str, M: int, N: int, K: int, group: int, machine: Machine) -> None:
    x, w = operands(M, N, K, seed=0)
    assert_no_worse(multiply(kind, x, w, group, machine), plain(kind, x, w, group), exact(kind, x, w, group))


@pytest.mark.parametrize("M, K", [(1, 2), (5, 31), (17, 64), (33, 70)])
def test_tiles_sum_as_the_instruction_says(M: int, K: int, machine: Machine) -> None:
    """Intel's manual, tdpbf16ps: of 32 inputs the even products and the odd ones from 0, then both to the total."""
    x, w = (to_bf16(v) for v in operands(M, 40, K, seed=6))
    y = np.zeros((M, 40), np.float32)
    for block in range(0, K, 32):
        sums = []
        for first in (0, 1):
            total = np.zeros((M, 40), np.float32)
            for k in range(block + first, min(block + 32, K), 2):  # a product of two bfloat16 is exact in float32
                total += x[:, k, None] * w[None, :, k]
            sums.append(total)
        y += sums[0] + sums[1]
    assert (multiply("bf16 by tiles", x, w, 0, machine) == y).all()


@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_integers_are_exact(kind: str, machine: Machine) -> None:
    """One group and scales of powers of two: nothing is rounded, so nothing may differ."""
    rng = np.random.default_rng(3)
    bits = int(kind[1])
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (64, 128)).astype(np.float32)
    codes[:, 0] = -(2 ** (bits - 1))  # the largest magnitude: the scale is 1
    x = rng.integers(-127, 128, (15, 128)).astype(np.float32)
    x[:, 0] = 127
    assert (multiply(kind, x, codes, 128, machine) == x @ codes.T).all()


@pytest.mark.parametrize("kind", ["w8a8", "w4a8", "w8a16", "w4a16"])
@pytest.mark.parametrize(
    "M, N, K, group", [(1, 33, 45, 12), (3, 31, 61, 20), (5, 64, 129, 32), (13, 65, 257, 128), (16, 40, 13, 4)]
)
def test_several_groups_are_exact(kind: str, M: int, N: int, K: int, group: int, machine: Machine) -> None:
    """Groups of different scales, all powers of two, the last group a short and odd one: nothing may be rounded."""
    rng = np.random.default_rng([4, M, K])
    bits = int(kind[1])
    low, starts = -(2 ** (bits - 1)), range(0, K, group)
    w = rng.integers(low, -low, (N, K)).astype(np.float32)
    x = rng.integers(-127, 128, (M, K)).astype(np.float32)
    w[:, starts], x[:, starts] = low, 127  # the largest magnitudes: they give the scales
    w *= np.repeat(2.0 ** rng.integers(0, 2, (N, len(starts))), group, axis=1)[:, :K].astype(np.float32)
    x *= np.repeat(2.0 ** rng.integers(0, 2, (M, len(starts))), group, axis=1)[:, :K].astype(np.float32)
    truth = x.astype(np.float64) @ w.astype(np.float64).T
    magnitudes = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    assert magnitudes.max() < 2**24, "every sum of them is an integer that a float32 holds"
    assert (multiply(kind, x, w, group, machine) == truth).all()


@pytest.mark.parametrize("kind", CLASSES)
def test_bits_depend_on_nothing_else(kind: str) -> None:
    """Each row alone, each instruction set and 1 to 3 threads: the same bits as all rows together."""
    x, w = operands(49, 130, 300, seed=1)
    expected = multiply(kind, x, w, 128, Machine(usable_isas()[0]))
    for isa in KERNEL_ISAS:
        for threads in (1, 2, 3):
            assert (multiply(kind, x, w, 128, Machine(isa, threads)) == expected).all(), f"{isa}, {threads} threads"
        for row in (0, 13, 48):
            assert (multiply(kind, x[row : row + 1], w, 128, Machine(isa)) == expected[row]).all(), (
                f"{isa}, row {row} alone"
            )


@pytest.mark.parametrize("kind", CLASSES)
def test_bias_and_residual(kind: str, machine: Machine) -> None:
    x, w = operands(17, 45, 64, seed=2)
    rng = np.random.default_rng(2)
    bias, residual = rng.standard_normal(45, np.float32), rng.standard_normal((17, 45), np.float32)
    y = multiply(kind, x, w, 32, machine)
    assert (multiply(kind, x, w, 32, machine, bias=bias) == y + bias).all()
    assert (multiply(kind, x, w, 32, machine, bias=bias, residual=residual) == y + bias + residual).all()


@pytest.mark.parametrize("kind", ["bf16", "bf16 by tiles", "w8a16", "fp8a16"])
def test_packed_rows_are_those_of_convert(kind: str, machine: Machine) -> None:
    x, w = operands(19, 48, 64, seed=8)
    tree: Tree = ("mul", ("mul", 0, ("sigmoid", 0)), 1)
    for more in ({}, {"tree": tree, "width": 48}):
        weights = interleave_halves(w, w[::-1].copy()) if more else w
        plain_y = multiply(kind, x, weights, 32, machine, **more)
        packed = multiply(kind, x, weights, 32, machine, packed=64, **more).view(np.uint16)[:, :48]
        assert (packed == (to_bf16(plain_y).view(np.uint32) >> 16)).all()


@pytest.mark.parametrize("kind", ["f32", "bf16", "bf16 by tiles", "w4a8", "fp8a16"])
@pytest.mark.parametrize("width", [16, 43, 172])
def test_gated_epilogue(kind: str, width: int, machine: Machine) -> None:
    """silu(gate) * up in the epilogue equals the same expression over the plain product."""
    x, gate = operands(15, width, 96, seed=4)
    up_ = operands(15, width, 96, seed=5)[1]
    tree: Tree = ("mul", ("mul", 0, ("sigmoid", 0)), 1)
    got = multiply(kind, x, interleave_halves(gate, up_), 32, machine, tree=tree, width=width)
    g, u = multiply(kind, x, gate, 32, machine), multiply(kind, x, up_, 32, machine)
    truth = evaluate(tree, [g.astype(np.float64), u.astype(np.float64)])
    assert_no_worse(got, evaluate(tree, [g, u]).astype(np.float32), truth.astype(np.float64))
    assert up(width, 16) * 2 == interleave_halves(gate, up_).shape[0]
