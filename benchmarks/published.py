"""Published runs of engines and of a server, which lie beside the project, as steps and runs of the cost model."""

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from millrace.machine.devices import find_device
from millrace.size.answer.sizing import instance_of
from millrace.size.fit.device import MeasuredBatch
from millrace.size.fit.overhead import MeasuredRun
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.measured_points import read_points
from millrace.size.performance.models import PRESETS
from millrace.size.performance.roofline_cost import ModelInstance

ENGINES, SERVED = "trtllm_0_9_static_batch.csv", "nim_dli_concurrency.csv"
_MODELS = {"LLaMA v2 70B": "llama-2-70b", "LLaMA v2 7B": "llama-2-7b", "Mistral 7B": "mistral-7b"}


def engine_steps(folder: Path) -> Mapping[tuple[str, str], list[MeasuredBatch]]:
    """Of the engine table, by device and precision; engines of 8 bits keep a cache of 8 bits."""
    found: dict[tuple[str, str], list[MeasuredBatch]] = defaultdict(list)
    with (folder / ENGINES).open(newline="") as file:
        for row in csv.DictReader(file):
            precision, n_in, n_out = row["precision"], int(row["isl"]), int(row["osl"])
            instance = ModelInstance(
                PRESETS[_MODELS[row["model"]]], find_device(row["gpu"]), precision, int(row["tp"]),
                1.0 if precision == "fp8" else 2.0,
            )  # fmt: skip
            found[instance.device.name, precision].append(
                MeasuredBatch(instance, int(row["concurrency"]), n_in, n_in + n_out / 2, float(row["ttft_ms"]) / 1e3,
                     float(row["itl_ms"]) / 1e3)
            )  # fmt: skip
    return found


def served_runs(folder: Path) -> list[MeasuredRun]:
    """Of the serving table, those in their steady state; of repeated ones the first."""
    points, _ = read_points(folder / SERVED)
    found: dict[tuple[object, ...], MeasuredRun] = {}
    for point in points:
        model = PRESETS["llama-3-8b" if "8b" in point.model else "llama-3-70b"]
        precision = "fp16" if point.precision == "bf16" else point.precision
        run = MeasuredRun(
            instance_of(model, find_device(point.device), precision, point.tp),
            Lengths(int(point.input_tokens), int(point.output_tokens)), int(point.concurrency), point.rate,
            point.mean.ttft_s, point.mean.itl_s,
        )  # fmt: skip
        found.setdefault((point.model, point.device, point.precision, point.tp, run.lengths, run.concurrency), run)
    return list(found.values())
