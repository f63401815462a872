"""One command for the project's own numbers: prefill, decode at 1, 4 and 16 sequences, start-up and memory.

    python -m benchmarks --shape tinyllama-1.1b --precision w4a8

Weights are random, the shape is real. The machine's read bandwidth is measured in turns with decode, in the same
process, because shared machines change it from minute to minute. Writes every sample into
benchmarks/results/alone-SHAPE-PRECISION-TIME-COMMIT.json. Shares: decode against reading the weights once a step,
prefill against the peak of the instructions themselves.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    TILES,
    TUNE_S,
    counted,
    decode,
    load_seconds,
    pages_for,
    prefill,
    read_per_step,
    resident_bytes,
    share_of_bandwidth,
)
from benchmarks.names import named
from benchmarks.record import provenance, write_result
from benchmarks.sampling import shares
from benchmarks.shapes import SHAPES, random_source
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.tune.tuner import Tuning
from millrace.engine.artifact.engine import Engine
from millrace.engine.native.executor import NativeExecutor
from millrace.engine.roofline_probe import peak_rates
from millrace.kernels.precision import Precision
from millrace.machine.cpu import usable_cores

CONTEXT, PROMPT, NEW_TOKENS = 2048, 512, 32
AT = 128  # tokens already in the context while decoding
_INSTRUCTION = {
    "fp32": "fp32", "bf16": "bf16", "w8a8": "int8", "w4a8": "int8", "w8a16": "bf16", "w4a16": "bf16", "fp8a16": "bf16",
}  # fmt: skip


def multiply_operations(engine: Engine) -> float:
    """Operations of the matrix products of one token, without the head (it runs for sampled rows only)."""
    steps = json.loads((engine.folder / "program.json").read_text())["calls"]
    products = [s["params"] for s in steps if s["kernel"] == "matmul" and not s["params"]["rows"]]
    return float(sum(2 * p["n"] * p["k"] for p in products))


def measure(engine: Engine, precision: str, threads: int, runs: int) -> dict[str, Any]:
    executor, load_s = load_seconds(engine, pages_for(16, CONTEXT), threads)
    isa = executor.isa

    def peak_now() -> float:
        return statistics.median(peak_rates(isa, _INSTRUCTION[precision], threads))

    result: dict[str, Any] = {"isa": isa, "load_s": round(load_s, 3), "resident_bytes": resident_bytes()}
    before = peak_now()
    timing = prefill(executor, PROMPT, runs)
    rate = PROMPT / timing.median_s
    peak = max(before, peak_now()) or None  # clocks change too
    result["prefill"] = {
        "tokens": PROMPT, "tokens_per_s": round(rate, 1), "samples_s": timing.samples_s,
        "instruction_peak_per_s": peak, "share_of_peak": peak and round(rate * multiply_operations(engine) / peak, 3),
    }  # fmt: skip
    result["decode"] = decodes = [decode_at(executor, engine, n, threads, runs) for n in (1, 4, 16)]
    for entry, share in zip(decodes, counted([d["share_of_bandwidth"] for d in decodes]), strict=True):
        entry["share_of_bandwidth"] = share
    result["sampling"] = shares(executor, AT, runs)
    executor.close()
    return result


def decode_at(executor: NativeExecutor, engine: Engine, n: int, threads: int, runs: int) -> dict[str, Any]:
    timing, rates = decode(executor, n, AT, NEW_TOKENS, threads, runs)
    read = read_per_step(engine)
    share = share_of_bandwidth(timing.samples_s, rates, read * NEW_TOKENS)
    return {
        "sequences": n, "tokens_per_s": round(n * NEW_TOKENS / timing.median_s, 1), "samples_s": timing.samples_s,
        "read_bytes_per_step": read, "bandwidth_bytes_per_s": rates, "share_of_bandwidth": round(share, 3),
    }  # fmt: skip


def run(shape: str, precision: str, threads: int, runs: int, engines: Path) -> dict[str, Any]:
    folder = engines / f"{shape}-{precision}"
    build_s = None
    if not folder.exists():
        source = random_source(shape, CONTEXT)
        started = time.perf_counter()
        plan = plan_engine(source, BuildOptions(precision=precision_map(precision), tiles=TILES))
        write_engine(source, plan, folder, name=shape, tuning=Tuning(TUNE_S))
        build_s = round(time.perf_counter() - started, 1)
    engine = Engine.open(folder)
    return {
        **provenance("benchmarks"),
        "shape": shape, "precision": precision, **named(engine), "threads": threads,
        "build_with_random_weights_s": build_s, "weights_bytes": engine.manifest.cpu.weights_bytes,
        "activation_bytes": engine.manifest.cpu.activation_bytes, **measure(engine, precision, threads, runs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="llama-143m")
    parser.add_argument("--precision", choices=[p.value for p in Precision], default="w4a8")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--runs", type=int, default=5, help="samples of each measurement; the median counts")
    parser.add_argument("--engines", type=Path, help="where built engines are kept for the next time")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for shape in SHAPES if args.shape == "all" else [args.shape]:
            result = run(shape, args.precision, args.threads, args.runs, args.engines or Path(temporary))
            path = write_result(f"alone-{shape}-{args.precision}", result)
            print(json.dumps(result) if args.json else table(result, path))


def table(result: dict[str, Any], path: Path) -> str:
    p = result["prefill"]
    peak = f"{p['share_of_peak']:.0%} of peak" if p["share_of_peak"] else "no peak known"
    lines = [
        f"{result['shape']} {result['precision']}, {result['threads']} threads, {result['isa']}",
        f"  load and first step   {result['load_s']:8.2f} s      {result['resident_bytes'] / 2**20:.0f} MiB resident",
        f"  prefill {p['tokens']:5}         {p['tokens_per_s']:8.1f} tok/s  {peak}",
    ]
    for d in result["decode"]:
        rates = d["bandwidth_bytes_per_s"]
        beside = f"{min(rates) / 1e9:.0f} to {max(rates) / 1e9:.0f} GB/s read beside it"
        share = f"{d['share_of_bandwidth']:.0%} of" if d["share_of_bandwidth"] else "no share measured:"
        lines.append(f"  decode, {d['sequences']:2} sequences  {d['tokens_per_s']:8.1f} tok/s  {share} {beside}")
    most = max(result["sampling"], key=lambda s: s["sampling_s"] / s["step_s"])
    share = most["sampling_s"] / most["step_s"]
    lines.append(f"  sampling, 16 rows      {share:8.1%} of a step with {most['asked']}, less with others")
    return "\n".join([*lines, f"  {path}"])


if __name__ == "__main__":
    main()
