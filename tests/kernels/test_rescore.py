"""The second step of a two-step head: the right logits are computed again, with the bits of the 8-bit product."""

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.kernels.convert.ref import pack_rows, to_q8
from millrace.kernels.declare import Param, RowFormat, WeightFormat
from millrace.kernels.layout import row_bytes
from millrace.kernels.matmul.pack import pack_matrix, rounded_codes
from millrace.kernels.rescore.pack import pack_byte_rows
from millrace.kernels.rescore.ref import largest, rescore
from tests.support.one_step import Machine, run_kernel

ROWS = 3


def _rescored(
    y: NDArray[np.float32], x: NDArray[np.float32], w: NDArray[np.float32], group: int, count: int, machine: Machine
) -> NDArray[np.float32]:
    N, K = w.shape
    rows, packed = pack_rows(x, RowFormat.Q8, group), pack_byte_rows(rounded_codes(w, 8, group))
    params = {"rows": 0, "n": N, "k": K, "group": group, "x_stride": row_bytes(RowFormat.Q8, K, group), "count": count}
    got = run_kernel("rescore", {"x": rows, "w": packed, "y": y}, params, [len(y)], machine)
    return got["y"].view(np.float32).reshape(y.shape)


@pytest.mark.parametrize("count", [1, 5, 256])
@pytest.mark.parametrize("n, k, group", [(1, 8, 8), (63, 100, 32), (64, 128, 128), (1003, 320, 128), (4097, 260, 64)])
def test_the_largest_get_the_bits_of_the_8_bit_product(
    n: int, k: int, group: int, count: int, machine: Machine
) -> None:
    rng = np.random.default_rng([n, k, count])
    x, w = rng.standard_normal((ROWS, k), np.float32), rng.standard_normal((n, k), np.float32)
    y = (x @ w.T + rng.standard_normal((ROWS, n))).astype(np.float32)
    got = _rescored(y, x, w, group, count, machine)
    chosen = largest(y, count)
    assert (got[~chosen] == y[~chosen]).all(), "the others keep their bits"
    expected = rescore(y, to_q8(x, group), rounded_codes(w, 8, group), count)
    assert np.allclose(got, expected, rtol=2e-6, atol=2e-5)
    params: dict[str, Param] = {
        "rows": 0, "n": n, "k": k, "group": group, "x_group": group, "format": RowFormat.Q8, "weights": WeightFormat.W8,
        "x_stride": row_bytes(RowFormat.Q8, k, group), "y_stride": n, "gated": 0, "code": [], "imm": [],
    }  # fmt: skip
    operands: dict[str, NDArray[np.generic] | None] = {
        "x": pack_rows(x, RowFormat.Q8, group),
        "w": pack_matrix(w, WeightFormat.W8, group),
        "y": np.zeros_like(y),
    }
    whole = run_kernel("matmul", operands, params, [ROWS], machine)["y"].view(np.float32)
    assert (got[chosen] == whole.reshape(y.shape)[chosen]).all(), "the bits of w8a8"


@pytest.mark.parametrize("levels", [1, 2, 40])
def test_ties_go_to_lower_ids(levels: int, machine: Machine) -> None:
    rng = np.random.default_rng(levels)
    x, w = rng.standard_normal((ROWS, 64), np.float32), rng.standard_normal((2000, 64), np.float32)
    y = rng.integers(-levels, levels, (ROWS, 2000)).astype(np.float32) * 1e6  # far from what is computed again
    changed = _rescored(y, x, w, 64, 100, machine) != y
    assert (changed == largest(y, 100)).all()


def test_logits_that_are_not_finite_stay_so(machine: Machine) -> None:
    """Sampling must see them: the row fails there."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((ROWS, 64), np.float32), rng.standard_normal((300, 64), np.float32)
    y = rng.standard_normal((ROWS, 300)).astype(np.float32)
    y[1, 7] = np.nan
    assert np.isnan(_rescored(y, x, w, 64, 20, machine)[1, 7])
