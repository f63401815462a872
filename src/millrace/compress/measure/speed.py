"""Measures the speed of a folder and its source on this machine, alternating because shared machines' speed varies."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from millrace.compile.settings import Progress
from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.dummy_step import dummy_step
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import ConfigError

PROMPT, AT, NEW = 512, 128, 16  # tokens: of a prompt; in the context at the start of decoding; that are decoded
SEQUENCES = (1, 4, 16)
ROUNDS = 5
_SHORTEST = AT + NEW
TOKENS = max(SEQUENCES) * (_SHORTEST + PAGE_TOKENS)  # maximum in KV pages, which are divided evenly
Work = Callable[[], object]


class StepRate(msgspec.Struct, frozen=True):
    """Tokens per second: the median of the rounds, the slowest and the fastest."""

    median: float
    low: float
    high: float

    @classmethod
    def from_samples(cls, tokens: int, samples_s: Sequence[float]) -> "StepRate":
        return cls(tokens / median(samples_s), tokens / max(samples_s), tokens / min(samples_s))


class TimedRun(msgspec.Struct, frozen=True):
    """One workload: "prefill of 512", "decode, 4 at once"."""

    work: str
    source: StepRate
    made: StepRate


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speeds. machine: its processor; isa: instruction set; precisions: that both ran in"""

    machine: str
    threads: int
    isa: str
    source_precision: str
    made_precision: str
    paces: list[TimedRun]


def paces(
    source: NativeExecutor, compressed: NativeExecutor, progress: Progress, rounds: int = ROUNDS,
    sequences: Sequence[int] = SEQUENCES,
) -> list[TimedRun]:  # fmt: skip
    """Measure all workloads. sequences: batch sizes of decoding. raises ConfigError if the context is too short"""
    room = min(source.limits.context_tokens, compressed.limits.context_tokens)
    if room < _SHORTEST:
        raise ConfigError(
            f"a context of {room} tokens is too short to measure speed in", f"at least {_SHORTEST}",
            "leave --measure-speed out",
        )  # fmt: skip
    prompt = min(PROMPT, room)
    works: list[tuple[str, int, Callable[[NativeExecutor], Work]]] = [
        (f"prefill of {prompt}", prompt, lambda executor: _prefill(executor, prompt))
    ]
    for n in sequences:
        name = f"decode, {n} at once" if n > 1 else "decode, alone"
        works.append((name, n * NEW, lambda executor, n=n: _decode(executor, n)))  # type: ignore[misc]
    result = []
    for number, (name, tokens, work) in enumerate(works):
        progress("measuring speed", number, len(works))
        samples = in_turns([work(source), work(compressed)], rounds)
        result.append(TimedRun(name, *(StepRate.from_samples(tokens, each) for each in samples)))
    return result


def in_turns(works: Sequence[Work], rounds: int) -> list[list[float]]:
    """Return seconds per work and round. The order rotates from round to round; a warm-up round precedes them."""
    result: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        order = range(len(works)) if number % 2 else reversed(range(len(works)))
        for i in order:
            started_s = time.perf_counter()
            works[i]()
            if number:
                result[i].append(time.perf_counter() - started_s)
    return result


def _prefill(executor: NativeExecutor, tokens: int) -> Work:
    """Return the work of one prompt, in steps of the engine's maximum size."""
    limits = executor.limits
    most = limits.max_step_tokens
    steps = [
        dummy_step([min(most, tokens - at)], at, limits.n_pages, vocab=limits.vocab_size)
        for at in range(0, tokens, most)
    ]
    return lambda: [executor.run(step) for step in steps]


def _decode(executor: NativeExecutor, n: int) -> Work:
    limits = executor.limits
    steps = [dummy_step([1] * n, AT + i, limits.n_pages, seed=i, vocab=limits.vocab_size) for i in range(NEW)]
    return lambda: [executor.run(step) for step in steps]
