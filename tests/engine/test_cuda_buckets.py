"""Decode steps in buckets: what a GPU captures once and replays, here by calls, over inputs at fixed places."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from millrace.api.offline_generate import generate
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.passes.pipeline import gpu, pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.attention_partition import AttentionKind
from millrace.engine.cuda.cuda_graphs import Bucket, Graphs, default_buckets, select_bucket
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.sampling import SamplingMode, sampling_mode
from millrace.engine.executor import StepInputs, plain_rows
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.kernels.catalogue import operators
from millrace.model.module import trace_model
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from tests.engine.test_caches import VOCAB as MIXED_VOCAB
from tests.engine.test_caches import mixed
from tests.engine.test_cuda import LIMITS, both, step_of
from tests.runtime.fakes import RandomBudget
from tests.support.checkpoints import random_checkpoint
from tests.support.one_step import i32
from tests.support.shared import shared


@pytest.mark.parametrize(("most", "found"), [
    (1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)),
    (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
])  # fmt: skip
def test_usual_buckets(most: int, found: tuple[int, ...]) -> None:
    assert default_buckets(most) == found


def test_few_rows_are_padding() -> None:
    """Of 512 sequences: at most 7 or, from 64 on, a quarter of those there are."""
    sizes = default_buckets(512)
    assert sizes[-1] == 512 and len(sizes) <= 40 and list(sizes) == sorted(set(sizes))
    for n in range(1, 513):
        assert min(s for s in sizes if s >= n) - n <= max(7, n // 4)


def decode(positions: list[int], pages: list[list[int]], rows: list[int]) -> StepInputs:
    sampling = plain_rows(len(rows))
    sampling["token"], sampling["n_top"] = rows, 5
    return step_of([([7 + i], at, own) for i, (at, own) in enumerate(zip(positions, pages, strict=True))], sampling)


@pytest.mark.parametrize(("chunks", "rows", "size"), [
    ([1], 1, 1), ([1, 1, 1], 3, 4), ([1, 1, 1], 1, 4), ([1] * 6, 6, 6), ([1] * 7, 7, None),
    ([1, 2], 2, None), ([1], 2, None), ([1], 0, None),
])  # fmt: skip
def test_which_steps_have_a_bucket(chunks: list[int], rows: int, size: int | None) -> None:
    """One token a sequence, and no more rows than these; a chunk of a prompt, with rows or without, has none."""
    step = step_of([([5] * n, 3, [i]) for i, n in enumerate(chunks)], plain_rows(rows))
    assert select_bucket(step, (1, 4, 6)) == size


@pytest.mark.parametrize(("field", "value", "way"), [
    ("top_k", 5, SamplingMode.LIKELIEST), ("temperature", 1e-6, SamplingMode.LIKELIEST),
    ("temperature", 0.5, SamplingMode.RANDOM),
    ("n_top", 0, None), ("target", 3, None), ("mask", 1, None), ("bias_count", 1, None),
    ("repetition_penalty", 1.1, None), ("presence_penalty", -0.5, None), ("frequency_penalty", 0.5, None),
])  # fmt: skip
def test_what_a_capture_draws(field: str, value: float, way: SamplingMode | None) -> None:
    """One row asks for one thing: what is more than a token, by itself, no capture draws."""
    rows = plain_rows(3)
    rows[field][1] = value
    assert sampling_mode(step_of([([5], 3, [i]) for i in range(3)], rows)) is way


def test_what_fills_a_bucket_is_nobodys() -> None:
    """Padding rows write to the page that no sequence has; the host's tables of the step before are gone."""
    bucket = Bucket(4, 9, 3, 64, torch.device("cpu"), 1, (AttentionKind(2, 1),))
    places = bucket.tables(AttentionKind(2, 1))
    wide = decode([130, 70, 0, 63], [[1, 2, 3], [4, 5], [6], [7]], [3, 2, 1, 0])
    bucket.fill(wide)
    assert places.tables[:7].tolist() == [1, 2, 3, 4, 5, 6, 7] and places.table_starts.tolist() == [0, 3, 5, 6, 7]
    bucket.fill(decode([65, 3], [[8, 2], [5]], [1]))
    assert bucket.inputs()["tokens"].tolist() == [7, 8, 0, 0] and bucket.inputs()["rows"].tolist() == [1, 0, 0, 0]
    assert places.positions.tolist() == [65, 3, 0, 0]
    assert places.slots.tolist() == [2 * 64 + 1, 5 * 64 + 3, 9 * 64, 9 * 64]
    assert places.table_starts.tolist() == [0, 2, 3, 4, 5] and places.tables[:5].tolist() == [8, 2, 5, 9, 9]
    assert places.starts.tolist() == [0, 1, 2, 3, 4]
    (work,) = places.work
    assert work.items.tolist() == [
        [0, 0, 2, -1, 0, 1, 65, 0], [2, 0, 1, -1, 1, 1, 3, 0], *([3 + i, 0, 1, -1, 2 + i, 1, 0, 0] for i in (0, 1)),
        *([0] * 8 for _ in range(3)),
    ] and not work.merges.any()  # fmt: skip


@pytest.mark.parametrize("kv", [None, KvFormat.INT8])
def test_bucketed_steps_are_the_others(kv: KvFormat | None, tmp_path: Path) -> None:
    """Prompts, then decode steps of all sizes and rows: alike with and without buckets, from one capture of each."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=6)
    plainly = both(folder, "fp32", kv=kv)[0]
    bucketed = CudaExecutor(plainly._lowered, LIMITS, kv=kv, buckets=(1, 4), device="cpu")
    words = np.random.default_rng(3).integers(0, LIMITS.vocab_size, 70).tolist()
    steps = [step_of([(words[:62], 0, [3]), (words[:5], 0, [9]), (words[60:], 0, [4])], plain_rows(1))]
    owned = [[3, 5], [9], [4]]
    steps += [decode([62 + i, 5 + i, 10 + i], owned, [2, 0, 1][: 1 + i % 3]) for i in range(4)]
    steps += [decode([9], [[9]], [0]), replace(decode([66, 9], [[3, 5], [11]], [0, 1]), copies=i32([[9, 11]]))]
    for step in steps:
        got, want = (executor.logits(step).numpy() for executor in (bucketed, plainly))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert sorted(bucketed._inputs) == [1, 4] and not plainly._replays


def test_several_kinds_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers whose heads differ in number and size: a prompt, then a bucket through the interpreted kernels."""
    kernels = pytest.importorskip("millrace.kernels.triton_kernels", reason="triton is not installed")
    source, wanted = mixed(), precision_map("fp32")
    traced = trace_model(source.module, source.weights, operators())
    limits = replace(LIMITS, vocab_size=MIXED_VOCAB)
    ours = CudaExecutor(lower_for_gpu(run_passes(traced, gpu(wanted)), "fp32"), limits, buckets=(4,), device="cpu")
    exact = ReferenceExecutor(run_passes(traced, pipeline(wanted)), limits, kv=KvFormat.F32, bf16_table=False)
    pages = [[3, 5], [9]]
    prompts = step_of([([i % 7 for i in range(70)], 0, pages[0]), ([7], 0, pages[1])], plain_rows(1))
    for step in (prompts, decode([70, 1], pages, [1, 0])):
        got, want = ours.logits(step).numpy(), exact.logits(step)
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
        monkeypatch.setattr(ours, "_kernels", kernels)
    assert len(ours._inputs[4].kinds) == 3


def test_a_warm_executor_has_captured_all(tmp_path: Path) -> None:
    """Each bucket in both ways, but those for which there are no pages; what warming wrote nobody reads."""
    plainly = both(random_checkpoint(tmp_path / "checkpoint", "llama", seed=6), "fp32")[0]
    limits = replace(LIMITS, n_pages=5)
    warm = CudaExecutor(plainly._lowered, limits, buckets=(1, 4, 8), device="cpu")
    warm.warm()
    assert set(warm._replays) == {(n, way) for n in (1, 4) for way in SamplingMode}
    steps = [step_of([([5, 6, 7], 0, [3]), ([8], 0, [1])], plain_rows(2)), decode([3, 1], [[3], [1]], [0, 1])]
    for step in steps:
        got, want = (executor.logits(step).numpy() for executor in (warm, plainly))
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_a_loop_in_buckets_tells_the_same_stories(tmp_path: Path) -> None:
    """Whatever comes and goes: sequences end one by one, so that buckets of all sizes are used again and again."""
    folder = shared("models/stories260K")
    limits = replace(LIMITS, n_pages=24, vocab_size=512)
    plainly = both(folder, "fp32", limits)[0]
    bucketed = CudaExecutor(plainly._lowered, limits, buckets=default_buckets(8), device="cpu")
    params = [SamplingParams(temperature=t, seed=i, max_tokens=9 * i + 4) for i, t in enumerate((0.0, 0.8, 1.0, 0.0))]
    found = []
    for executor in (plainly, bucketed):
        budget = RandomBudget(limits.max_step_tokens, random.Random(1))
        loop = EngineLoop(executor, open_tokenizer(folder), GenerationDefaults(), budget=budget)
        prompts = [[1], [1, 403, 407], list(range(300, 390)), [1, 403]]
        outputs = generate(loop, [{"prompt_token_ids": p} for p in prompts], params)
        found.append([o.outputs[0].token_ids for o in outputs])
    assert found[0] == found[1] and set(bucketed._inputs) >= {1, 2, 4}


@dataclass(eq=False)
class Stream:
    """waited: for which others, in turn"""

    waited: list["Stream"] = field(default_factory=list)

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)


class Captures:
    """torch.cuda as far as captures need it. As PyTorch's, one that cannot end (CUDAGraph::capture_end raises) leaves
    its stream the current one, and its memory taken (CUDACachingAllocator::beginAllocateToPool raises)."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self.usual = Stream()
        self.taken, self.handles, self.ends, self.capturing = set[int](), 0, True, False
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        self.Stream = lambda device: Stream()

    @property
    def current(self) -> Stream:
        found: Stream = getattr(self.threads, "current", self.usual)
        return found

    @current.setter
    def current(self, stream: Stream) -> None:
        self.threads.current = stream

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def graph_pool_handle(self) -> int:
        self.handles += 1
        return self.handles

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, pool: int, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        if pool in self.taken or self.capturing:
            raise RuntimeError("already recording")
        self.taken.add(pool)
        before, self.current, self.capturing = self.current, stream, True
        try:
            yield
        finally:
            self.capturing = False
            if not self.ends:
                raise RuntimeError("the capture was invalidated")
            self.taken.remove(pool)
            self.current = before


def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    cuda = Captures()
    for name in ("CUDAGraph", "Stream", "current_stream", "graph_pool_handle", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


def test_threads_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that are loaded at a time."""
    cuda, own, started = captures(monkeypatch), torch.zeros(1), threading.Barrier(2, timeout=10)

    def compute() -> torch.Tensor:
        time.sleep(0.01 if cuda.capturing else 0)
        return own

    def some(graphs: Graphs) -> list[torch.Tensor]:
        started.wait()
        return [graphs.captured(compute)() for _ in range(5)]

    with ThreadPoolExecutor(2) as pool:
        found = [f.result() for f in [pool.submit(some, Graphs(torch.device("cuda:0"))) for _ in range(2)]]
    assert found == [[own] * 5] * 2


@pytest.mark.parametrize(("fails", "why"), [
    ("before", "the first run"), ("within", "out of memory"), ("end", "invalidated"),
])  # fmt: skip
@pytest.mark.parametrize("others", [0, 1])
def test_a_capture_that_fails_leaves_nothing(
    fails: str, why: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What runs next waits for what has begun, on the stream as before, and the same can be captured later."""
    cuda = captures(monkeypatch)
    graphs, runs, own = Graphs(torch.device("cuda:0")), list[Stream](), torch.zeros(2)
    for _ in range(others):
        graphs.captured(lambda: own)
    cuda.usual.waited.clear()

    def compute() -> torch.Tensor:
        runs.append(cuda.current)
        if fails == "before":
            raise RuntimeError("the first run")
        if fails == "within" and len(runs) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return own

    cuda.ends, fails_late = fails != "end", fails != "before"
    with pytest.raises(RuntimeError, match=why):
        graphs.captured(compute)
    side = runs[0]
    assert cuda.current is cuda.usual is not side and cuda.usual.waited == [side]
    assert side.waited[-1] is cuda.usual
    fails, cuda.ends = "", True
    assert graphs.captured(compute)() is own and set(runs) == {side}
    assert cuda.handles == 1 + (fails_late and (why == "invalidated" or not others)), "what can be shared is shared"
