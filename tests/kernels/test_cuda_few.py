"""Few rows by codes of four bits on a GPU: Triton's interpreter beside float64, at odd sizes; and its instructions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.kernels.matmul.coded import weights
from millrace.kernels.matmul.gpu_tiles import EIGHT, EIGHT_OF_HALVES, takes
from millrace.kernels.matmul.pack import rounded_codes

products = pytest.importorskip("millrace.kernels.matmul.cuda", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from millrace.kernels.matmul import cuda_few  # noqa: E402 (Triton's)


def matrix(n: int, k: int, group: int, minimums: bool, rng: np.random.Generator) -> QuantisedMatrix:
    """Rows of very different scales."""
    codes = rounded_codes(rng.normal(size=(n, k)) * 10.0 ** rng.integers(-2, 3, (n, 1)), 4, group)
    if not minimums:
        return codes
    least = rng.normal(size=codes.scales.shape).astype(np.float16)
    return replace(codes, codes=codes.codes + np.int8(8), minimums=least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k", "group", "minimums"), [
    (1, 1, 8, 128, False), (8, 37, 136, 32, False), (1, 17, 2040, 64, True), (3, 5, 2048, 128, False),
    (1, 33, 2184, 256, True), (1, 16, 4096, 128, False), (7, 19, 1032, 0, False), (2, 7, 264, 0, True),
])  # fmt: skip
def test_few_rows_by_every_tile(m: int, n: int, k: int, group: int, minimums: bool, dtype: torch.dtype) -> None:
    """Beside float64 over the same codes: columns, units and blocks that end early, whole ones, a scale for each row.
    What lies behind a row's end is another row, and not summed."""
    rng = np.random.default_rng(k)
    of = matrix(n, k, group or k, minimums, rng)
    w, x = weights(of), torch.from_numpy(rng.normal(size=(m, k))).to(dtype)
    exact, dense = x.double().numpy(), of.dequantise()
    assert len(EIGHT_OF_HALVES) >= 3
    for tile in EIGHT_OF_HALVES:
        assert takes(tile, x, w)
        y = products.by_kernel(x, w, torch.float32, tile).double().numpy()
        assert (np.abs(y - exact @ dense.T) <= 2e-6 * (np.abs(exact) @ np.abs(dense).T)).all(), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_half_of_a_word_is_exact(dtype: torch.dtype) -> None:
    """All 16 codes in each of the 8 places of a word, met by rows of which one element is 1."""
    codes = np.stack([np.roll(np.arange(32) % 16, n) for n in range(16)]) - 8
    w = weights(QuantisedMatrix(codes.astype(np.int8), np.ones((16, 1), np.float16), 32, 4))
    for first in range(0, 32, EIGHT):
        x = torch.eye(32, dtype=dtype)[first : first + EIGHT]
        assert takes(EIGHT_OF_HALVES[0], x, w)
        assert products.product(x, w, torch.float32).T.tolist() == codes[:, first : first + EIGHT].tolist()


@pytest.mark.parametrize(("bits", "power", "places", "dtype"), [
    (cuda_few._BITS_BF16, cuda_few.POWER_BF16, cuda_few.PLACES_BF16, torch.bfloat16),
    (cuda_few._BITS_FP16, cuda_few.POWER_FP16, cuda_few.PLACES_FP16, torch.float16),
])  # fmt: skip
def test_the_instruction_does_what_the_interpreter_does(
    bits: tl.constexpr, power: tl.constexpr, places: tl.constexpr, dtype: torch.dtype
) -> None:
    """It is not run without a GPU: its numbers are looked at, and its table of what three bits become. 16 and a code's
    four bits behind it, in both halves, are what they should be."""
    name, *given = bits.value.strip(";").replace(",", "").split()
    assert (name, given[:2]) == ("lop3.b32", ["$0", "$1"])
    assert [int(n, 16) for n in given[2:]] == [places.value, power.value, (0xF0 & 0xCC) | 0xAA]
    shift = (places.value & -places.value).bit_length() - 1
    found = [places.value & (code << shift | code << 16 + shift) | power.value for code in range(16)]
    assert torch.tensor(found, dtype=torch.int32).view(dtype).tolist() == [16 + i // 2 for i in range(32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_starts_from_nothing_and_tells_what_is_not_finite(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    w = weights(matrix(20, 256, 64, minimums=True, rng=rng))
    x = torch.zeros((4, 256), dtype=dtype)
    assert not products.product(x, w, dtype).any()
    x[1, 131], x[3, 255] = float("nan"), float("inf")
    with np.errstate(invalid="ignore"):  # the interpreter's own products
        y = products.product(x, w, dtype)
    assert not y[[0, 2]].any() and not y[[1, 3]].isfinite().any()


def test_a_row_is_the_same_beside_others() -> None:
    """To the bit, however many they are: a column of tensor cores knows nothing of the next."""
    rng = np.random.default_rng(4)
    w = weights(matrix(40, 1152, 128, minimums=False, rng=rng))
    x = torch.from_numpy(rng.normal(size=(EIGHT, 1152))).bfloat16()
    whole = products.product(x, w, torch.float32)
    for m in (1, 2, 5):
        assert torch.equal(products.product(x[:m], w, torch.float32), whole[:m])


def test_what_is_taken_away_costs_little_beside_rounding() -> None:
    """Codes lie behind 16, which is taken away from sums: with inputs of one sign, and a few a thousand times as large,
    a hundredth of what the rounding to bfloat16 costs then."""
    rng = np.random.default_rng(5)
    of = matrix(64, 4096, 128, minimums=False, rng=rng)
    x = rng.normal(size=(1, 4096)) + 3
    x[0, rng.integers(0, 4096, 4)] *= 1000
    rows = torch.from_numpy(x).bfloat16()
    want = torch.from_numpy(rows.double().numpy() @ of.dequantise().T)
    lost, rounded = (
        (y.double() - want).norm() for y in (products.product(rows, weights(of), torch.float32), want.bfloat16())
    )
    assert lost <= rounded / 100
