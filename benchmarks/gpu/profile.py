"""Where a step's time goes on the device: its kernels by time, and what lies between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.model import RandomExecutor
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.cuda.device_roofline import seconds, wait_for
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import StepInputs

CONTEXT = 1000  # of each sequence that decodes
STEPS, REPEATS = 6, 3  # steps that are profiled, whose mean is told; how often as many are timed
MAX_KERNELS, NAME = 24, 80  # rows of a table, and how much of a kernel's name


@dataclass(frozen=True, slots=True)
class Kernel:
    """begin, end: microseconds"""

    name: str
    begin: float
    end: float


def steps_of(executor: RandomExecutor, dry_run: bool) -> dict[str, StepInputs]:
    """Decode steps of few and many sequences, and a mixed one: as many tokens of prompts as there are sequences."""
    limits = executor.limits
    context = 20 if dry_run else CONTEXT
    each = -(-(context + 1) // PAGE_TOKENS)
    most = min(limits.max_sequences - 2, limits.n_pages // each - 2)
    found = {f"decode, {n} sequences": _decode([1] * n, n, context, limits.vocab_size) for n in (1, 64, most)
             if n <= most}  # fmt: skip
    prompt = min(most // 2, each * PAGE_TOKENS)
    lengths = [1] * most + [prompt] * 2
    found[f"mixed, {most} sequences and 2 x {prompt} tokens"] = _decode(lengths, most, context, limits.vocab_size)
    return found


def _decode(lengths: Sequence[int], n: int, context: int, vocab: int) -> StepInputs:
    """The first n of them have a context behind them."""
    each = -(-(context + 1) // PAGE_TOKENS)
    step = dummy_step(lengths, 0, each * len(lengths), vocab=vocab)
    positions = step.positions.copy()
    positions[:n] = context - np.arange(n) % min(8, context)
    return replace(step, positions=positions)


def profiled(bench: Bench, row: Row) -> dict[str, Any]:
    executor = bench.executor(row.precision)
    n, repeats = (1, 1) if bench.dry_run else (STEPS, REPEATS)
    of = steps_of(executor, bench.dry_run)
    return {"steps": [{"what": what, **told(executor, step, n, repeats)} for what, step in of.items()]}


def told(executor: RandomExecutor, step: StepInputs, n: int, repeats: int) -> dict[str, Any]:
    """Of n such steps in a row, timed `repeats` times and then profiled once."""
    device = executor.device

    def some() -> None:
        """As the loop has them: one is launched before the last one is waited for."""
        executor.launch(step)
        for _ in range(n - 1):
            executor.launch(step)
            executor.wait()
        executor.wait()

    executor.bound_s = 0.0
    some()
    bound_s, took_s = executor.bound_s, seconds(some, device, repeats)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as seen:
        some()
        wait_for(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [e for e in seen.events() if e.device_type == kind]
    kernels = [Kernel(e.name, e.time_range.start, e.time_range.end) for e in events]
    return {"ms": 1e3 * took_s / n, "bound_ms": 1e3 * bound_s / n, **table(kernels, n)}


def table(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Of each kernel, those that take longest first, how often and how long it runs in a step (microseconds).

    busy_ms: that some kernel runs, once where two run at a time; gaps_ms: from the first one's begin to the last one's
    end, that none does; gaps: between which two, and for how long in a step
    """
    rows: dict[str, list[float]] = {}
    for kernel in kernels:
        rows.setdefault(kernel.name[:NAME], []).append(kernel.end - kernel.begin)
    in_turn = sorted(kernels, key=lambda k: k.begin)
    busy = gaps = 0.0
    until, before = (in_turn[0].begin, in_turn[0]) if in_turn else (0.0, None)
    between: dict[str, list[float]] = {}
    for kernel in in_turn:
        if kernel.begin > until and before is not None:
            gaps += kernel.begin - until
            pair = f"{before.name[: NAME // 2]} | {kernel.name[: NAME // 2]}"
            between.setdefault(pair, []).append(kernel.begin - until)
        busy += max(0.0, kernel.end - max(until, kernel.begin))
        if kernel.end >= until:
            until, before = kernel.end, kernel
    by_time = sorted(rows.items(), key=lambda row: -sum(row[1]))[:MAX_KERNELS]
    by_gap = sorted(between.items(), key=lambda row: -sum(row[1]))[: MAX_KERNELS // 2]
    return {
        "busy_ms": busy / steps / 1e3, "gaps_ms": gaps / steps / 1e3, "kernels_a_step": len(kernels) / steps,
        "kernels": [{"name": n, "a_step": len(us) / steps, "us": sum(us) / steps} for n, us in by_time],
        "gaps": [{"between": n, "a_step": len(us) / steps, "us": sum(us) / steps} for n, us in by_gap],
    }  # fmt: skip
