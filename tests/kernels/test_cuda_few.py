"""Few rows by INT4 and INT8 on a GPU: Triton's interpreter beside float64, at odd sizes; and its instructions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.kernels.matmul.coded import weights
from millrace.kernels.matmul.gpu_tiles import EIGHT, EIGHT_OF_WORDS, takes
from millrace.kernels.matmul.pack import rounded_codes

products = pytest.importorskip("millrace.kernels.matmul.cuda", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from millrace.kernels.matmul import cuda_few  # noqa: E402 (Triton's)


def matrix(n: int, k: int, group: int, minimums: bool, rng: np.random.Generator, bits: int = 4) -> QuantisedMatrix:
    """Rows of very different scales."""
    codes = rounded_codes(rng.normal(size=(n, k)) * 10.0 ** rng.integers(-2, 3, (n, 1)), bits, group)
    if not minimums:
        return codes
    least = rng.normal(size=codes.scales.shape).astype(np.float16)
    return replace(codes, codes=codes.codes + np.int8(8 if bits == 4 else 0), minimums=least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("m", "n", "k", "group", "minimums"), [
    (1, 1, 8, 128, False), (8, 37, 136, 32, False), (7, 19, 1032, 0, False), (2, 7, 264, 0, True),
    *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in (
        (3, 5, 2048, 128, False),
        (1, 17, 2040, 64, True), (1, 33, 2184, 256, True), (1, 16, 4096, 128, False),
    )),
])  # fmt: skip
def test_few_rows_by_every_tile(
    m: int, n: int, k: int, group: int, minimums: bool, bits: int, dtype: torch.dtype
) -> None:
    """Beside float64 over the same codes: columns, units and blocks that end early, whole ones, a scale for each row.
    What lies behind a row's end is another row, and not summed."""
    rng = np.random.default_rng(k)
    k -= 4 * (bits == 8 and n % 2)  # three words of int8 where eight halves were one less
    of = matrix(n, k, group or k, minimums, rng, bits)
    w, x = weights(of), torch.from_numpy(rng.normal(size=(m, k))).to(dtype)
    exact, dense = x.double().numpy(), of.dequantise()
    assert len(EIGHT_OF_WORDS) >= 3
    for tile in EIGHT_OF_WORDS:
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
        assert takes(EIGHT_OF_WORDS[0], x, w)
        assert products.product(x, w, torch.float32).T.tolist() == codes[:, first : first + EIGHT].tolist()


def bits_of(instruction: tl.constexpr, places: tl.constexpr, power: tl.constexpr, words: list[int]) -> Tensor:
    """Two 16-bit floats of each word, by an instruction whose numbers are these and whose table is one of two."""
    name, *given = instruction.value.strip(";").replace(",", "").split()
    assert (name, given[:2]) == ("lop3.b32", ["$0", "$1"])
    assert [int(n, 16) for n in given[2:4]] == [places.value, power.value]
    both, other = 0xF0 & 0xCC, 0xAA  # what the tables are made of: PTX's numbers for the three words
    takes_or, found = {both | other: True, both ^ other: False}[int(given[4], 16)], list[int]()
    for word in words:
        at = word & places.value
        found.append(at | power.value if takes_or else at ^ power.value)
    return torch.tensor(found, dtype=torch.int64).to(torch.int32).view(torch.int16)


def test_the_instructions_do_what_the_interpreter_does() -> None:
    """They are not run by day: their numbers are looked at, and what becomes of every half and every byte in both
    halves of a word."""
    for shift, of, dtype in (
        (3, (cuda_few._BITS_BF16, cuda_few.PLACES_BF16, cuda_few.POWER_BF16), torch.bfloat16),
        (6, (cuda_few._BITS_FP16, cuda_few.PLACES_FP16, cuda_few.POWER_FP16), torch.float16),
    ):
        found = bits_of(*of, [code << shift | code << 16 + shift for code in range(16)]).view(dtype)
        assert found.tolist() == [16 + i // 2 for i in range(32)]
    words = [(code & 255) | (code & 255) << 16 for code in range(-128, 128)]
    codes = [-128 + i // 2 for i in range(512)]
    low = bits_of(cuda_few._LOW_BF16, cuda_few.LOW_PLACES, cuda_few.LOW_BF16, words).view(torch.bfloat16)
    top = bits_of(cuda_few._TOP_BF16, cuda_few.TOP_PLACES, cuda_few.TOP_BF16, words).view(torch.bfloat16)
    assert (low.float() + top.float()).tolist() == [384 + code for code in codes]
    whole = bits_of(cuda_few._BYTE_FP16, cuda_few.BYTE_PLACES, cuda_few.BYTE_FP16, words).view(torch.float16)
    assert whole.tolist() == [1152 + code for code in codes]


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


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_taken_away_costs_little_beside_rounding(bits: int) -> None:
    """Codes lie behind 16 or 384, which is taken away from sums: with inputs of one sign, and a few a thousand times as
    large, a hundredth of what the rounding to bfloat16 costs then."""
    rng = np.random.default_rng(5)
    of = matrix(64, 4096, 128, minimums=False, rng=rng, bits=bits)
    x = rng.normal(size=(1, 4096)) + 3
    x[0, rng.integers(0, 4096, 4)] *= 1000
    rows = torch.from_numpy(x).bfloat16()
    want = torch.from_numpy(rows.double().numpy() @ of.dequantise().T)
    lost, rounded = (
        (y.double() - want).norm() for y in (products.product(rows, weights(of), torch.float32), want.bfloat16())
    )
    assert lost <= rounded / 100
