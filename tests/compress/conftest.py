"""The first two layers of `tiny`, calibrated on the first part of a text and judged on another.

Weights that were trained, in a model that costs little. Of the whole one there are results: benchmarks.compression.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import safetensors.numpy

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import statistics_of
from millrace.compress.calibration.calibration_pass import samples
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.measure.accuracy import Reference

TEXT = (BUNDLED / "calibration.txt").read_text()
CUT = 2 * len(TEXT) // 3


class Trained(NamedTuple):
    """reference: of the part that nothing was fitted to"""

    checkpoint: Checkpoint
    source: Source
    statistics: CalibrationStatistics
    reference: Reference


def first_layers(folder: Path, n: int) -> Checkpoint:
    """Of `tiny`, which stops behind them and goes to its head."""
    tiny = BUNDLED / "tiny"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": n}))
    held = safetensors.numpy.load_file(tiny / "model.safetensors")
    later = tuple(f"model.layers.{i}." for i in range(n, config["num_hidden_layers"]))
    kept = {name: array for name, array in held.items() if not name.startswith(later)}
    safetensors.numpy.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return Checkpoint.open(folder)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    checkpoint = first_layers(folder / "m", 2)
    text, held_out = (
        samples(checkpoint.tokenizer, TEXT[:CUT], 16, 128),
        samples(checkpoint.tokenizer, TEXT[CUT:], 4, 128),
    )
    found = statistics_of(checkpoint, text, folder / "s", lambda *_: None)
    reference = Reference.from_checkpoint(checkpoint, held_out)
    return Trained(checkpoint, reference.source, found, reference)
