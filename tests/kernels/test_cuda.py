"""Triton's kernels in its interpreter, on odd sizes, beside the references; and compiled for a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.engine.cuda import plain
from millrace.engine.cuda.step import blocks, splits, step_tables
from millrace.engine.executor import StepInputs, plain_rows
from millrace.kernels.attention.paged import LayerPages, StepTables
from millrace.kernels.attention.ref import attention
from millrace.kernels.matmul.fp8 import quantised
from millrace.kernels.rms_norm.ref import rms_norm
from millrace.kernels.rope.ref import rope
from tests.support.one_step import i32

triton_kernels = pytest.importorskip("millrace.engine.cuda.triton_kernels", reason="triton is not installed")
PAGE = 64
# tokens before the step, tokens of it: a decode row, a chunk over a page's end, a prompt, one at a page's first place
STEPS = [(70, 1), (50, 30), (0, 5), (128, 1)]


def tables(n_splits: int, group: int, rng: np.random.Generator) -> tuple[StepInputs, StepTables]:
    counts = [-(-(first + n) // PAGE) for first, n in STEPS]
    step = StepInputs(
        i32(range(sum(n for _, n in STEPS))), i32([first + i for first, n in STEPS for i in range(n)]),
        i32([0, *np.cumsum([n for _, n in STEPS])]), i32(rng.permutation(sum(counts) + 3)[: sum(counts)]),
        i32([0, *np.cumsum(counts)]), plain_rows(1), i32([]), i32([]), np.zeros(0, np.float32),
    )  # fmt: skip
    return step, replace(
        step_tables(step, PAGE, torch.device("cpu"), group=group, kv_heads=1, multiprocessors=1), splits=n_splits
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size", "n_splits", "rotates"),
    [(4, 2, 16, 16, 1, True), (6, 2, 24, 40, 2, True), (3, 3, 8, 24, 4, False), (9, 3, 64, 64, 2, True)],
)
def test_attention_over_pages(
    heads: int, kv_heads: int, size: int, value_size: int, n_splits: int, rotates: bool
) -> None:
    """What no token of a sequence has written is NaN: it must not be read."""
    rng = np.random.default_rng(heads)
    step, on_device = tables(n_splits, heads // kv_heads, rng)
    last = step.starts[-1]
    angles = rng.uniform(0, 7, (200, size // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    pages = LayerPages(*(torch.full((12, kv_heads, PAGE, n), float("nan")) for n in (size, value_size)))
    qkv = torch.from_numpy(rng.normal(size=(last, heads * size + kv_heads * (size + value_size))).astype(np.float32))
    widths = heads * size, kv_heads * size, kv_heads * value_size
    q, k, v = (x.unflatten(1, (-1, n)) for x, n in zip(qkv.split(widths, 1), (size, size, value_size), strict=True))
    history = []
    for s, (first, n) in enumerate(STEPS):
        old = [rng.normal(size=(first, kv_heads, n)).astype(np.float32) for n in (size, value_size)]
        own = step.pages[step.page_starts[s] : step.page_starts[s + 1]]
        for kept, rows in zip((pages.keys, pages.values), old, strict=True):
            for at in range(first):
                kept[own[at // PAGE], :, at % PAGE] = torch.from_numpy(rows[at])
        history.append(old)
        assert n + first <= len(own) * PAGE
    rotated = triton_kernels.keep_rotated((q, k, v), on_device, torch.from_numpy(table) if rotates else None, pages)
    y = triton_kernels.attention(rotated, on_device, pages, 0.3, whole=True)
    for s, (first, _) in enumerate(STEPS):
        part = slice(step.starts[s], step.starts[s + 1])
        new = [x[part].double().numpy() for x in (q, k, v)]
        if rotates:
            new[:2] = (rope(x, step.positions[part], table.astype(np.float64)) for x in new[:2])
        keys, values = (np.concatenate(parts) for parts in zip(history[s], new[1:], strict=True))
        np.testing.assert_allclose(rotated[part].numpy(), new[0], atol=1e-5)
        np.testing.assert_allclose(y[part].numpy(), attention(new[0], keys, values, first, 0.3), atol=1e-5)


@pytest.mark.parametrize(
    ("programs", "pages", "found"), [(8, 64, 32), (8, 5, 4), (64, 64, 4), (300, 64, 1), (1, 1, 1), (1, 999, 64)]
)
def test_few_programs_share_their_pages(programs: int, pages: int, found: int) -> None:
    """Of an H200's 132 multiprocessors."""
    assert splits(programs, pages, 132) == found


def test_programs_have_all_rows_once() -> None:
    found = blocks(np.array([3, 0, 16, 33], np.int32), 16).tolist()
    assert found == [[0, 0], [2, 0], [3, 0], [3, 16], [3, 32]]


@pytest.mark.parametrize("n", [1, 40, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(n: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(n)
    x, w = rng.normal(size=(2, 3, n)), rng.normal(size=n)
    y = triton_kernels.rms_norm(torch.from_numpy(x).to(dtype), torch.from_numpy(w).float(), 1e-5, dtype)
    rounded = torch.from_numpy(x).to(dtype).double().numpy()
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    np.testing.assert_allclose(y.double().numpy(), rms_norm(rounded, w, 1e-5), atol=tolerance)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 37, 129), (17, 70, 300), (16, 32, 128)])
def test_fp8_products(m: int, n: int, k: int) -> None:
    """Beside float64 over the same codes; and the codes are within E4M3's half step of what they stand for."""
    rng = np.random.default_rng(k)
    given = [torch.from_numpy(rng.normal(size=(rows, k)) * 10.0 ** rng.integers(-4, 4, (rows, 1))) for rows in (m, n)]
    x, w = (quantised(t) for t in given)
    exact = [(q.data.double() * q.scales.double()[:, None]).numpy() for q in (x, w)]
    for codes, q, t in zip(exact, (x, w), given, strict=True):
        least = q.scales.double().numpy()[:, None] * 2.0**-10  # half a step of subnormals
        assert (np.abs(codes - t.numpy()) <= np.maximum(np.abs(t.numpy()) / 16, least) * (1 + 1e-5)).all()
    bound = 1e-5 * np.abs(exact[0]) @ np.abs(exact[1]).T
    for kernels in (triton_kernels, plain):
        y = kernels.fp8_product(x, w, torch.float32).double().numpy()
        assert (np.abs(y - exact[0] @ exact[1].T) <= bound).all(), kernels.__name__


def test_they_compile_for_a_gpu() -> None:
    """In a process of its own, which interprets nothing: for one that has all that they use, without spilling."""
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--arch", "90", "--json"]
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    found = json.loads(out.stdout)
    assert {row["kernel"] for row in found} == {"attend", "few_rows", "merge", "normalise", "rotate_and_keep"}
    for row in found:
        assert row["spilled_bytes"] == 0 and row["registers"] <= 255 and row["shared_bytes"] <= 227 * 1024, row
