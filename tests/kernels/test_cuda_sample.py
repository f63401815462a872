"""Draws on a GPU without sorting: in Triton's interpreter, and plainly, beside the reference's lexsort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millrace.kernels import torch_reference
from millrace.kernels.sample.ref import draw, probabilities

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")
KERNELS = pytest.mark.parametrize("kernels", [triton_kernels, torch_reference], ids=["triton", "plain"])
Rows = NDArray[np.float64]


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "vocab", [1, 2, 65, 8193, *(pytest.param(n, marks=pytest.mark.nightly) for n in (8192, 20000))]
)
def test_the_likeliest(kernels: object, vocab: int, dtype: torch.dtype) -> None:
    """Of 16 bits many are alike: then the first; rows that are not finite, at any place, are told so, and alone."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 3, (9, vocab))).to(dtype)
    logits[1], logits[2] = 0, -7
    logits[3, vocab // 2] = logits[3, vocab - 1] = 50
    for row, bad in ((4, "nan"), (5, "inf"), (6, "-inf")):
        logits[row, rng.integers(vocab)] = float(bad)
    logits[7, 0], logits[8, vocab - 1] = float("nan"), float("nan")
    with np.errstate(invalid="ignore"):  # the interpreter's own
        found = kernels.argmax(logits, -1)  # type: ignore[attr-defined]
    want = [int(np.argmax(row)) if np.isfinite(row).all() else -1 for row in logits.double().numpy()]
    assert found.dtype == torch.int32 and found.tolist() == want and want[1:3] == [0, 0] and want[4:] == [-1] * 5


@KERNELS
@pytest.mark.parametrize("n", [1, 128, 200])
def test_what_the_step_before_draws_is_put_in(kernels: object, n: int) -> None:
    """At its places, from its rows; what could not be drawn is token 0, and all else stays."""
    rng = np.random.default_rng(n)
    tokens, drawn = rng.integers(5, 99, 300).astype(np.int32), rng.integers(5, 99, 250).astype(np.int32)
    drawn[::3] = rng.choice([-1, -2], len(drawn[::3]))
    at, rows = rng.permutation(300)[:n].astype(np.int32), rng.integers(0, 250, n).astype(np.int32)
    want = tokens.copy()
    want[at] = np.maximum(drawn[rows], 0)
    found = torch.from_numpy(tokens.copy())
    kernels.scatter_tokens(found, *(torch.from_numpy(x) for x in (at, drawn, rows)))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found.numpy(), want)


def tokens(kernels: object, logits: Rows, asked: Rows, u: Rows) -> list[int]:
    """asked (R, 4): temperature, top_k, top_p, min_p"""
    temperature, top_k, top_p, min_p = (torch.from_numpy(x.copy()) for x in asked.T)
    x = torch.from_numpy(logits)
    p = ((x - x.amax(1, keepdim=True)) / temperature[:, None]).exp()
    found: list[int] = kernels.draw(p, top_k.long(), top_p, min_p, torch.from_numpy(u)).tolist()  # type: ignore[attr-defined]
    return found


def wanted(logits: Rows, asked: Rows, u: Rows) -> list[int]:
    return [
        draw(probabilities(x, t, int(k), top_p, min_p), number)
        for x, (t, k, top_p, min_p), number in zip(logits, asked, u, strict=True)
    ]


def drawn(rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
    asked = np.stack([
        rng.choice([0.1, 0.7, 1, 5], rows), rng.choice([0, 0, 1, 2, 50, 10**6], rows),
        rng.choice([1, 1, 0.9, 0.5, 0.1, 1e-6], rows), rng.choice([0, 0, 0.05, 1], rows),
    ], 1).astype(np.float64)  # fmt: skip
    return asked, rng.random(rows)


@KERNELS
@pytest.mark.parametrize("vocab", [1, 2, 64, 65, pytest.param(4097, marks=pytest.mark.nightly)])
def test_drawn_settings(kernels: object, vocab: int) -> None:
    """Flat rows and sharp ones, of float32 as models give them, and rounded so that many are alike."""
    rng, rows = np.random.default_rng(vocab), 8 if kernels is triton_kernels else 100
    logits = rng.normal(0, rng.choice([0.1, 3, 30], (rows, 1)), (rows, vocab)).astype(np.float32).astype(np.float64)
    logits[::3] = np.round(logits[::3])
    asked, u = drawn(rng, rows)
    assert tokens(kernels, logits, asked, u) == wanted(logits, asked, u)


@KERNELS
@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_ties_and_edges(kernels: object, data: st.DataObject) -> None:
    """A few values, so that what is kept ends among equals: these go by their ids."""
    n = data.draw(st.integers(1, 40))
    row = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, -1000.0, -np.inf]), min_size=n, max_size=n))
    row[data.draw(st.integers(0, n - 1))] = 2.0
    asked = data.draw(st.tuples(
        st.sampled_from([0.5, 1.0]), st.integers(0, n + 1), st.sampled_from([1.0, 0.999, 0.75, 0.5, 0.25, 1e-9]),
        st.sampled_from([0.0, 0.2, 1.0]),
    ))  # fmt: skip
    u = np.array(data.draw(st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-53])))
    logits, given_ = np.array([row]), np.array([asked], np.float64)
    assert tokens(kernels, logits, given_, u[None]) == wanted(logits, given_, u[None])


@KERNELS
def test_shares_are_what_is_drawn(kernels: object) -> None:
    """Numbers in even steps fall on each token as often as its probability says."""
    n = 18
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))[None].repeat(n, 0)
    asked, u = np.array([[1.0, 3, 1, 0]]).repeat(n, 0), (np.arange(n) + 0.5) / n
    assert np.bincount(tokens(kernels, logits, asked, u)).tolist() == [0, 8, 4, 6]


@KERNELS
def test_a_row_without_numbers_ends(kernels: object) -> None:
    """And is alone: what was drawn of it nobody takes."""
    logits = np.array([[np.nan, 1, 2], [np.inf, 0, 1], [0, 5, 1]])
    asked = np.array([[1, 2, 0.9, 0.1]]).repeat(3, 0)
    assert tokens(kernels, logits, asked, np.full(3, 0.5))[2] == 1
