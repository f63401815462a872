"""The rows of the table: what each measures, what it is to reach, and how long it may take."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import agrees, kernels_agree
from benchmarks.gpu.model import LLAMA_8B, TINY, RandomExecutor, prompts_of, random_executor
from benchmarks.gpu.roofline import Rates
from benchmarks.gpu.start import started
from benchmarks.record import judged
from benchmarks.words import Words
from millrace.checkpoint.config import ModelConfig
from millrace.checkpoint.generation import GenerationDefaults
from millrace.compile.device_tune import DeviceTuner
from millrace.engine.cuda.found import CPU, find_gpu
from millrace.runtime.batch import TokenBudget
from millrace.runtime.loop import EngineLoop
from millrace.runtime.params import Delta, SamplingParams
from millrace.runtime.request import Request

CONTEXT = 4160  # of the longest row, and a page
MOST_SEQUENCES = 512
TUNE_S = 12.0  # of a model's tiles, which no row before it has left
ONE_USER_TOKENS, TTFT_PROMPT, TTFT_RUNS = 512, 1024, 20


@dataclass(slots=True)
class Bench:
    """What rows have in common: one device, its rates, and the model that the row before has left."""

    device: str
    rates: Rates
    models: tuple[Path, ...] = ()
    dry_run: bool = False
    _held: tuple[str, RandomExecutor] | None = field(init=False, default=None)

    @property
    def config(self) -> ModelConfig:
        return replace(TINY, max_context=128) if self.dry_run else replace(LLAMA_8B, max_context=CONTEXT)

    def executor(self, precision: str) -> tuple[RandomExecutor, float]:
        """And the seconds that it took until it was warm; none where the row before had the same."""
        started = time.perf_counter()
        if self._held is None or self._held[0] != precision:
            self.release()
            made = random_executor(
                self.config, precision, 4 if self.dry_run else MOST_SEQUENCES, self.rates, self.device
            )
            if self.device != CPU:
                made.tiles = DeviceTuner(find_gpu(self.device), TUNE_S, None)(made)
            made.warm()
            self._held = precision, made
        return self._held[1], time.perf_counter() - started

    def release(self) -> None:
        """The model, and the memory that it has on the device."""
        if self._held is not None:
            self._held[1].close()
            self._held = None
            if self.device != CPU:
                torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Row:
    """about_s: that it takes on the device it is meant for, models and kernels included; it ends itself after that"""

    name: str
    about_s: int
    run: Callable[[Bench, "Row"], dict[str, Any]]
    with_: Mapping[str, Any] = field(default_factory=dict)


def loop_of(executor: RandomExecutor) -> EngineLoop:
    budget = TokenBudget.unhurried(executor.limits.max_step_tokens)
    vocab = executor.limits.vocab_size
    return EngineLoop(executor, Words(vocab), GenerationDefaults(), budget=budget, prefix_cache=False)


def throughput(bench: Bench, row: Row) -> dict[str, Any]:
    """All requests queued at once, random tokens, fixed lengths: output tokens of all time that passes."""
    isl, osl, counted, whole, sequences = (row.with_[k] for k in ("isl", "osl", "requests", "of", "sequences"))
    if bench.dry_run:
        isl, osl, counted, sequences = min(isl, 70) // 2, min(osl, 40) // 4, 6, 4
    executor, warm_s = bench.executor("fp8")
    executor.limits, limits = replace(executor.limits, max_sequences=sequences), executor.limits
    loop, executor.bound_s = loop_of(executor), 0.0
    told: list[Delta] = []
    params = SamplingParams(max_tokens=osl, ignore_eos=True, temperature=0)
    for prompt in prompts_of(bench.config, counted, isl):
        loop.submit(prompt, params, told.extend)
    started = time.perf_counter()
    while loop.step() and time.perf_counter() - started < row.about_s:
        told.clear()  # nobody reads them
    passed = time.perf_counter() - started
    stats = loop.stats()
    loop.stop()
    executor.limits = limits
    return {
        "isl": isl, "osl": osl, "requests": counted, "requests_of_the_table": whole, "sequences": sequences,
        "ended": sum(stats.finished_total.values()) == counted, "seconds": passed, "warm_s": warm_s,
        "steps": stats.steps_total, "preemptions": stats.preemptions_total,
        "tokens_per_s": stats.generation_tokens_total / passed, "share_of_roofline": executor.bound_s / passed,
    }  # fmt: skip


def _alone(loop: EngineLoop, prompt: list[int], n: int) -> Request:
    request = loop.submit(prompt, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0), lambda deltas: None)
    while loop.step():
        pass
    return request


def one_user(bench: Bench, row: Row) -> dict[str, Any]:
    """Tokens a second of one answer, behind its first."""
    executor, warm_s = bench.executor(row.with_["precision"])
    n = 12 if bench.dry_run else ONE_USER_TOKENS
    loop, found, shares = loop_of(executor), [], []
    for prompt in prompts_of(bench.config, 2 if bench.dry_run else 5, 16 if bench.dry_run else 128):
        executor.bound_s = 0.0
        timings = _alone(loop, prompt, n).timings
        assert timings.first_token_s is not None and timings.last_token_s is not None, "it has ended"
        took = timings.last_token_s - timings.first_token_s
        found.append((n - 1) / took)
        shares.append(executor.bound_s * (n - 1) / n / took)  # the prompt's step is one of as many
    return {
        "precision": row.with_["precision"], "tokens": n, "warm_s": warm_s, "samples": found,
        "tokens_per_s": statistics.median(found), "share_of_roofline": statistics.median(shares),
    }  # fmt: skip


def first_token(bench: Bench, row: Row) -> dict[str, Any]:
    executor, warm_s = bench.executor("fp8")
    n = 64 if bench.dry_run else TTFT_PROMPT
    loop, found, shares = loop_of(executor), [], []
    for prompt in prompts_of(bench.config, 3 if bench.dry_run else TTFT_RUNS, n):
        executor.bound_s = 0.0
        timings = _alone(loop, prompt, 1).timings
        assert timings.first_token_s is not None, "it has ended"
        found.append(timings.first_token_s - timings.queued_s)
        shares.append(executor.bound_s / found[-1])
    return {
        "prompt": n, "warm_s": warm_s, "samples_s": found, "ttft_ms": 1e3 * statistics.median(found),
        "share_of_roofline": statistics.median(shares),
    }  # fmt: skip


def start(bench: Bench, row: Row) -> dict[str, Any]:
    """Of a server that has the device for itself."""
    bench.release()
    return started(bench.config, bench.device, row.about_s)


def checks(bench: Bench, row: Row) -> dict[str, Any]:
    found = kernels_agree(bench.device, bench.dry_run)
    return {"checks": found, "ok": all(f["ok"] for f in found)}


def answers(bench: Bench, row: Row) -> dict[str, Any]:
    """Of the checkpoints that were named."""
    found = [agrees(path, bench.device) for path in bench.models]
    return {"models": found, "ok": all(f["ok"] for f in found)}


def _table(isl: int, osl: int, about_s: int, requests: int, of: int, **more: Any) -> Row:
    """more: sequences at a time, and tokens a second: the first milestone, the goal, TensorRT-LLM's"""
    return Row(f"{isl}/{osl}", about_s, throughput, {"isl": isl, "osl": osl, "requests": requests, "of": of, **more})


# A tenth to a quarter of the requests of TensorRT-LLM's table: those of 2,048 tokens out a quarter, or the ramp shows.
ROWS = (
    Row("checks", 180, checks),
    Row("answers", 60, answers),
    Row("user-bf16", 75, one_user, {"precision": "bf16", "goal": 240}),
    Row("user-w4a16", 75, one_user, {"precision": "w4a16", "goal": 600}),
    Row("user-fp8", 90, one_user, {"precision": "fp8", "goal": 430}),
    Row("ttft-1024", 30, first_token, {"goal_ms": 15}),
    Row("start-fp8", 120, start, {"goal_s": 10}),
    _table(128, 128, 60, 3000, 30000, sequences=512, milestone=22000, goal=33000, theirs=27911),
    _table(128, 2048, 180, 750, 3000, sequences=512, milestone=21000, goal=28000, theirs=26221),
    _table(500, 2000, 180, 750, 3000, sequences=512, milestone=17000, goal=22500, theirs=20770),
    _table(1000, 1000, 120, 750, 3000, sequences=512, milestone=14500, goal=19000, theirs=17744),
    _table(2048, 128, 90, 750, 3000, sequences=512, milestone=3000, goal=3800, theirs=3538),
    _table(2048, 2048, 200, 375, 1500, sequences=256, milestone=10000, goal=12500, theirs=12194),
)


def goals(row: Row, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of one that has some."""
    about = row.with_
    if row.run is throughput:
        return [judged(f"{row.name}, output tokens/s", found["tokens_per_s"], about["goal"], about["milestone"])]
    if row.run is one_user:
        return [
            judged(f"one user, {about['precision']}, tokens/s", found["tokens_per_s"], about["goal"], about["goal"])
        ]
    if row.run is first_token:
        ms = about["goal_ms"]
        return [judged("first of 1,024 tokens, ms", found["ttft_ms"], ms, ms, at_most=True)]
    if row.run is start:
        return [judged("process start to ready, s", found["ready_s"], about["goal_s"], about["goal_s"], at_most=True)]
    return []
