"""One row by codes of four bits on a GPU: Triton's interpreter beside float64, at odd sizes; and by tensor cores."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.kernels.matmul.coded import weights
from millrace.kernels.matmul.gpu_tiles import ONE_OF_HALVES, takes
from millrace.kernels.matmul.pack import rounded_codes

products = pytest.importorskip("millrace.kernels.matmul.cuda", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from millrace.kernels.matmul import cuda_row  # noqa: E402 (Triton's)


def matrix(n: int, k: int, group: int, minimums: bool, rng: np.random.Generator) -> QuantisedMatrix:
    """Rows of very different scales."""
    codes = rounded_codes(rng.normal(size=(n, k)) * 10.0 ** rng.integers(-2, 3, (n, 1)), 4, group)
    if not minimums:
        return codes
    least = rng.normal(size=codes.scales.shape).astype(np.float16)
    return replace(codes, codes=codes.codes + np.int8(8), minimums=least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group", "minimums"), [
    (1, 8, 128, False), (37, 136, 32, False), (17, 2040, 64, True), (5, 2048, 128, False), (33, 2184, 256, True),
    (16, 4096, 128, False), (19, 1032, 0, False), (7, 264, 0, True),
])  # fmt: skip
def test_one_row_of_halves_by_every_tile(n: int, k: int, group: int, minimums: bool, dtype: torch.dtype) -> None:
    """Beside float64 over the same codes: columns, units and blocks that end early, whole ones, a scale for each row.
    What lies behind a row's end is another row, and not summed."""
    rng = np.random.default_rng(k)
    of = matrix(n, k, group or k, minimums, rng)
    w, x = weights(of), torch.from_numpy(rng.normal(size=(1, k))).to(dtype)
    exact, dense = x.double().numpy(), of.dequantise()
    assert len(ONE_OF_HALVES) >= 3
    for tile in ONE_OF_HALVES:
        assert takes(tile, x, w)
        y = products.by_kernel(x, w, torch.float32, tile).double().numpy()
        assert (np.abs(y - exact @ dense.T) <= 2e-6 * (np.abs(exact) @ np.abs(dense).T)).all(), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_half_of_a_word_is_exact(dtype: torch.dtype) -> None:
    """All 16 codes in each of the 8 places of a word, met by a row of which one element is 1."""
    codes = np.stack([np.roll(np.arange(32) % 16, n) for n in range(16)]) - 8
    w = weights(QuantisedMatrix(codes.astype(np.int8), np.ones((16, 1), np.float16), 32, 4))
    for place in range(32):
        x = torch.nn.functional.one_hot(torch.tensor([place]), 32).to(dtype)
        assert products.product(x, w, torch.float32)[0].tolist() == codes[:, place].tolist()


@pytest.mark.parametrize(("bits", "power", "places", "dtype"), [
    (cuda_row._BITS_BF16, cuda_row.POWER_BF16, cuda_row.PLACES_BF16, torch.bfloat16),
    (cuda_row._BITS_FP16, cuda_row.POWER_FP16, cuda_row.PLACES_FP16, torch.float16),
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
    x = torch.zeros((1, 256), dtype=dtype)
    assert not products.product(x, w, dtype).any()
    for wrong in ("nan", "inf"):
        x[0, 131] = float(wrong)
        with np.errstate(invalid="ignore"):  # the interpreter's own products
            assert not products.product(x, w, dtype).isfinite().any()


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
