"""Attention to the last tokens alone, and with soft caps, in Triton's interpreter and in plain PyTorch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.engine.cuda.attention_partition import AttentionKind, SmGeometry
from millrace.engine.cuda.cuda_graphs import Bucket
from millrace.engine.cuda.step_tables import step_tables
from millrace.engine.executor import WindowPages
from millrace.kernels import torch_reference
from millrace.kernels.attention.paged import StepTables
from millrace.kernels.attention.ref import ScoreRules, attention
from tests.kernels.test_cuda_attention import APART, CPU, PAGE, Drawn
from tests.support.one_step import i32

triton_kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")


def held(drawn: Drawn, window: int) -> WindowPages:
    """The pages of each sequence that its first token in the step needs, and those behind; the others are gone."""
    first = [max(0, int(drawn.step.positions[s]) - window + 1) // PAGE for s in drawn.step.starts[:-1]]
    own = [drawn.step.pages[a:b] for a, b in zip(drawn.step.page_starts, drawn.step.page_starts[1:], strict=False)]
    left = [pages[n:] for pages, n in zip(own, first, strict=True)]
    return WindowPages(i32(np.concatenate(left)), i32(np.cumsum([0, *map(len, left)])), i32(first))


def spoil(drawn: Drawn, window: int) -> None:
    """Whatever lies before the window of a sequence's first token is no number: it must not be read."""
    pages = drawn.pages
    floats = (pages.key_scales, pages.value_scales) if pages.coded else (pages.keys, pages.values)
    for s, begin in enumerate(drawn.step.starts[:-1]):
        own = torch.from_numpy(drawn.step.pages[drawn.step.page_starts[s] :]).long()
        gone = torch.arange(max(0, int(drawn.step.positions[begin]) - window + 1))
        for x in floats:
            x[own[gone // PAGE], :, gone % PAGE] = float("nan")


def wanted(drawn: Drawn, s: int, scale: float, window: int, softcap: float) -> tuple[np.ndarray, np.ndarray]:
    """The reference over what is kept, and the sum of weights times magnitudes."""
    part = slice(drawn.step.starts[s], drawn.step.starts[s + 1])
    own = torch.from_numpy(drawn.step.pages[drawn.step.page_starts[s] : drawn.step.page_starts[s + 1]]).long()
    n, first, q = drawn.length(s), int(drawn.step.positions[part][0]), drawn.q[part].double().numpy()
    k, v = (x.transpose(1, 2).flatten(0, 1)[:n].double().numpy() for x in drawn.pages.floats(own))
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    found = [attention(q, k, x, first, scale, ScoreRules(window, softcap)) for x in (v, np.abs(v))]
    return found[0], found[1]


def check(drawn: Drawn, y: torch.Tensor, scale: float, window: int, softcap: float, dtype: torch.dtype) -> None:
    for s in range(len(drawn.step.starts) - 1):
        want, bound = wanted(drawn, s, scale, window, softcap)
        got = y[drawn.step.starts[s] : drawn.step.starts[s + 1]].double().numpy()
        assert (np.abs(got - want) <= APART[dtype] * bound + 1e-6).all(), s


def tables_of(drawn: Drawn, window: int, processors: SmGeometry) -> StepTables:
    K = drawn.pages.keys.shape[1]
    kind = AttentionKind(drawn.q.shape[1] // K, K, window)
    return step_tables(drawn.step, PAGE, CPU, kind, processors, held(drawn, window) if window else None)


@pytest.mark.parametrize(("kept", "dtype", "window", "softcap"), [
    ("f32", torch.float32, 100, 3.0), ("int8", torch.float16, 64, 0.0), ("fp8", torch.bfloat16, 65, 2.0),
    *(pytest.param(*more, marks=pytest.mark.nightly) for more in (
        ("f32", torch.float32, 33, 0.0), ("fp8", torch.float32, 1, 0.0), ("f32", torch.float32, 0, 1.5),
        ("f16", torch.float16, 130, 0.0), ("int8", torch.float32, 33, 2.0), ("f16", torch.float16, 0, 50.0),
    )),
])  # fmt: skip
def test_drawn_steps(kept: str, dtype: torch.dtype, window: int, softcap: float) -> None:
    """Decode rows beside prompts that are longer than the window, in one part for each block or in many."""
    counts = [(300, 1), (3, 1), (110, 23)]
    drawn, scale = Drawn.of(window, counts, (3, 1, 16, 24), kept, dtype), 0.3
    if window:
        spoil(drawn, window)
    for processors in (SmGeometry(1), SmGeometry(20, 128)):
        y = triton_kernels.attention(drawn.q, tables_of(drawn, window, processors), drawn.pages, scale, window, softcap)
        check(drawn, y, scale, window, softcap, dtype)
    if dtype == torch.float32:
        y = torch_reference.attention(
            drawn.q, tables_of(drawn, window, SmGeometry(1)), drawn.pages, scale, window, softcap
        )
        check(drawn, y, scale, window, softcap, dtype)


def test_scores_far_beyond_a_cap() -> None:
    """What saturates is as likely as its neighbours; below and above alike."""
    drawn = Drawn.of(1, [(80, 1), (10, 20)], (2, 1, 16, 16), "f32", torch.float32)
    for scale in (1e4, -1e4):
        y = triton_kernels.attention(drawn.q, tables_of(drawn, 0, SmGeometry(1)), drawn.pages, scale, 0, 2.0)
        check(drawn, y, scale, 0, 2.0, torch.float32)


@pytest.mark.parametrize("window", [65, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 1000))])
def test_a_buckets_windows(window: int) -> None:
    """Beside layers that attend to all: filled twice, by steps whose first pages are gone and by one that has all."""
    kinds = AttentionKind(3, 1), AttentionKind(3, 1, window)
    bucket = Bucket(4, 998, 6, PAGE, CPU, 9, kinds, {window: 998})
    for counts, has_all in (([(300, 1), (64, 1), (63, 1)], False), ([(130, 1), (5, 1)], True)):
        drawn = Drawn.of(len(counts), counts, (3, 1, 16, 24), "f16", torch.float16)
        bucket.scratch = len(drawn.pages.keys) - 1
        bucket.windows = {window: bucket.scratch}
        for x in (drawn.pages.keys, drawn.pages.values):
            x[bucket.scratch, :, 0] = 1
        whole = WindowPages(drawn.step.pages, drawn.step.page_starts, i32([0] * len(counts)))
        bucket.fill(drawn.step, [whole if has_all else held(drawn, window)])
        q = torch.cat([drawn.q, torch.zeros((4 - len(counts), *drawn.q.shape[1:]), dtype=drawn.q.dtype)])
        for kind in kinds:
            tables = bucket.tables(kind)
            assert torch.equal(tables.slots[: len(counts)], bucket.tables(kinds[0]).slots[: len(counts)])
            for attend in (triton_kernels.attention, torch_reference.attention):
                y = attend(q, tables, drawn.pages, 0.2, kind.window)
                check(drawn, y[: len(counts)], 0.2, kind.window, 0.0, torch.float16)
                assert y.isfinite().all(), "rows that fill it, too"


def test_where_tokens_are_written() -> None:
    """In the pages of the window, counted from the first that is left."""
    drawn = Drawn.of(2, [(300, 1), (126, 4)], (2, 1, 16, 16), "f32", torch.float32)
    moved = replace(held(drawn, 64), pages=i32([7, 8, 1, 2, 3]))
    tables = step_tables(drawn.step, PAGE, CPU, AttentionKind(2, 1, 64), SmGeometry(1), moved)
    assert moved.first.tolist() == [3, 0] and moved.page_starts.tolist() == [0, 2, 5]
    assert tables.slots.tolist() == [8 * 64 + 44, 2 * 64 - 2 + 64, 2 * 64 + 63, 3 * 64, 3 * 64 + 1]
