"""What is predicted of our server under loads, beside what it does: step times fitted in turns with the loads.

    python -m benchmarks.truth --shape llama-143m
    python -m benchmarks.truth --model SmolLM2-135M-Instruct.Q4_1.gguf

Builds an engine, serves it on loopback and runs `millrace size verify`: TTFT up to 0.8 of the predicted capacity,
throughput and time between tokens up to 0.95, are to be within 10 % in the median, and nine of ten within 25 %. Writes
results/truth-MODEL-TIME-COMMIT.json, whatever is reached.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import write_checkpoint
from benchmarks.names import named
from benchmarks.record import judged, provenance, write_result
from benchmarks.shapes import SHAPES
from benchmarks.start import timed
from millrace.bench.run.server_process import ServerProcess
from millrace.cli.size.verify import verified_to_dict
from millrace.engine.artifact.engine import Engine
from millrace.size.fit.verify import MEDIAN, P90, verify
from millrace.size.question.settings import VerifySettings


def run(name: str, model: Path, folder: Path, asked: VerifySettings, precision: str | None) -> dict[str, Any]:
    """model: a checkpoint, or an engine that is built already"""
    built = model
    if not (model / "manifest.json").is_file():
        built = folder / "engine"
        timed("build", model, "-o", built, *(("--precision", precision) if precision else ()))
    with ServerProcess(built, ("--log-level", "warning")) as server:
        found = asyncio.run(verify(server.url, asked))
    return {
        **provenance("benchmarks.truth"), **named(Engine.open(built)),
        "asked_of_server": {"isl": asked.isl, "osl": asked.osl, "rounds": asked.rounds, "each_s": asked.each_s,
                            "probe_s": asked.probe_s, "loads": list(asked.shares)},
        **verified_to_dict(found), "model": name,
        "goals": [
            judged("median error of the figures that are judged", found.median, MEDIAN, MEDIAN, at_most=True),
            judged("error that nine of ten of them keep", found.p90, P90, P90, at_most=True),
        ],
    }  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}: {result['figures_judged']} figures"]
    lines += [f"  {g['what']}: {g['reached']:.1%}, at most {g['goal']:.0%}: {g['verdict']}" for g in result["goals"]]
    for load in result["loads"]:
        errors = ", ".join(f"{f['name']} {f['of']} {f['error']:+.1%}" for f in load["figures"])
        lines.append(f"  {load['share']:g} of capacity, {load['requests']} requests: {errors}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.truth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES], default="llama-143m", help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="a checkpoint, a GGUF file or an engine, in place of a shape")
    parser.add_argument("--precision", help="default: w4a8 of a shape, and what a file has")
    parser.add_argument("--isl", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--osl", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--loads", default="0.2,0.4,0.6,0.8,0.95", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--each-s", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--probe-s", type=float, default=2.0, help="default: %(default)s")
    args = parser.parse_args()
    asked = VerifySettings(
        isl=args.isl, osl=args.osl, loads=args.loads, rounds=args.rounds, each_s=args.each_s, probe_s=args.probe_s
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder, name = Path(temporary), args.model.name if args.model else args.shape
        if args.model is None:
            write_checkpoint(args.shape, folder / "checkpoint")
        model = args.model or folder / "checkpoint"
        result = run(name, model, folder, asked, args.precision or (None if args.model else "w4a8"))
    path = write_result(f"truth-{name}", result)
    print(f"{summary(result)}\n{path.name}")


if __name__ == "__main__":
    main()
