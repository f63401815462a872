"""What long contexts cost: decode at 4,096 tokens beside decode at 128, and a long prompt beside somebody's stream.

    python -m benchmarks.contexts --shape tinyllama-1.1b --kv-cache-dtype int8

Everything in process with random weights, interleaved. In the mix one user streams, and another's prompt of 2,000
tokens arrives; then the same two one after the other. Writes results/contexts-SHAPE-KV-TIME-COMMIT.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import TILES, TUNE_S, Timing, bandwidth, pages_for, prefill, read_per_step, repeat
from benchmarks.names import named
from benchmarks.record import judged, provenance, write_result
from benchmarks.shapes import SHAPES, random_source
from benchmarks.words import Words
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.tune.tuner import Tuning
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KV_CACHE_DTYPES, PAGE_TOKENS
from millrace.engine.dummy_step import dummy_step
from millrace.engine.native.executor import NativeExecutor
from millrace.machine.cpu import usable_cores
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams

CONTEXT = 8192
SHALLOW, DEEP, NEW_TOKENS = 128, 4096, 32
COLD_STEPS, CACHES = 8, 1 << 30  # steps of a round that find nothing in caches; bytes, more than those of a CPU hold
STREAM_PROMPT, STREAM_TOKENS, ARRIVES_AT, LONG_PROMPT = 32, 300, 20, 2000


def decode_by_depth(executor: NativeExecutor, rounds: int) -> dict[str, Any]:
    """Tokens a second of one sequence with 128 and with 4,096 tokens before it, interleaved.

    Also from memory: with caches emptied before each step. There are hosts whose third-level cache holds all weights of
    a small model between two steps, if nobody else needs it, but not its keys and values besides; then the share of the
    two says more about that cache than about attention.
    """
    prefill(executor, DEEP, 1)
    found: dict[int, list[float]] = {SHALLOW: [], DEEP: []}
    cold: dict[int, list[float]] = {SHALLOW: [], DEEP: []}
    read: list[float] = []
    others = np.ones(CACHES // 8)
    for _ in range(rounds):
        read.append(bandwidth(executor.isa, usable_cores()))
        for depth, samples in found.items():
            steps = [dummy_step([1], depth + i, executor.limits.n_pages, seed=i) for i in range(NEW_TOKENS)]
            samples += repeat(lambda steps=steps: [executor.run(s) for s in steps], 1).samples_s  # type: ignore[misc]
        for step in range(COLD_STEPS):
            for depth, samples in cold.items():
                one = dummy_step([1], depth + step, executor.limits.n_pages, seed=step)
                others.max()
                started = time.perf_counter()
                executor.run(one)
                samples.append(time.perf_counter() - started)
    return {
        **_by_depth(found, NEW_TOKENS), "from_memory": _by_depth(cold, 1), "bandwidth_bytes_per_s": read,
    }  # fmt: skip


def _by_depth(samples_s: dict[int, list[float]], n_tokens: int) -> dict[str, Any]:
    """Each sample is of so many tokens."""
    rates = {depth: n_tokens / Timing(samples).median_s for depth, samples in samples_s.items()}
    return {
        "tokens_per_s": {str(d): round(r, 1) for d, r in rates.items()},
        "share": round(rates[DEEP] / rates[SHALLOW], 3), "samples_s": {str(d): s for d, s in samples_s.items()},
    }  # fmt: skip


def bytes_by_depth(engine: Engine) -> dict[str, Any]:
    """What a step of one sequence reads, weights with keys and values; and which share of the speed that allows."""
    read = {d: read_per_step(engine) + engine.page_bytes * d // PAGE_TOKENS for d in (SHALLOW, DEEP)}
    return {
        "bytes_per_step": {str(d): n for d, n in read.items()}, "share_by_bytes": round(read[SHALLOW] / read[DEEP], 3)
    }  # fmt: skip


class Mix:
    """One user's stream, and another's long prompt, through the scheduler."""

    def __init__(self, executor: NativeExecutor) -> None:
        self._executor = executor
        self._loop = EngineLoop(executor, Words(executor.limits.vocab_size), prefix_cache=False)
        rng = np.random.default_rng(0)
        self._prompts = [rng.integers(3, 30000, n).tolist() for n in (STREAM_PROMPT, LONG_PROMPT)]

    def run(self, *, stream: bool, prompt: bool) -> tuple[float, list[float]]:
        """Seconds until all is answered, and when each token of the stream came."""
        times: list[float] = []
        open_answers = int(stream) + int(prompt)

        def finished(deltas: Sequence[Any]) -> None:
            nonlocal open_answers
            open_answers -= sum(d.finish_reason is not None for d in deltas)

        def token(deltas: Sequence[Any]) -> None:
            times.extend([time.perf_counter()] * sum(len(d.token_ids) for d in deltas))
            finished(deltas)

        def ask(which: int, tokens: int, deliver: Any) -> None:
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            self._loop.submit(self._prompts[which], params, deliver)

        started = time.perf_counter()
        if stream:
            ask(0, STREAM_TOKENS, token)
        elif prompt:
            ask(1, 1, finished)
        asked = not (stream and prompt)
        while open_answers:
            self._loop.step()
            if not asked and len(times) >= ARRIVES_AT:
                ask(1, 1, finished)
                asked = True
        return time.perf_counter() - started, times


def mixed_work(executor: NativeExecutor, rounds: int) -> dict[str, Any]:
    mix = Mix(executor)
    mix.run(stream=True, prompt=True)  # warm; the budget learns what tokens cost
    samples = []
    for _ in range(rounds):
        together, times = mix.run(stream=True, prompt=True)
        alone, own = mix.run(stream=True, prompt=False)
        prompt, _ = mix.run(stream=False, prompt=True)
        gaps, own_gaps = (sorted(np.diff(t).tolist()) for t in (times, own))
        samples.append({
            "together_s": together, "stream_alone_s": alone, "prompt_alone_s": prompt,
            "median_gap_s": statistics.median(gaps), "p99_gap_s": gaps[int(0.99 * len(gaps))],
            "longest_gap_s": gaps[-1], "median_gap_alone_s": statistics.median(own_gaps),
            "p99_gap_alone_s": own_gaps[int(0.99 * len(own_gaps))],
        })  # fmt: skip

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(value(s) for s in samples), 3)

    return {
        "p99_to_median_gap": median(lambda s: s["p99_gap_s"] / s["median_gap_s"]),
        "p99_to_median_gap_alone": median(lambda s: s["p99_gap_s"] / s["median_gap_alone_s"]),
        "total_to_one_after_the_other": median(lambda s: s["together_s"] / (s["stream_alone_s"] + s["prompt_alone_s"])),
        "samples": samples,
    }


def run(shape: str, precision: str, kv: str, rounds: int, folder: Path) -> dict[str, Any]:
    source = random_source(shape, CONTEXT)
    options = BuildOptions(precision=precision_map(precision), max_batch=4, kv_format=KV_CACHE_DTYPES[kv], tiles=TILES)
    write_engine(source, plan_engine(source, options), folder, name=shape, tuning=Tuning(TUNE_S))
    engine = Engine.open(folder)
    executor = engine.executor(n_pages=pages_for(1, CONTEXT), threads=usable_cores())
    decode = {**decode_by_depth(executor, rounds), **bytes_by_depth(engine)}
    mixed = mixed_work(executor, rounds)
    result = {
        **provenance("benchmarks.contexts"), "shape": shape, "precision": precision, **named(engine),
        "kv_cache_dtype": kv, "threads": usable_cores(), "isa": executor.isa, "decode": decode, "mixed": mixed,
        "goals": goals(decode, mixed, kv, shape),
    }  # fmt: skip
    executor.close()
    return result


# Of decode at DEEP, of decode at SHALLOW: a small model reads nearly as many keys and values as weights there.
BY_SHAPE = {"llama-143m": (0.55, 0.55)}


def goals(decode: dict[str, Any], mixed: dict[str, Any], kv: str, shape: str) -> list[dict[str, Any]]:
    """What this project set out to reach."""
    goal, milestone = BY_SHAPE.get(shape, (0.8, 0.7))
    what = f"decode at {DEEP:,} as a share of decode at {SHALLOW}, KV in int8"
    depth = [judged(what, decode["share"], goal, milestone)]
    if "from_memory" in decode:
        depth.append(judged(f"{what}, both from memory", decode["from_memory"]["share"], goal, milestone))
    gaps = "p99 of a stream's gaps beside a prompt, in medians of the gaps"
    together = "a stream and a prompt together, of one after the other"
    return [
        *(depth if kv == "int8" else []),
        judged(gaps, mixed["p99_to_median_gap"], 3.0, 3.0, at_most=True),
        judged(together, mixed["total_to_one_after_the_other"], 1.1, 1.1, at_most=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contexts", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--shape", choices=[*SHAPES], default="llama-143m")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--kv-cache-dtype", choices=[*KV_CACHE_DTYPES], default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args.shape, args.precision, args.kv_cache_dtype, args.rounds, Path(temporary) / "engine")
    path = write_result(f"contexts-{args.shape}-{args.kv_cache_dtype}", result)
    print(json.dumps(result) if args.json else summary(result, path))


def summary(result: dict[str, Any], path: Path) -> str:
    d, m = result["decode"], result["mixed"]
    shallow, deep = d["tokens_per_s"].values()
    return "\n".join([
        f"{result['shape']} {result['precision']}, KV in {result['kv_cache_dtype']}, {result['threads']} threads",
        f"  decode at {SHALLOW} and {DEEP:,}   {shallow:.1f} and {deep:.1f} tok/s: {d['share']:.0%} "
        f"(by bytes {d['share_by_bytes']:.0%}, both from memory {d['from_memory']['share']:.0%})",
        f"  a stream beside a prompt   p99 of its gaps {m['p99_to_median_gap']:.2f} x their median, "
        f"{m['p99_to_median_gap_alone']:.2f} x its median alone",
        f"  both together              {m['total_to_one_after_the_other'] - 1:+.0%} of one after the other",
        f"  {path}",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
