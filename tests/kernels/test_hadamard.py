"""Groups times Hadamard matrices before they are rounded: the transform itself, and what it is for."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.kernels.convert.ref import pack_rows, to_q8
from millrace.kernels.declare import HADAMARD_BLOCK, MAX_HADAMARD, Param, RowFormat, WeightFormat
from millrace.kernels.layout import row_bytes
from millrace.kernels.matmul.pack import hadamard, pack_matrix, rounded_codes
from millrace.kernels.matmul.ref import matmul_q8
from tests.support.one_step import Machine, run_kernel

F64 = NDArray[np.float64]
Operands = dict[str, NDArray[Any] | None]
Params = dict[str, Param]


def sylvester(n: int) -> F64:
    """By its definition: entry (i, j) is -1 to the number of ones that i and j share."""
    shared = np.arange(n)[:, None] & np.arange(n)
    odd = np.array([[bin(v).count("1") % 2 for v in row] for row in shared])
    return (1.0 - 2.0 * odd) / float(np.sqrt(n))


def of_groups(K: int, group: int) -> F64:
    """(K, K): what a row is multiplied by."""
    whole, at = np.zeros((K, K)), 0
    while at < K:
        left = min(group - at % group, K - at, HADAMARD_BLOCK)
        size = next(n for n in (128, 64, 32, 16, 8, 4, 2, 1) if n <= left)
        whole[at : at + size, at : at + size] = sylvester(size)
        at += size
    return whole


@pytest.mark.parametrize(
    "K, group", [(1, 4), (7, 4), (128, 128), (129, 128), (100, 32), (576, 128), (300, 200), (513, 512)]
)
def test_it_is_the_matrix_of_its_blocks_and_undoes_itself(K: int, group: int) -> None:
    x = np.random.default_rng(K).standard_normal((5, K), np.float32)
    y = hadamard(x, group)
    np.testing.assert_allclose(y, x.astype(np.float64) @ of_groups(K, group), atol=2e-6)
    np.testing.assert_allclose(hadamard(y, group), x, atol=2e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "M, N, K, group, x_group",
    [(1, 33, 7, 4, 4), (3, 32, 129, 128, 128), (17, 65, 320, 128, 32), (20, 31, 200, 96, 96), (33, 31, 200, 96, 24)],
)
def test_products_are_those_of_the_transformed_codes(
    M: int, N: int, K: int, group: int, x_group: int, bits: int, machine: Machine
) -> None:
    rng = np.random.default_rng([M, N, K])
    x, w = rng.standard_normal((M, K), np.float32), rng.standard_normal((N, K), np.float32)
    weights = WeightFormat.W8 if bits == 8 else WeightFormat.W4
    params: Params = {
        "rows": 0, "n": N, "k": K, "group": group, "x_group": x_group, "format": RowFormat.HADAMARD_Q8,
        "weights": weights, "gated": 0, "x_stride": row_bytes(RowFormat.HADAMARD_Q8, K, x_group), "y_stride": N,
        "code": [], "imm": [],
    }  # fmt: skip
    operands: Operands = {
        "x": pack_rows(x, RowFormat.HADAMARD_Q8, x_group), "w": pack_matrix(w, weights, group, x_group),
        "y": np.zeros((M, N), np.float32),
    }  # fmt: skip
    got = run_kernel("matmul", operands, params, [M], machine)["y"].view(np.float32).reshape(M, N)
    exact = matmul_q8(to_q8(x, x_group, transform=True), rounded_codes(w, bits, group, x_group))
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


def test_an_outlier_costs_its_neighbours_little() -> None:
    """One input a hundred times as large as the others takes nearly seven of their eight bits, transformed three."""
    x = np.random.default_rng(1).standard_normal((64, 128), np.float32)
    x[:, 17] *= 100
    plain, transformed = to_q8(x, 128), to_q8(x, 128, transform=True)
    lost = np.linalg.norm(plain.dequantise() - x, axis=1)
    less = np.linalg.norm(hadamard(transformed.dequantise(), 128) - x, axis=1)
    assert np.median(lost) > 1.5 and np.median(less) < np.median(lost) / 6


@pytest.mark.parametrize("group", [0, MAX_HADAMARD + 4])
@pytest.mark.parametrize("kernel", ["convert", "rms_norm"])
def test_a_group_has_a_size_that_a_kernel_has_room_for(kernel: str, group: int, machine: Machine) -> None:
    n = 5000
    stride = row_bytes(RowFormat.HADAMARD_Q8, n, group)
    params: Params = {
        "rows": 0, "runs": 1, "n": n, "x_stride": n, "y_stride": stride, "format": RowFormat.HADAMARD_Q8,
        "group": group, "eps": 1e-5,
    }  # fmt: skip
    operands: Operands = {
        "x": np.ones((2, n), np.float32),
        "w": np.ones(n, np.float32),
        "y": np.zeros((2, stride), np.uint8),
    }
    names = ("x", "y") if kernel == "convert" else ("x", "w", "y")
    own = {k: v for k, v in params.items() if kernel == "rms_norm" or k not in ("runs", "eps")}
    with pytest.raises(AssertionError, match="group"):  # of the declaration, from which the C++ checks are made
        run_kernel(kernel, {k: operands[k] for k in names}, own, [2], machine)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_group_nothing(bad: float, machine: Machine) -> None:
    x = np.ones((2, 300), np.float32)
    x[1, 200] = bad
    stride = row_bytes(RowFormat.HADAMARD_Q8, 300, 128)
    params = {"rows": 0, "n": 300, "x_stride": 300, "y_stride": stride, "format": RowFormat.HADAMARD_Q8, "group": 128}
    got = run_kernel("convert", {"x": x, "y": np.zeros((2, stride), np.uint8)}, params, [2], machine)["y"]
    scales = got.reshape(2, stride)[:, 304:316].copy().view(np.float32)  # 2 x 128 and 44 codes, 44 padded to 48
    assert np.isnan(scales).tolist() == [[False] * 3, [False, True, False]]
