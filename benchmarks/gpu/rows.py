"""The rows of the table: what each measures, what it is to reach, and how long it may take."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.gpu.bench import WAYS, Bench, Row
from benchmarks.gpu.checks import agrees, draws_agree, encoders_agree, kernels_agree, shape_agrees
from benchmarks.gpu.model import RandomExecutor, prompts_of
from benchmarks.gpu.profile import profiled
from benchmarks.gpu.start import started
from benchmarks.record import judged
from benchmarks.words import Words
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.request import Request
from millrace.runtime.request.sampling_params import Delta, SamplingParams
from millrace.runtime.scheduling.token_budget import TokenBudget

ONE_USER_TOKENS, TTFT_PROMPT, TTFT_RUNS = 512, 1024, 20
WINDOW_S = 1.0  # of which the tokens are told


def loop_of(executor: RandomExecutor) -> EngineLoop:
    budget = TokenBudget.unhurried(executor.limits.max_step_tokens)
    vocab = executor.limits.vocab_size
    return EngineLoop(executor, Words(vocab), GenerationDefaults(), budget=budget, prefix_cache=False)


def throughput(bench: Bench, row: Row) -> dict[str, Any]:
    """All requests queued at once, random tokens, fixed lengths: output tokens of all time that passes.

    each_second: tokens of windows of WINDOW_S: how they come and go, and whether something stood still
    """
    isl, osl, counted, whole, sequences = (row.with_[k] for k in ("isl", "osl", "requests", "of", "sequences"))
    if bench.dry_run:
        isl, osl, counted, sequences = min(isl, 70) // 2, min(osl, 40) // 4, 6, 4
    executor = bench.executor(row.precision)
    executor.limits, limits = replace(executor.limits, max_sequences=sequences), executor.limits
    loop, executor.bound_s = loop_of(executor), 0.0
    told: list[Delta] = []
    params = SamplingParams(max_tokens=osl, ignore_eos=True, temperature=0)
    for prompt in prompts_of(bench.config, counted, isl):
        loop.submit(prompt, params, told.extend)
    started = at = time.perf_counter()
    windows: list[int] = []
    while loop.step() and time.perf_counter() - started < row.about_s:
        told.clear()  # nobody reads them
        if time.perf_counter() - at > WINDOW_S:
            windows.append(loop.stats().generation_tokens_total - sum(windows))
            at = time.perf_counter()
    passed = time.perf_counter() - started
    stats = loop.stats()
    loop.stop()
    executor.limits = limits
    return {
        "isl": isl, "osl": osl, "requests": counted, "requests_of_the_table": whole, "sequences": sequences,
        "ended": sum(stats.finished_total.values()) == counted, "seconds": passed, "each_second": windows,
        "steps": stats.steps_total, "step_tokens": stats.step_tokens_total, "preemptions": stats.preemptions_total,
        "tokens_per_s": stats.generation_tokens_total / passed, "share_of_roofline": executor.bound_s / passed,
    }  # fmt: skip


def _alone(loop: EngineLoop, prompt: list[int], n: int) -> Request:
    request = loop.submit(prompt, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0), lambda deltas: None)
    while loop.step():
        pass
    return request


def one_user(bench: Bench, row: Row) -> dict[str, Any]:
    """Tokens a second of one answer, behind its first."""
    return _one_user(bench.executor(row.precision), bench, row)


def _one_user(executor: RandomExecutor, bench: Bench, row: Row) -> dict[str, Any]:
    n = 12 if bench.dry_run else ONE_USER_TOKENS
    loop = loop_of(executor)
    found, shares = list[float](), list[float]()
    until = time.perf_counter() + row.about_s
    for prompt in prompts_of(bench.config, 2 if bench.dry_run else 5, 16 if bench.dry_run else 128):
        if found and time.perf_counter() > until:
            break
        executor.bound_s = 0.0
        timings = _alone(loop, prompt, n).timings
        assert timings.first_token_s is not None and timings.last_token_s is not None, "it has ended"
        took = timings.last_token_s - timings.first_token_s
        found.append((n - 1) / took)
        shares.append(executor.bound_s * (n - 1) / n / took)  # the prompt's step is one of as many
    return {
        "precision": row.precision, "tokens": n, "made": bench.made, "samples": found,
        "tokens_per_s": statistics.median(found), "share_of_roofline": statistics.median(shares),
    }  # fmt: skip


def first_token(bench: Bench, row: Row) -> dict[str, Any]:
    executor = bench.executor(row.precision)
    n = 64 if bench.dry_run else TTFT_PROMPT
    loop, found, shares = loop_of(executor), [], []
    for prompt in prompts_of(bench.config, 3 if bench.dry_run else TTFT_RUNS, n):
        executor.bound_s = 0.0
        timings = _alone(loop, prompt, 1).timings
        assert timings.first_token_s is not None, "it has ended"
        found.append(timings.first_token_s - timings.queued_s)
        shares.append(executor.bound_s / found[-1])
    return {
        "prompt": n, "samples_s": found, "ttft_ms": 1e3 * statistics.median(found),
        "share_of_roofline": statistics.median(shares),
    }  # fmt: skip


def start(bench: Bench, row: Row) -> dict[str, Any]:
    """Of a server that has the device for itself."""
    bench.release()
    return started(bench.config, bench.device, row.about_s)


def without_overlap(bench: Bench, row: Row) -> dict[str, Any]:
    """One user, where no kernel begins before the one in front of it has ended: what that brings."""
    executor = bench.executor(row.precision)
    with bench.going(replace(bench.way, overlap=False)), executor.anew():
        _alone(loop_of(executor), prompts_of(bench.config, 1, 16, seed=2)[0], 4)  # compiled and captured
        return _one_user(executor, bench, row)


def first(bench: Bench, row: Row) -> dict[str, Any]:
    """Of two layers of the real shape: what the rows behind it run, before any of them is paid for.

    Where something does not agree, once more without what may be at fault; of the ways that were tried the rows behind
    it go the one in which most agreed. agree: the precisions that may be measured
    """
    tried: list[dict[str, Any]] = []
    for way in WAYS[WAYS.index(bench.way) :]:
        with bench.going(way):
            found = shape_agrees(bench.device, bench.dry_run, way.graphs)
            drawn = draws_agree(bench.device, bench.dry_run)
        agree = [f["precision"] for f in found if f["ok"] and drawn["ok"]]
        tried.append({"way": asdict(way), "agree": agree, "checks": [*found, drawn]})
        if len(agree) == len(found):
            break
    best = max(tried, key=lambda one: len(one["agree"]))
    return {**best, "ok": bool(best["agree"]), "tried": tried if len(tried) > 1 else []}


def checks(bench: Bench, row: Row) -> dict[str, Any]:
    found = kernels_agree(bench.device, bench.dry_run)
    return {"checks": found, "ok": all(f["ok"] for f in found)}


def encoders(bench: Bench, row: Row) -> dict[str, Any]:
    found = encoders_agree(bench.device, bench.dry_run)
    return {"checks": found, "ok": all(f["ok"] for f in found)}


def answers(bench: Bench, row: Row) -> dict[str, Any]:
    """Of the checkpoints that were named."""
    found = [agrees(path, bench.device) for path in bench.models]
    return {"models": found, "ok": all(f["ok"] for f in found)}


def _table(isl: int, osl: int, about_s: int, requests: int, of: int, **more: Any) -> Row:
    """more: sequences at a time, and tokens a second: the first milestone, the goal, TensorRT-LLM's"""
    with_ = {"isl": isl, "osl": osl, "requests": requests, "of": of, **more}
    return Row(f"{isl}/{osl}", about_s, throughput, "fp8", with_=with_)


# What tells most comes first, and all of a model's rows are together. A tenth to a quarter of the requests of
# TensorRT-LLM's table: those of 2,048 tokens out a quarter, or the ramp shows.
ROWS = (
    Row("first", 60, first, first=True),
    Row("answers", 20, answers),
    Row("user-fp8", 15, one_user, "fp8", with_={"goal": 430}),
    Row("profile-fp8", 20, profiled, "fp8"),
    Row("ttft-1024", 5, first_token, "fp8", with_={"goal_ms": 15}),
    _table(128, 128, 40, 3000, 30000, sequences=512, milestone=22000, goal=33000, theirs=27911),
    Row("user-fp8-apart", 20, without_overlap, "fp8"),
    _table(1000, 1000, 70, 750, 3000, sequences=512, milestone=14500, goal=19000, theirs=17744),
    _table(2048, 128, 50, 750, 3000, sequences=512, milestone=3000, goal=3800, theirs=3538),
    _table(500, 2000, 80, 750, 3000, sequences=512, milestone=17000, goal=22500, theirs=20770),
    _table(128, 2048, 70, 750, 3000, sequences=512, milestone=21000, goal=28000, theirs=26221),
    _table(2048, 2048, 80, 375, 1500, sequences=256, milestone=10000, goal=12500, theirs=12194),
    Row("user-bf16", 20, one_user, "bf16", with_={"goal": 240}),
    Row("user-w4a16", 15, one_user, "w4a16", with_={"goal": 600}),
    Row("start-fp8", 80, start, with_={"goal_s": 10}),
    Row("encoders", 10, encoders),
    Row("checks", 110, checks),
)


def goals(row: Row, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of one that has some."""
    about = row.with_
    if row.run is throughput:
        return [judged(f"{row.name}, output tokens/s", found["tokens_per_s"], about["goal"], about["milestone"])]
    if row.run is one_user:
        return [judged(f"one user, {row.precision}, tokens/s", found["tokens_per_s"], about["goal"], about["goal"])]
    if row.run is first_token:
        ms = about["goal_ms"]
        return [judged("first of 1,024 tokens, ms", found["ttft_ms"], ms, ms, at_most=True)]
    if row.run is start:
        return [judged("process start to ready, s", found["ready_s"], about["goal_s"], about["goal_s"], at_most=True)]
    return []
