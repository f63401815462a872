"""Rows as 8 bits on a GPU: the kernel in Triton's interpreter gives the bits of plain PyTorch, at odd sizes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels.convert.ref import to_e4m3, to_q8
from millrace.kernels.matmul.coded import AS_E4M3, QuantizedRows, RowQuantization, transformed

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")
from millrace.kernels.convert.cuda import is_made  # noqa: E402 (Triton's)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """Rows of all sizes; one of nothing, one below what is told from nothing, one whose ends are ties."""
    rng = np.random.default_rng(n)
    x = torch.from_numpy(rng.normal(size=(rows, n)) * 10.0 ** rng.integers(-3, 3, (rows, 1)))
    x[0], x[1] = 0, 1e-35
    x[2] = torch.from_numpy(rng.integers(-254, 255, n) / 2)
    return x.to(dtype)


def same(got: QuantizedRows, want: QuantizedRows) -> bool:
    """But for the sign of a zero."""
    codes = got.codes.dtype == want.codes.dtype and torch.equal(got.codes.float(), want.codes.float())
    return bool(codes and torch.equal(got.scales, want.scales))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 31, 128, 257])
def test_e4m3_has_the_same_bits(n: int, dtype: torch.dtype) -> None:
    x = drawn(7, n, dtype)
    got, want = triton_kernels.coded_rows(x, AS_E4M3), AS_E4M3.rows(x)
    assert same(got, want) and (got.width, got.group) == (n, n)
    np.testing.assert_allclose(got.dense().numpy(), to_e4m3(x.float().numpy()), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "group"), [(1, 4), (4, 4), (40, 16), (131, 64), (256, 128), (160, 24), (257, 0)])
def test_int8_has_the_same_bits(n: int, group: int, dtype: torch.dtype) -> None:
    """Groups that end early, that are no power of two, and whole rows."""
    x, coding = drawn(7, n, dtype), RowQuantization(e4m3=False, group=group)
    got, want = triton_kernels.coded_rows(x, coding), coding.rows(x)
    assert same(got, want) and got.group == want.group
    np.testing.assert_allclose(got.dense().numpy(), to_q8(x.float().numpy(), group or n).dequantise(), rtol=1e-6)


@pytest.mark.parametrize(
    ("n", "group"), [(2, 2), (64, 16), (256, 128), (384, 64), (40, 24), (72, 64), (256, 256), (64, 0)]
)
def test_transformed_rows_agree(n: int, group: int) -> None:
    """Sums come in another order, so that here and there a code is the next one; what is no block of a power of two
    goes as it went."""
    x, coding = drawn(7, n, torch.float32), RowQuantization(e4m3=False, group=group, transform=True)
    got, want = triton_kernels.coded_rows(x, coding), coding.rows(x)
    exact = transformed(x, group or n)
    far = (got.dense() - exact).abs()
    step = want.scales.repeat_interleave(want.group, 1)[:, :n]
    assert (far <= 0.501 * step + 1e-6 * exact.abs() + 1e-33).all()
    assert (got.codes == want.codes).float().mean() > 0.98
    assert is_made(coding, n) == (n % (group or n) == 0 and (group or n) in (2, 16, 64, 128))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@pytest.mark.parametrize(
    "coding", [AS_E4M3, RowQuantization(e4m3=False), RowQuantization(e4m3=False, group=16, transform=True)], ids=str
)
def test_rows_that_are_not_finite_stay_so(coding: RowQuantization) -> None:
    """And no row but theirs; of a row in groups, no group but theirs."""
    x = drawn(6, 32, torch.float16)
    x[3, 7], x[4, 31], x[5, 0] = float("inf"), float("nan"), float("-inf")
    with np.errstate(invalid="ignore"):  # the interpreter's own
        got, want = triton_kernels.coded_rows(x, coding), coding.rows(x)
    assert torch.equal(got.scales.isfinite(), want.scales.isfinite())
    assert got.scales.isfinite().all(1).tolist() == [True, True, True, False, False, False]
    finite = want.scales.isfinite().repeat_interleave(want.group, 1)
    assert (got.codes.float() == 0)[~finite].all()


def test_rows_need_not_lie_together() -> None:
    """Columns of a wider array: as they are copied, so they are coded."""
    x = drawn(5, 96, torch.bfloat16)
    part = x[:, 16:80]
    assert same(triton_kernels.coded_rows(part, AS_E4M3), AS_E4M3.rows(part))
