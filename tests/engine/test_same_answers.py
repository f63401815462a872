"""Promise 1 on a real model: the golden story, and equal answers however the work is cut, shared, moved or computed."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from millrace.api.offline_generate import CompletionOutput, generate
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.engine.native.executor import NativeExecutor
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import BF16_BY_TILES
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.scheduling.token_budget import TokenBudget
from tests.runtime.fakes import RandomBudget
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build
from tests.support.gguf_files import BLOCKY, write_gguf
from tests.support.shared import shared

PRECISIONS = ("fp32", "bf16", BF16_BY_TILES, "w8a8", "w4a8", "w4a8:16", "w4a8 over int8")
EVERY_PRECISION = (*PRECISIONS, "w8a16", "w4a16", "fp8a16")
LATER = ("w4a8 over fp8", "w4a8 over int4")  # pages that share most of their code with bf16's and int8's
BY_NIGHT = tuple(pytest.param(name, marks=pytest.mark.nightly) for name in LATER)
Answers = list[CompletionOutput]  # equal where tokens and log probabilities are


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    folder = shared("models/stories260K")
    out = tmp_path_factory.mktemp("engines")
    found = {}
    for name in (*EVERY_PRECISION, *LATER):
        precision, _, kv = name.partition(" over ")
        kv_format = KvFormat[kv.upper()] if kv else None
        found[name] = build(folder, out / name, precision, max_step_tokens=128, kv=kv_format)
    return found


def run(
    executor: NativeExecutor, folder: Path, prompts: list[list[int]], params: list[SamplingParams], seed: int
) -> Answers:
    """All prompts at once; the seed draws how large each step's chunks are (0: as large as they can be)."""
    budget = RandomBudget(executor.limits.max_step_tokens, random.Random(seed)) if seed else None
    loop = EngineLoop(executor, open_tokenizer(folder), GenerationDefaults(), budget=budget)
    outputs = generate(loop, [{"prompt_token_ids": p} for p in prompts], params)
    assert loop.stats().pages_used == 0
    return [o.outputs[0] for o in outputs]


@pytest.fixture
def golden() -> list[int]:
    ids: list[int] = json.loads((shared("models/stories260K") / "golden.json").read_text())["greedy_from_bos_ids"]
    return ids


@pytest.mark.parametrize("isa", usable_isas())
def test_the_golden_story(engines: dict[str, Engine], golden: list[int], isa: str) -> None:
    """The published greedy continuation of <s>, from it and from its own prefixes, all in one batch."""
    executor = engines["fp32"].executor(n_pages=64, isa=isa)
    cuts = [1, 2, 63, 64, 65, 127, 130, 199]
    params = [SamplingParams(temperature=0, max_tokens=201 - cut, ignore_eos=True) for cut in cuts]
    answers = run(executor, engines["fp32"].folder, [golden[:cut] for cut in cuts], params, seed=0)
    executor.close()
    assert [answer.token_ids for answer in answers] == [golden[cut:] for cut in cuts]


def sixteen(max_tokens: int = 24) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 200 tokens; half greedy, half sampled with seeds, filters and penalties; with alternatives."""
    rng = random.Random(5)
    prompts = [
        [1, *(rng.randrange(3, 512) for _ in range(rng.choice([0, 1, 5, 30, 63, 64, 100, 199])))] for _ in range(16)
    ]
    sampled = dict(temperature=0.9, top_p=0.9, top_k=40, repetition_penalty=1.1, frequency_penalty=0.2)
    common = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    params = [
        replace(common, seed=i, **(dict(temperature=0.0) if i % 2 else sampled))  # type: ignore[arg-type]
        for i in range(16)
    ]
    return prompts, params


def ways(best: str) -> Iterator[tuple[str, int, int, int]]:
    """(isa, threads, pages, seed of the chunks): few pages force preemption. The slowest runs once on each number."""
    slowest = usable_isas()[-1]
    for isa in usable_isas():
        for threads in (1, 2) if isa != slowest or isa == best else (2,):
            yield isa, threads, 128, 0
    yield best, 2, 128, 1
    yield best, 2, 128, 2
    yield best, 1, 10, 3
    yield slowest, 1, 10, 4


@pytest.mark.parametrize(
    "precision", [*PRECISIONS[:-2], *(pytest.param(name, marks=pytest.mark.nightly) for name in PRECISIONS[-2:])]
)
def test_together_equals_alone(engines: dict[str, Engine], precision: str) -> None:
    engine = engines[precision]
    prompts, params = sixteen()
    best = usable_isas()[0]
    executor = engine.executor(n_pages=128, threads=1, isa=best)
    alone = [run(executor, engine.folder, [p], [s], 0)[0] for p, s in zip(prompts, params, strict=True)]
    executor.close()
    for isa, threads, pages, seed in ways(best):
        executor = engine.executor(n_pages=pages, threads=threads, isa=isa)
        assert run(executor, engine.folder, prompts, params, seed) == alone, (
            f"{isa}, {threads} threads, {pages} pages, {seed}"
        )
        executor.close()


@pytest.mark.parametrize("precision", (*EVERY_PRECISION, BY_NIGHT[0], LATER[1]))
def test_p1_known_prefixes_change_nothing(engines: dict[str, Engine], precision: str) -> None:
    """Prompts that begin as others do: together and again, cut at random, evicted meanwhile; equal to the last bit."""
    engine, rng = engines[precision], random.Random(8)
    base = [1, *(rng.randrange(3, 512) for _ in range(199))]
    prompts = [base[:cut] + [rng.randrange(3, 512) for _ in range(5)] for cut in (64, 65, 127, 128, 190, 190)]
    prompts[2:2] = [[2, *base[1:140]], [3, *base[1:190]]]  # strangers
    params = [SamplingParams(max_tokens=16, ignore_eos=True, seed=i, temperature=i % 2, logprobs=2) for i in range(8)]

    def asked(loop: EngineLoop) -> list[tuple[list[int], object]]:
        outputs = generate(loop, [{"prompt_token_ids": p} for p in prompts], params)
        return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs]

    tokenizer, defaults = open_tokenizer(engine.folder), GenerationDefaults()
    executor = engine.executor(n_pages=64, threads=1)
    alone = asked(EngineLoop(executor, tokenizer, defaults, prefix_cache=False))
    executor.close()
    for pages, seed in ((64, 0), (64, 1), (5, 2)):
        executor = engine.executor(n_pages=pages, threads=2)
        budget = RandomBudget(executor.limits.max_step_tokens, random.Random(seed)) if seed else None
        loop = EngineLoop(executor, tokenizer, defaults, budget=budget)
        assert [asked(loop), asked(loop)] == [alone, alone], f"{pages} pages, {seed}"
        assert loop.stats().prefix_hits_total > 64 and (pages == 64 or loop.stats().pages_evicted_total)
        executor.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w4a8 over int8"])
def test_p1_pages_found_in_part_change_nothing(engines: dict[str, Engine], precision: str) -> None:
    """In each KV format: the rest of a page is copied from one that goes on otherwise, seven pages or many."""
    engine, rng = engines[precision], random.Random(9)
    base = [1, *(rng.randrange(3, 512) for _ in range(199))]
    cuts = (9, 60, 63, 72, 100, 127, 150, 191)
    prompts = [base, *(base[:cut] + [3 + cut] * 3 for cut in cuts)]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=i, temperature=i % 2, logprobs=2) for i in range(9)]
    tokenizer, answers, known = open_tokenizer(engine.folder), [], []
    for pages, cache in ((64, False), (64, True), (5, True)):
        executor = engine.executor(n_pages=pages, threads=2)
        loop = EngineLoop(executor, tokenizer, GenerationDefaults(), prefix_cache=cache)
        outputs = [generate(loop, [{"prompt_token_ids": p}], s)[0] for p, s in zip(prompts, params, strict=True)]
        answers.append([(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs])
        known.append([o.num_cached_tokens for o in outputs[1:]])
        executor.close()
    assert answers[1] == answers[2] == answers[0]
    assert known[1] == list(cuts) and sum(n or 0 for n in known[2]) > 0


def stored_types(name: str) -> Kind:
    """Of a tensor: every way of weights with minimums or two levels, some of them side by side."""
    kinds = {
        "attn_v": Kind.Q6_K,
        "attn_output": Kind.Q5_1,
        "ffn_gate": Kind.Q4_K,
        "ffn_up": Kind.Q4_K,
        "output": Kind.Q5_K,
    }
    return kinds.get(name.split(".")[-2], Kind.Q4_1)


@pytest.mark.parametrize("precision", [None, "w4a16"])
def test_stored_weights_together_equal_alone(tmp_path: Path, precision: str | None) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=3, **BLOCKY)
    engine = build(write_gguf(tmp_path / "m.gguf", folder, stored_types), tmp_path / "engine", precision, group=32)
    prompts, params = sixteen(max_tokens=6)
    prompts, params = prompts[:6], params[:6]
    best, answers = usable_isas()[0], []
    executor = engine.executor(n_pages=64, threads=1, isa=best)
    alone = [run(executor, engine.folder, [p], [s], 0)[0] for p, s in zip(prompts, params, strict=True)]
    executor.close()
    for isa, seed in (*((isa, 0) for isa in usable_isas()), (best, 1)):
        executor = engine.executor(n_pages=10, threads=2, isa=isa)
        answers.append(run(executor, engine.folder, prompts, params, seed))
        executor.close()
    assert all(answer == alone for answer in answers)


@pytest.mark.parametrize("precision", (*EVERY_PRECISION, *BY_NIGHT))
def test_preemption_changes_nothing(engines: dict[str, Engine], precision: str) -> None:
    """Eight sequences that each outgrow their page while ten pages are there for all."""
    engine = engines[precision]
    prompts, params = sixteen(max_tokens=70)
    answers = []
    for pages in (128, 10):
        executor = engine.executor(n_pages=pages)
        whole = TokenBudget(128, chunk_low=128)  # as many sequences at once as there can be
        loop = EngineLoop(executor, open_tokenizer(engine.folder), GenerationDefaults(), budget=whole)
        outputs = generate(loop, [{"prompt_token_ids": p} for p in prompts], params)
        answers.append([o.outputs[0] for o in outputs])
        executor.close()
        assert (loop.stats().preemptions_total > 0) == (pages == 10)
    assert answers[0] == answers[1] and all(answer.logprobs and len(answer.logprobs) == 70 for answer in answers[0])
