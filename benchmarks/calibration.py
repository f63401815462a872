"""What the one pass over calibration text takes: seconds and memory of Gram matrices for all linear layers.

    python -m benchmarks.calibration --model SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.txt
    python -m benchmarks.calibration --shape tinyllama-1.1b --layers 2

128 samples of 512 tokens, in float32. Of a shape the weights and the tokens are random, which
costs the same; with --layers fewer of them are made, and seconds are given for all, by layers. Writes
results/calibration-NAME-TIME-COMMIT.json.
"""

import argparse
import json
import math
import resource
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import shapes
from benchmarks.record import count, judged, provenance, write_result
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.source import Source
from millrace.compress.calibration.calibration_pass import collect, samples
from millrace.compress.presets import SAMPLES
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_windows import Windows
from millrace.kernels.precision import Precision
from millrace.machine.cpu import usable_cores

GOAL_S = {"llama-143m": 240.0, "tinyllama-1.1b": 1800.0}  # of 128 samples, by shape
GOAL_BYTES = 2 << 30  # at most in memory, beside the weights


def of_model(path: Path, text: Path, n: int) -> tuple[Source, Windows]:
    checkpoint = Checkpoint.open(path)
    return Source.from_checkpoint(checkpoint), samples(checkpoint.tokenizer, text.read_text(), n)


def of_shape(shape: str, layers: int | None, n: int) -> tuple[Source, Windows]:
    config = shapes.SHAPES[shape]
    shapes.SHAPES["cut"] = replace(config, n_layers=layers or config.n_layers)
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (n, LENGTH), dtype=np.int32)
    return replace(shapes.random_source("cut", LENGTH), vocab_size=config.vocab_size), Windows(ids, 0)


def timed(source: Source, text: Windows, precision: Precision) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        collect(source, text, Path(folder) / "statistics", precision=precision)
        seconds = time.perf_counter() - started_s
        kept = sum(file.stat().st_size for file in (Path(folder) / "statistics").iterdir())
    return {"seconds": round(seconds, 1), "bytes_kept": kept,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.model:
        source, text = of_model(args.model, args.text, args.samples)
        name, share = args.model.stem, 1.0
    else:
        source, text = of_shape(args.shape, args.layers, args.samples)
        name, share = args.shape, shapes.SHAPES["cut"].n_layers / shapes.SHAPES[args.shape].n_layers
    runs = {str(p): timed(source, text, p) for p in args.precisions}
    for one in runs.values():
        one["seconds_of_all"] = round(one["seconds"] / share * SAMPLES / args.samples, 1)
    return {
        **provenance("benchmarks.calibration"), "model": name, "samples": args.samples, "tokens_each": LENGTH,
        "threads": usable_cores(), "share_of_layers": round(share, 4), "weights_bytes": weights_bytes(source),
        "runs": runs, "goals": goals(runs, GOAL_S[args.shape], weights_bytes(source)),
    }  # fmt: skip


def weights_bytes(source: Source) -> int:
    """Of what was read, in 16 bits each, as checkpoints of floats have them."""
    return 2 * sum(math.prod(shape) for shape in source.weights.shapes.values())


def goals(runs: Mapping[str, Mapping[str, Any]], bound_s: float, weights: int) -> list[dict[str, Any]]:
    """Of the slowest, and of the largest: memory is the whole process's."""
    seconds = max(one["seconds_of_all"] for one in runs.values())
    memory = max(one["peak_bytes"] for one in runs.values()) - weights
    most = GOAL_BYTES / 2**30
    return [
        judged("statistics of 128 samples of 512 tokens, s", seconds, bound_s, bound_s, at_most=True),
        judged("the same: memory at most beside the weights, GiB", memory / 2**30, most, most, at_most=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a checkpoint, with --text")
    parser.add_argument("--text", type=Path, help="calibration text in UTF-8")
    parser.add_argument(
        "--shape", choices=[*GOAL_S], default="llama-143m", help="without --model; and whose bound it is"
    )
    parser.add_argument("--layers", type=count, help="of a shape, to be scaled to all; default: all")
    parser.add_argument("--samples", type=count, default=SAMPLES, help="default: %(default)s")
    parser.add_argument("--precisions", nargs="+", type=Precision, choices=[Precision.FP32, Precision.BF16],
                        default=[Precision.FP32], help="in which the model reads; default: fp32")  # fmt: skip
    args = parser.parse_args()
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text go together")
    result = run(args)
    print(summary(result, write_result(f"calibration-{result['model']}", result)))


def summary(result: Mapping[str, Any], path: Path) -> str:
    rows = [
        f"  {precision:5} {one['seconds_of_all']:8.1f} s, {one['peak_bytes'] / 2**30:.2f} GiB at most, "
        f"{one['bytes_kept'] / 2**30:.2f} GiB kept" for precision, one in result["runs"].items()
    ]  # fmt: skip
    return "\n".join(
        [f"{result['model']}, {result['samples']} samples", *rows, json.dumps(result["goals"]), f"  {path}"]
    )


if __name__ == "__main__":
    main()
