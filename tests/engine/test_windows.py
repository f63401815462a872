"""Layers that attend to the last tokens alone: logits as transformers', and promise 1 over pages that come and go."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millrace.api.offline_generate import CompletionOutput, generate
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.passes.pipeline import pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.engine.executor import WindowPages
from millrace.engine.native.executor import NativeExecutor
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.kernels.catalogue import operators
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import Memory
from millrace.model.module import trace_model
from millrace.runtime.loop import EngineLoop
from millrace.runtime.loop_stats import LoopStats
from millrace.runtime.memory_plan import capped, plan_run
from millrace.runtime.request.sampling_params import SamplingParams
from tests.runtime.fakes import RandomBudget
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, last_logits, prompts_as_step
from tests.support.one_step import i32

WINDOW = 100
# Plain C takes seconds for each case: by night.
OTHER_ISAS = [
    pytest.param(isa, marks=pytest.mark.nightly) if isa == "scalar" and len(usable_isas()) > 1 else isa
    for isa in usable_isas()[-2:]
]
FAMILIES = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("windows")
    return {name: random_checkpoint(root / name, name, **said) for name, said in FAMILIES.items()}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engines(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    root = tmp_path_factory.mktemp("engines")
    yield {name: build(folder, root / name, "fp32", max_step_tokens=512) for name, folder in checkpoints.items()}


def drawn(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 1003) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_four_times_the_window(checkpoints: dict[str, Path], engines: dict[str, Engine], family: str) -> None:
    """The window cuts in every layer that has it, and in no other: transformers in float64 on the same tokens."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float64)
    model.set_attn_implementation("eager")
    with closing(engines[family].executor(n_pages=16)) as executor:
        for prompt in drawn(99, 101, 260, 4 * WINDOW + 31):
            got = last_logits(engines[family], executor, [prompt])[0]
            with torch.no_grad():
                exact = model(torch.tensor([prompt])).logits[0, -1].numpy()
            assert np.abs(got - exact).max() <= 2e-4 * np.abs(exact).max(), len(prompt)


def test_a_window_that_holds_every_sequence_is_none(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """An engine for shorter sequences keeps no window cache, and runs wherever others do."""
    checkpoint = Checkpoint.open(checkpoints["mistral"])
    for context, windows in ((WINDOW, {0}), (WINDOW + 1, {WINDOW})):
        source, out = Source.from_checkpoint(checkpoint, context), tmp_path / str(context)
        write_engine(source, plan_engine(source, BuildOptions(max_batch=4, max_step_tokens=64)), out, name="m")
        with closing(Engine.open(out)) as engine:
            assert {cache.window for cache in engine.caches} == windows


def test_the_reference_over_pages_that_move(checkpoints: dict[str, Path], engines: dict[str, Engine]) -> None:
    """The interpreted graph and the native core, chunk by chunk, each sequence leaving the pages before its window."""
    source = Source.from_checkpoint(Checkpoint.open(checkpoints["qwen2"]))
    graph = trace_model(source.module, source.weights, operators())
    graph = run_passes(graph, pipeline(precision_map("fp32", group=32)))
    (prompt,) = drawn(330)
    with closing(engines["qwen2"].executor(n_pages=8, window_pages=(5,))) as executor:
        reference = ReferenceExecutor(graph, executor.limits, kv=KvFormat.F32, bf16_table=False)
        for start, n in ((0, 70), (70, 1), (71, 150), (221, 109)):
            gone = max(0, start - WINDOW + 1) // 64
            numbers = [page % 5 for page in range(gone, -(-(start + n) // 64))]
            step = replace(
                prompts_as_step([prompt[start : start + n]]), positions=i32(range(start, start + n)),
                pages=i32(range(-(-(start + n) // 64))), page_starts=i32([0, -(-(start + n) // 64)]),
                windows=(WindowPages(i32(numbers), i32([0, len(numbers)]), i32([gone])),),
            )  # fmt: skip
            executor.run(step)
            exact = reference.logits(step)
            assert np.abs(executor.output("logits").astype(np.float64) - exact).max() <= 2e-4 * np.abs(exact).max(), (
                start
            )


def params_of(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, seed=i, temperature=i % 2, top_k=20)


def run(
    executor: NativeExecutor, folder: Path, prompts: list[list[int]], params: list[SamplingParams], seed: int = 0,
    seen: list[LoopStats] | None = None,
) -> list[CompletionOutput]:  # fmt: skip
    """All prompts at once; the seed draws how large each step's chunks are (0: as large as they can be).

    seen: gets the loop's counters at the end
    """
    budget = RandomBudget(executor.limits.max_step_tokens, random.Random(seed)) if seed else None
    loop = EngineLoop(executor, open_tokenizer(folder), GenerationDefaults(), budget=budget)
    outputs = generate(loop, [{"prompt_token_ids": p} for p in prompts], params)
    if seen is not None:
        seen.append(loop.stats())
    assert loop.stats().pages_used == 0 and all(pool.n_used == 0 for pool in loop._scheduler.groups.windows)
    return [o.outputs[0] for o in outputs]


@pytest.mark.parametrize("other", OTHER_ISAS)
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_together_equals_alone(engines: dict[str, Engine], family: str, other: str) -> None:
    """Promise 1, of prompts that begin alike: few window pages force waiting."""
    engine, best = engines[family], usable_isas()[0]
    prompts = drawn(1, 63, 100, 101, 230, 400)
    prompts += [prompts[5][:150] + prompts[2][:90], prompts[5][:215], prompts[4]]
    params = [params_of(i) for i in range(len(prompts))]
    alone = []
    with closing(engine.executor(n_pages=64, threads=1, isa=best)) as executor:
        for prompt, asked in zip(prompts, params, strict=True):
            alone += run(executor, engine.folder, [prompt], [asked])
    (one,) = capped(engine, plan_run(engine, Memory(2**40, 2**40)), 1).window_pages
    for n_pages, window_pages, threads, isa, seed in (
        (64, 8 * one, 2, best, 0), (64, 2 * one, 1, other, 1), (9, 8 * one, 2, best, 2),
        (9, one, 2, best, 3),
    ):  # fmt: skip
        with closing(
            engine.executor(n_pages=n_pages, threads=threads, isa=isa, window_pages=(window_pages,))
        ) as executor:
            assert run(executor, engine.folder, prompts, params, seed) == alone, f"{n_pages}, {window_pages}, {isa}"


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_preempted_sequences_answer_as_alone(engines: dict[str, Engine], family: str) -> None:
    """Long answers that outgrow the pages, behind prompts that begin alike."""
    engine, best = engines[family], usable_isas()[0]
    long = drawn(121)[0]
    prompts = [long[:n] for n in (30, 70, 121, 100)]
    params = [replace(params_of(i), max_tokens=180) for i in range(len(prompts))]
    with closing(engine.executor(n_pages=64, threads=1, isa=best)) as executor:
        alone = [run(executor, engine.folder, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    seen: list[LoopStats] = []
    with closing(engine.executor(n_pages=9, threads=2, isa=best, window_pages=(40,))) as executor:
        assert run(executor, engine.folder, prompts, params, 5, seen) == alone
    assert seen[0].preemptions_total > 0 and seen[0].prefix_hits_total > 0
