"""Layers that attend to the last tokens alone, on the executor of a GPU: pages that move, buckets, the loop, memory."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.api.offline_generate import generate
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.cache_specs import max_window_pages
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.memory_plan import SHARE, MemoryNeeds, WindowNeeds, plan_device
from millrace.engine.executor import Executor, StepInputs, WindowPages, plain_rows
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.errors import MachineError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from tests.engine.test_cuda import LIMITS, both
from tests.runtime.fakes import RandomBudget
from tests.support.checkpoints import random_checkpoint
from tests.support.one_step import i32

# All layers have one, or one of two; beside soft caps, or rotary angles of their own.
WINDOWS = {"mistral": 70, "gemma2": 33, "gemma3_text": 33}
Pair = tuple[CudaExecutor, ReferenceExecutor]
PairOf = Callable[[str], tuple[Path, Pair]]


def by_day(name: str) -> list[object]:
    """One of the families; by night all."""
    return [family if family == name else pytest.param(family, marks=pytest.mark.nightly) for family in WINDOWS]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> PairOf:
    """By family: its checkpoint, and both executors."""
    root = tmp_path_factory.mktemp("windows")
    small: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 132, "num_attention_heads": 2}

    @cache
    def found(family: str) -> tuple[Path, Pair]:
        folder = random_checkpoint(root / family, family, seed=5, sliding_window=WINDOWS[family], **small)
        return folder, both(folder, "fp32")

    return found


def like(ours: CudaExecutor, window_pages: int, buckets: tuple[int, ...] = ()) -> CudaExecutor:
    """With so many pages for its window."""
    windows = tuple(replace(w, n_pages=window_pages) for w in ours.limits.windows)
    limits = replace(ours.limits, windows=windows)
    return CudaExecutor(ours._lowered, limits, buckets=buckets, device="cpu")


def steps_of(words: list[int], window: int, n_pages: int) -> Iterator[StepInputs]:
    """Two sequences: a prompt in chunks, each in the window's pages that are left, then both decode; a row each."""
    parts = [(0, 70), (70, 1), (71, 90), (161, 40), *((at, 1) for at in range(201, 205))]
    for i, (start, n) in enumerate(parts):
        gone = max(0, start - window + 1) // 64
        numbers = [page % (n_pages - 1) for page in range(gone, -(-(start + n) // 64))]
        rows, own = plain_rows(2), -(-(start + n) // 64)
        rows["token"] = [n - 1, n]
        yield StepInputs(
            i32([*words[start : start + n], 7 + i]), i32([*range(start, start + n), i]), i32([0, n, n + 1]),
            i32([*range(own), 15]), i32([0, own, own + 1]), rows, i32([]), i32([]), np.zeros(0, np.float32),
            windows=(WindowPages(i32([*numbers, n_pages - 1]), i32([0, len(numbers), len(numbers) + 1]),
                                 i32([gone, 0])),),
        )  # fmt: skip


@pytest.mark.parametrize("family", by_day("gemma2"))
def test_pages_that_move(family: str, pair_of: PairOf) -> None:
    """Chunk by chunk, each sequence leaving the pages before its window, which it then writes over; with a bucket."""
    _, (ours, exact) = pair_of(family)
    executor = like(ours, 5, (2,))
    reference = ReferenceExecutor(exact.interpreter._graph, executor.limits, kv=exact.interpreter._kv, bf16_table=False)
    words = np.random.default_rng(3).integers(3, 1003, 210).tolist()
    for step in steps_of(words, WINDOWS[family], 5):
        got, want = executor.logits(step).numpy(), reference.logits(step)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max(), step.positions[-2:]
    assert list(executor._inputs) == [2]


def test_pages_of_a_window_are_copied(pair_of: PairOf) -> None:
    """Of its caches alone; those of other layers by their own numbers."""
    _, (ours, exact) = pair_of("gemma2")
    words = np.random.default_rng(4).integers(3, 1003, 40).tolist()
    whole = (WindowPages(i32([4]), i32([0, 1]), i32([0])),)
    rows = plain_rows(1)
    rows["token"] = 29
    first = StepInputs(
        i32(words[:30]), i32(range(30)), i32([0, 30]), i32([3]), i32([0, 1]), rows, i32([]), i32([]),
        np.zeros(0, np.float32), windows=whole,
    )  # fmt: skip
    moved = WindowPages(i32([9]), i32([0, 1]), i32([0]), i32([[4, 9]]))
    more = plain_rows(1)
    more["token"] = 9
    second = replace(
        first, tokens=i32(words[30:]), positions=i32(range(30, 40)), starts=i32([0, 10]), pages=i32([6]), sampling=more,
        copies=i32([[3, 6]]), windows=(moved,),
    )  # fmt: skip
    for step in (first, second):
        got, want = ours.logits(step).numpy(), exact.logits(step)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def told(executor: Executor, folder: Path, seed: int) -> list[list[int]]:
    """Answers to prompts that begin alike, in chunks that are drawn."""
    rng = random.Random(3)
    long = [rng.randrange(3, 1003) for _ in range(200)]
    prompts = [long[:130], long, [5, 6], [*long[:150], 9, 9], long]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=i, temperature=i % 2) for i in range(len(prompts))]
    budget = RandomBudget(executor.limits.max_step_tokens, random.Random(seed))
    loop = EngineLoop(executor, open_tokenizer(folder), GenerationDefaults(), budget=budget)
    outputs = generate(loop, [{"prompt_token_ids": p} for p in prompts], params)
    assert loop.stats().pages_used == 0 and all(w.pages_used == 0 for w in loop.stats().windows)
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("family", by_day("mistral"))
def test_a_loop_beyond_the_window(family: str, pair_of: PairOf) -> None:
    """Two to six windows long: few pages of the window make sequences wait, few of all of them preempt."""
    folder, (ours, exact) = pair_of(family)
    want = told(exact, folder, 1)
    least = max_window_pages(WINDOWS[family], LIMITS.max_context, LIMITS.max_step_tokens)
    assert told(like(ours, 2 * least, (1, 2, 4)), folder, 3) == want


def test_what_is_planned_of_windows() -> None:
    """Room for one sequence of the whole context, then half of what is left for windows; asked bytes to the last."""
    needs = MemoryNeeds(1 << 30, 1 << 28, 1 << 20, 1000, 100, (WindowNeeds(512, 3000, 13), WindowNeeds(64, 10, 5)))
    one = 100 * 1000 + 13 * 3000 + 5 * 10
    assert needs.sequence_bytes == one
    free = (needs.fixed_bytes + needs.page_bytes + one) / SHARE
    with pytest.raises(MachineError, match="KV pages"):
        plan_device(needs, free - 10, 800)
    assert not needs.fits_in(free - 2000) and needs.fits_in(free + 10)
    plan = plan_device(needs, free + 10, 800)
    assert (plan.n_pages, plan.window_pages) == (100, (13, 5))
    for more in (10**5, 10**6, 10**8):
        plan = plan_device(needs, free + more, 800)
        assert plan.total_bytes <= SHARE * (free + more)
        (a, b), least = plan.window_pages, [w.least_pages for w in needs.windows]
        assert 100 <= plan.n_pages <= 800 and least[0] <= a <= 8 * least[0] and least[1] <= b <= 8 * least[1]
    assert (plan.n_pages, plan.window_pages) == (800, (104, 40))
    asked = plan_device(needs, free + 10**8, 800, kv_memory=2 * one)
    assert (
        needs.kv_bytes(asked.n_pages, asked.window_pages)
        <= 2 * one
        < needs.kv_bytes(asked.n_pages + 1, asked.window_pages)
    )
    with pytest.raises(MachineError, match="less than one sequence"):
        plan_device(needs, free + 10**8, 800, kv_memory=one - 1)


def test_windows_alone_take_what_they_need() -> None:
    """Where every layer has one, pages of the others are but numbers."""
    needs = MemoryNeeds(1 << 30, 1 << 28, 1 << 20, 0, 100, (WindowNeeds(512, 3000, 13),))
    plan = plan_device(needs, 10 << 30, 800)
    assert (plan.n_pages, plan.window_pages) == (800, (104,))
    with pytest.raises(MachineError, match="KV pages"):
        plan_device(needs, needs.fixed_bytes / SHARE, 800)
