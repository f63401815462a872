"""The published tables beside the project, as steps and points."""

import csv
from collections import defaultdict
from collections.abc import Mapping

import pytest

from millrace.machine.devices import find_device
from millrace.size.cost import Instance
from millrace.size.fit import Step
from millrace.size.models import PRESETS
from tests.support.shared import NOT_BESIDE, SHARED

SIZING = SHARED / "data" / "sizing"
needs_tables = pytest.mark.skipif(not SIZING.is_dir(), reason=NOT_BESIDE)
MODELS = {"LLaMA v2 70B": "llama-2-70b", "LLaMA v2 7B": "llama-2-7b", "Mistral 7B": "mistral-7b"}


def engine_steps() -> Mapping[tuple[str, str], list[Step]]:
    """Of the engine table, by device and precision; engines of 8 bits keep a cache of 8 bits."""
    found: dict[tuple[str, str], list[Step]] = defaultdict(list)
    with (SIZING / "trtllm_0_9_static_batch.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            precision, n_in, n_out = row["precision"], int(row["isl"]), int(row["osl"])
            instance = Instance(
                PRESETS[MODELS[row["model"]]], find_device(row["gpu"]), precision, int(row["tp"]),
                1.0 if precision == "fp8" else 2.0,
            )  # fmt: skip
            found[instance.device.name, precision].append(
                Step(instance, int(row["concurrency"]), n_in, n_in + n_out / 2, float(row["ttft_ms"]) / 1e3,
                     float(row["itl_ms"]) / 1e3)
            )  # fmt: skip
    return found
