"""What all questions of MMLU take with `millrace eval`, from its start to its end, in each precision.

    python -m benchmarks.mmlu --model SmolLM2-135M-Instruct.Q4_1.gguf --data FOLDER

FOLDER holds dev/ and test/. One command after the other, each with engines and answers of its own that nothing was
kept in before; the first precision is what the others are compared with, question by question. With --limit
the first questions of each subject, and no verdict. Writes results/mmlu-NAME-TIME-COMMIT.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import count, judged, provenance, write_result

BOUND_S = {"bf16": 45 * 60.0, "w8a8": 25 * 60.0}  # of 14,042 questions to 135M parameters on two cores
N_QUESTIONS = 14_042


def answered(
    args: argparse.Namespace, precision: str, folder: Path, against: Path | None
) -> tuple[dict[str, Any], Path]:
    """How one command went, and its answers."""
    out = folder / f"{precision}.jsonl"
    command = [sys.executable, "-m", "millrace", "eval", str(args.model), "--task", "mmlu", "--data", str(args.data),
               "--precision", precision, "--no-evaluate", "--out", str(out), "--json"]  # fmt: skip
    command += ["--limit", str(args.limit)] if args.limit else []
    command += ["--against", str(against)] if against else []
    started_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": str(folder)})
    seconds = time.perf_counter() - started_s
    if done.returncode:
        sys.exit(f"millrace eval --precision {precision}: {done.stderr}")
    told = json.loads(done.stdout)
    kept = ("precision", "task", "questions", "right", "share", "interval", "cut", "against")
    figures = {name: told[name] for name in kept if name in told}
    return {"seconds": round(seconds, 1), **figures}, out


def run(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, Any] = {}
    first: Path | None = None
    with tempfile.TemporaryDirectory() as folder:
        for precision in args.precisions:
            print(f"{precision} ...", file=sys.stderr)
            runs[precision], out = answered(args, precision, Path(folder), first)
            first = first or out
    goals = [
        judged(f"all of MMLU in {name}, s", one["seconds"], BOUND_S[name], BOUND_S[name], at_most=True)
        for name, one in runs.items()
        if name in BOUND_S and one["questions"] == N_QUESTIONS
    ]
    return {
        **provenance("benchmarks.mmlu"),
        "model": args.model.stem,
        "limit": args.limit,
        "runs": runs,
        "goals": goals,
    }


def summary(result: Mapping[str, Any], path: Path) -> str:
    rows = [
        f"  {name:5} {one['seconds']:8.1f} s, {one['questions']:,} questions, {one['share']:.2%} right"
        for name, one in result["runs"].items()
    ]
    return "\n".join([result["model"], *rows, json.dumps(result["goals"]), f"  {path}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mmlu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of 135M parameters")
    parser.add_argument("--data", type=Path, required=True, help="the folder of MMLU's files")
    parser.add_argument("--limit", type=count, help="only the first questions of each subject")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "w8a8"], help="default: bf16 w8a8")
    args = parser.parse_args()
    result = run(args)
    print(summary(result, write_result(f"mmlu-{result['model']}", result)))


if __name__ == "__main__":
    main()
