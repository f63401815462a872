"""What compressing costs in right answers: each recipe's folder beside its source in bfloat16, question by question.

    python -m benchmarks.scores --model SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.txt --data FOLDER --kept FOLDER
    python -m benchmarks.scores --model tiny

A checkpoint of its own answers MMLU (--data: dev/ and test/; with --limit the first questions of each subject), by
statistics of the first half of --text, as benchmarks.compression has them. `tiny` answers exams of its generator that
it was not trained on. All is asked with `millrace eval`, whose answers lie in --kept: a run that was ended goes on.
Writes results/scores-MODEL-TIME-COMMIT.json; docs/compress.md has its table: benchmarks.losses.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compression import WINDOWS, SearchWindows, of_a_text, of_the_world
from benchmarks.record import count, provenance, write_result
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import by_statistics
from millrace.compress.calibration.calibration_pass import collect
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.compress import by_rounding, compress
from millrace.compress.compression_plan import plan_compression
from millrace.compress.presets import SAMPLES
from millrace.compress.recipe import PRESETS

BASE = "bf16"
RECIPES = ("int8-wo", "int8-sq", "fp8", "fp8-gptq", "int4-wo", "int4-gptq", "int4-gptq-clip", "int4-awq")
_EXAMS, _FIRST_EXAM = 2000, 200_000  # beyond those that losses are judged on
_KEPT = ("task", "precision", "questions", "right", "share", "interval", "cut", "against")


def exams(path: Path, n: int = _EXAMS) -> Path:
    """Of the generator of `tiny`, as `millrace eval --task FILE` reads them."""
    from tools.tiny.world import held_out_exam

    with path.open("w") as file:
        for exam in map(held_out_exam, range(_FIRST_EXAM, _FIRST_EXAM + n)):
            line = {"prompt": exam.prompt, "choices": list("ABCD"), "answer": exam.choice.right}
            file.write(json.dumps(line) + "\n")
    return path


def asked(model: Path, task: Sequence[str], kept: Path, name: str, more: Sequence[str]) -> dict[str, Any]:
    """What `millrace eval` tells of it; its answers are in kept/NAME.jsonl."""
    command = [sys.executable, "-m", "millrace", "eval", str(model), *task, "--out", str(kept / f"{name}.jsonl"),
               "--json", *more]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": str(kept)})
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    told = json.loads(done.stdout)
    return {key: told[key] for key in _KEPT if key in told}


def made(checkpoint: Checkpoint, name: str, statistics: CalibrationStatistics, kept: Path) -> Path:
    """The recipe's folder."""
    out = kept / "made" / name
    if not out.exists():
        job = plan_compression(checkpoint, PRESETS[name])
        compress(job, out, by_statistics(statistics) if job.calibrated else by_rounding)
    return out


def run(args: argparse.Namespace) -> dict[str, Any]:
    kept: Path = args.kept
    kept.mkdir(parents=True, exist_ok=True)
    model = BUNDLED / "tiny" if args.model == "tiny" else Path(args.model)
    checkpoint = Checkpoint.open(model)
    texts: SearchWindows = (
        of_the_world(checkpoint) if args.text is None else of_a_text(checkpoint, args.text, SAMPLES, WINDOWS)
    )
    if args.data is None:
        task = ["--task", str(exams(kept / "exams.jsonl"))]
    else:
        task = ["--data", str(args.data), *(["--limit", str(args.limit)] if args.limit else [])]
    statistics = collect(Source.from_checkpoint(checkpoint), texts.calibration, kept / "statistics")
    runs = {BASE: asked(model, task, kept, BASE, ["--precision", "bf16", "--no-evaluate"])}
    for name in args.recipes:
        folder = made(checkpoint, name, statistics, kept)
        runs[name] = asked(folder, task, kept, name, ["--against", str(kept / f"{BASE}.jsonl")])
        shutil.rmtree(folder)
        print(f"{name}: {runs[name]['share']:.2%}", file=sys.stderr, flush=True)
    return {**provenance("benchmarks.scores"), "model": checkpoint.folder.stem, "limit": args.limit, "runs": runs}


def scores(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): right answers, and what is lost of the source's share of them; intervals of 95 %."""
    base, rows = result["runs"][BASE], []
    for name, one in result["runs"].items():
        low, high = one["interval"]
        row = [name, one["precision"].removeprefix("default "), f"{one['share']:.2%} ({low:.1%} to {high:.1%})"]
        beside = one.get("against")
        if beside is None:
            rows.append([*row, "", "", ""])
            continue
        least, most = (-end / base["share"] for end in reversed(beside["interval"]))
        loss = f"{0.0 - beside['difference'] / base['share']:+.2%} ({least:+.2%} to {most:+.2%})"
        flips = f"{beside['gained']:,} / {beside['lost']:,}"
        rows.append([*row, loss, flips, f"{beside['p_value']:.2g}"])
    return ["recipe", "runs in", "right", "loss of it", "became right / wrong", "p (McNemar)"], rows


def about(result: Mapping[str, Any]) -> str:
    base = result["runs"][BASE]
    return f"{base['questions']:,} questions ({base['task']})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scores", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help='"tiny", or a checkpoint with --text and --data')
    parser.add_argument("--text", type=Path, help="a text in UTF-8")
    parser.add_argument("--data", type=Path, help="the folder of MMLU's files")
    parser.add_argument("--limit", type=count, help="only the first questions of each subject")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="NAME", help="default: all")
    parser.add_argument("--kept", type=Path, help="folder of what was answered before; default: one that is gone after")
    args = parser.parse_args()
    if len({args.model == "tiny", args.text is None, args.data is None}) > 1:
        parser.error("--text and --data go with a --model of your own")
    with tempfile.TemporaryDirectory() as temporary:
        args.kept = args.kept or Path(temporary)
        result = run(args)
    print(write_result(f"scores-{result['model']}", result))


if __name__ == "__main__":
    main()
