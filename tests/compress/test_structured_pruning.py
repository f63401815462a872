"""Pruning: scores beside plain loops, smaller models beside the large one with what goes set to zero; and mistakes."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions
from millrace.compile.precision import PrecisionMap
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import by_statistics, statistics_of
from millrace.compress.calibration.calibration_pass import samples
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.compress import compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure.accuracy import Reference
from millrace.compress.methods.structured_pruning import Prune, channels_kept, heads_kept, shapes, sizes
from millrace.compress.recipe import parsed, to_dict
from millrace.engine.cache_specs import KvFormat
from millrace.errors import CheckpointError, ConfigError
from millrace.kernels.precision import Precision
from tests.fuzz.originals import write_checkpoint

TEXT = (BUNDLED / "calibration.txt").read_text()
LAYER, SIZE, HEADS, KV_HEADS = "model.layers.0.", 16, 4, 2


class Small(NamedTuple):
    checkpoint: Checkpoint
    statistics: CalibrationStatistics

    def plan(self, **prune: float) -> CompressionPlan:
        return plan_compression(self.checkpoint, parsed({"version": 1, "method": "none", "prune": prune}, "mine"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    checkpoint = Checkpoint.open(write_checkpoint(folder / "c", width=64, inner=100))
    text = samples(checkpoint.tokenizer, TEXT, 4, 64)
    return Small(checkpoint, statistics_of(checkpoint, text, folder / "s", lambda *_: None))


def test_channels_and_heads_that_carry_most_stay(small: Small) -> None:
    mean = np.array([3, 1, 4, 1.5, 9, 2, 6, 5], np.float32)
    assert channels_kept(mean, 3).tolist() == [4, 6, 7]
    of_heads = np.zeros((HEADS, SIZE), np.float32)
    of_heads[0], of_heads[1, 3], of_heads[2], of_heads[3, 5] = 1, 5, 2, 7  # lengths 4, 5; 8, 7
    kept = heads_kept(of_heads.reshape(-1), small.checkpoint.decoder, 1)
    assert kept.tolist() == [*range(16, 32), *range(32, 48)], "one of each pair that shares keys and values"


def test_a_smaller_model_is_the_large_one_without_what_went(small: Small, tmp_path: Path) -> None:
    """Its logits are those of the large one, where what went is zero: channels' rows of up_proj, heads' columns of
    o_proj. What goes is found here by plain loops over the statistics."""
    plan = small.plan(mlp=0.4, heads=0.5)
    assert plan.calibrated and not plan.layers and "trained again" in plan.notes[-1]
    made = compress(plan, tmp_path / "out", by_statistics(small.statistics))
    found = Checkpoint.open(tmp_path / "out")
    assert (found.decoder.intermediate_size, found.decoder.n_heads, found.decoder.n_kv_heads) == (64, 2, 2)
    assert found.decoder.head_dim == SIZE and found.tensors.nbytes == plan.bytes_after < plan.bytes_before
    reads_mlp, reads_heads = (small.statistics[LAYER + n].mean for n in ("mlp.down_proj", "self_attn.o_proj"))
    gone = sorted(range(100), key=lambda i: reads_mlp[i])[:36]
    lengths = [float(np.linalg.norm(reads_heads[h * SIZE : (h + 1) * SIZE])) for h in range(HEADS)]
    dropped = [min((0, 1), key=lambda h: lengths[h]), min((2, 3), key=lambda h: lengths[h])]
    module = small.checkpoint.tensors
    without = {name: module.load(name).copy() for name in module}
    without[f"{LAYER}mlp.up_proj.weight"][gone] = 0
    for head in dropped:
        without[f"{LAYER}self_attn.o_proj.weight"][:, head * SIZE : (head + 1) * SIZE] = 0
    held = small.checkpoint.folder.parent / "without"
    write_without(small.checkpoint, held, without)
    text = samples(small.checkpoint.tokenizer, TEXT, 2, 48)
    exact = BuildOptions(precision=PrecisionMap(Precision.FP32), kv_format=KvFormat.F32)
    score = Reference.from_checkpoint(Checkpoint.open(held), text).compare_with(Source.from_checkpoint(found), exact)
    assert abs(score.mean_kl) < 1e-7 and np.abs(score.tokens.loss - score.tokens.reference_loss).max() < 1e-4
    w, x = module.load(f"{LAYER}mlp.down_proj.weight").astype(np.float64), small.statistics[f"{LAYER}mlp.down_proj"]
    off = np.zeros_like(w)
    off[:, gone] = w[:, gone]
    share = np.trace(off @ x.gram @ off.T) / np.trace(w @ x.gram @ w.T)
    assert made.errors[f"{LAYER}mlp.down_proj"] == pytest.approx(share, rel=1e-4)
    assert set(made.errors) == {f"{LAYER}mlp.down_proj", f"{LAYER}self_attn.o_proj"}


def write_without(checkpoint: Checkpoint, folder: Path, tensors: dict[str, Any]) -> None:
    shutil.copytree(checkpoint.folder, folder)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def test_one_alone(small: Small, tmp_path: Path) -> None:
    compress(small.plan(heads=0.5), tmp_path / "out", by_statistics(small.statistics))
    found = Checkpoint.open(tmp_path / "out")
    assert (found.decoder.intermediate_size, found.decoder.n_heads) == (100, 2)
    name = f"{LAYER}mlp.up_proj.weight"
    np.testing.assert_array_equal(found.tensors.load(name), small.checkpoint.tensors.load(name))


def test_recipes_and_shares(small: Small) -> None:
    recipe = parsed({"version": 1, "method": "none", "prune": {"mlp": 0.25}}, "mine")
    assert recipe.prune == Prune(mlp=0.25) and parsed(to_dict(recipe), "mine") == recipe
    config = small.checkpoint.decoder
    assert sizes(config, Prune(mlp=0.05)).channels == 96 and sizes(config, Prune(mlp=0.99)).channels == 32
    for prune, says in (({"mlp": 1.0}, "prune.mlp is 1.0"), ({"width": 0.1}, "prune is"), ({}, "prune is {}"),
                        ({"heads": True}, "prune.heads is True")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            parsed({"version": 1, "method": "none", "prune": prune}, "mine")
    with pytest.raises(ConfigError, match="prunes and rounds"):
        parsed({"version": 1, "method": "gptq", "prune": {"mlp": 0.25}}, "mine")
    with pytest.raises(ConfigError, match=r"prune.heads of 0.2 leaves all"):
        small.plan(heads=0.2)


def test_a_model_without_such_layers(small: Small, tmp_path: Path) -> None:
    every = {n: i.shape for n, i in small.checkpoint.tensors.items() if "gate_proj" not in n}
    with pytest.raises(CheckpointError, match=r"no model.layers.0.mlp.gate_proj"):
        shapes(every, small.checkpoint.decoder, sizes(small.checkpoint.decoder, Prune(mlp=0.4)))
