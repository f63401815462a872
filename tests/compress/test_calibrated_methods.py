"""Recipes with statistics: what each means, what is written, what is left alone, and what it costs in answers."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.weights.safetensors import Tensors
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import by_statistics, method_of, needs, sampled, statistics_of
from millrace.compress.calibration.calibration_pass import samples
from millrace.compress.calibration.layerwise_rounding import Method, rounded_layers
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.compress import compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure.accuracy import loss_of, memory_bytes
from millrace.compress.methods.awq_smoothquant import Awq, SmoothQuant
from millrace.compress.methods.e4m3 import rounded_e4m3
from millrace.compress.methods.gptq import Gptq, gptq_e4m3
from millrace.compress.methods.quantization_grid import Grid, RangeConvention, rounded
from millrace.compress.recipe import PRESETS, parsed
from millrace.errors import CheckpointError, ConfigError
from millrace.evaluate.text_windows import Windows
from tests.compress.conftest import TEXT, Trained
from tests.fuzz.originals import write_checkpoint

_MADE = """
import sys
from pathlib import Path
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compress.calibration.calibrated_methods import by_statistics
from millrace.compress.compress import compress
from millrace.compress.compression_plan import plan_compression
from millrace.compress.recipe import PRESETS
from millrace.compress.calibration.statistics import CalibrationStatistics
source, statistics, out, name = sys.argv[1:]
plan = plan_compression(Checkpoint.open(Path(source)), PRESETS[name])
compress(plan, Path(out), by_statistics(CalibrationStatistics.open(Path(statistics))))
print(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024)
"""
_MEASURED = """
import sys
from pathlib import Path
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compress.measure.accuracy import measure, windows_for
from millrace.evaluate.calibration import Calibration
source, made = (Checkpoint.open(Path(name)) for name in sys.argv[1:])
measure(source, made, windows_for(source, Calibration.open(None)), lambda *_: None)
# of its own memory: ru_maxrss counts that of the process that started it, too
print(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024)
"""


class Small(NamedTuple):
    """Random: 256 inputs, and 192 and 64, which groups of 128 do not divide."""

    checkpoint: Checkpoint
    statistics: CalibrationStatistics

    def plan(self, **said: Any) -> CompressionPlan:
        return plan_compression(self.checkpoint, parsed({"version": 1, **said}, "mine"))

    def made(self, plan: CompressionPlan, out: Path) -> Tensors:
        compress(plan, out, by_statistics(self.statistics))
        return Checkpoint.open(out).tensors


def nothing(*_: object) -> None: ...


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    checkpoint = Checkpoint.open(write_checkpoint(folder / "c", width=256, inner=192))
    text = samples(checkpoint.tokenizer, TEXT, 4, 128)
    return Small(checkpoint, statistics_of(checkpoint, text, folder / "s", nothing))


MEANT = {
    "int4-gptq": Method(grid=Grid(4, 64), gptq=Gptq(0.01, order=True)),
    "int4-gptq-clip": Method(grid=Grid(4, 64), clip=True, gptq=Gptq(0.01, order=True)),
    "int4-awq": Method(grid=Grid(4, 64), smooth=Awq(tuple(i / 20 for i in range(20)), duo=True), clip=True),
    "w4afp8-awq": Method(grid=Grid(4, 64), smooth=Awq(tuple(i / 20 for i in range(20)), duo=True), clip=True),
    "int8-sq": Method(grid=Grid(8, 0, False, RangeConvention.MODEL_OPTIMIZER),
                      smooth=SmoothQuant(0.5, linears=True, rms=True), gptq=Gptq(0.01, order=True)),
}  # fmt: skip


def test_presets_mean_methods() -> None:
    for name, method in MEANT.items():
        usual = PRESETS[name].usual
        assert usual.calibrated and method_of(usual, usual.group and 64) == method
    assert {name for name, recipe in PRESETS.items() if recipe.usual.calibrated} == {*MEANT, "fp8-gptq"}
    for name in ("fp8", "fp8-tensor", "fp8-gptq"):
        assert method_of(PRESETS[name].usual, 0) is None, "no grid of integers"


def test_fp8_by_gptq_is_written_as_it_is_made(small: Small, tmp_path: Path) -> None:
    """Every layer by itself; nothing else moves."""
    tensors = small.checkpoint.tensors
    made = small.made(plan_compression(small.checkpoint, PRESETS["fp8-gptq"]), tmp_path / "out")
    for tensor in tensors:
        exact, linear = tensors.load(tensor), tensor.removesuffix(".weight")
        if linear in small.statistics:
            matrix, _ = gptq_e4m3(exact, small.statistics[linear].gram)
            exact = matrix.dequantise().astype(np.float32)
        np.testing.assert_array_equal(made.load(tensor), exact, err_msg=tensor)


@pytest.mark.parametrize("name", MEANT)
def test_what_is_written_is_what_the_method_makes(small: Small, tmp_path: Path, name: str) -> None:
    """With a grid for each layer: groups of 128 where they divide its inputs, else of 64."""
    tensors = small.checkpoint.tensors
    made = small.made(plan_compression(small.checkpoint, PRESETS[name]), tmp_path / "out")

    def method(linear: str) -> Method:
        usual, K = PRESETS[name].usual, tensors[f"{linear}.weight"].shape[1]
        found = method_of(usual, usual.group and (128 if K % 128 == 0 else 64))
        assert found is not None
        return found

    shapes = {n: info.shape for n, info in tensors.items()}
    (layer,) = rounded_layers(tensors.load, shapes, small.statistics, method, 16)
    assert len(layer.matrices) == 7
    wanted = {f"{n}.weight": r.matrix.dequantise().astype(np.float32) for n, r in layer.matrices.items()}
    for tensor in tensors:
        exact = wanted[tensor] if tensor in wanted else layer.floats.get(tensor, tensors.load(tensor))
        np.testing.assert_array_equal(made.load(tensor), exact, err_msg=tensor)
    assert bool(layer.folds) == (PRESETS[name].usual.smooth != "none")
    assert bool(layer.floats) == any(fold.site.is_norm for fold in layer.folds), "norms that took up scales"


def test_a_mix_with_what_needs_no_statistics(small: Small, tmp_path: Path) -> None:
    """A layer left alone keeps its bits, and scales stay where one takes part that is not rounded here."""
    tensors, o_proj, v_proj = (
        small.checkpoint.tensors,
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.self_attn.v_proj",
    )
    layers = [
        {"match": "*.o_proj", "method": "none"}, {"match": "*.v_proj", "method": "fp8"},
        {"match": "lm_head", "method": "rtn", "smooth": "none", "search": "none", "bits": 8, "group": "row"},
    ]  # fmt: skip
    made = small.made(small.plan(method="gptq", smooth="awq", search="clip", layers=layers), tmp_path / "out")
    for kept in (f"{o_proj}.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight"):
        np.testing.assert_array_equal(made.load(kept), tensors.load(kept), err_msg=kept)
    exact = rounded_e4m3(tensors.load(f"{v_proj}.weight")).dequantise()
    np.testing.assert_array_equal(made.load(f"{v_proj}.weight"), exact)
    head = rounded(tensors.load("lm_head.weight"), Grid(8, 0)).dequantise()
    np.testing.assert_array_equal(made.load("lm_head.weight"), head.astype(np.float32))
    assert made["model.layers.0.self_attn.q_proj.weight"].dtype == "int4"


def test_statistics_save_answers(trained: Trained, tmp_path: Path) -> None:
    """As published: GPTQ before rounding to nearest, 8 bits before 4."""
    kl = {}
    for name in ("int4-wo", "int4-gptq", "int4-awq", "int8-sq"):
        made = compress(
            plan_compression(trained.checkpoint, PRESETS[name]), tmp_path / name, by_statistics(trained.statistics)
        )
        kl[name] = loss_of(trained.reference, Checkpoint.open(made.folder)).kl
    assert kl["int4-gptq"] < 0.8 * kl["int4-wo"] and kl["int4-awq"] < 0.9 * kl["int4-wo"], kl
    assert kl["int8-sq"] < 0.2 * min(kl["int4-gptq"], kl["int4-awq"]), kl


def test_statistics_that_are_there_need_no_text(small: Small, trained: Trained, tmp_path: Path) -> None:
    text = samples(small.checkpoint.tokenizer, TEXT, 2, 32)
    collected = statistics_of(small.checkpoint, text, tmp_path, nothing)
    again = statistics_of(small.checkpoint, None, tmp_path, nothing)
    assert set(again) == set(collected) and again.about == collected.about
    with pytest.raises(ConfigError, match="are of another model"):
        statistics_of(trained.checkpoint, None, tmp_path, nothing)
    with pytest.raises(ConfigError, match="no statistics yet"):
        statistics_of(trained.checkpoint, None, tmp_path / "none", nothing)


def test_what_a_pass_needs(small: Small) -> None:
    """The folder's size is that of its numbers; ten times the tokens take ten times as long."""
    about = needs(plan_compression(small.checkpoint, PRESETS["int4-gptq"]), 1000)
    inputs = {small.statistics[name].linears: small.statistics[name] for name in small.statistics}
    assert about.disk_bytes == sum(x.gram.nbytes + x.amax.nbytes + x.mean.nbytes for x in inputs.values())
    more = needs(plan_compression(small.checkpoint, PRESETS["int4-gptq"]), 10_000)
    assert more.seconds == pytest.approx(10 * about.seconds) and more.memory_bytes == about.memory_bytes > 0


def test_what_statistics_are_not_for(small: Small, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"treats lm_head by statistics.*\n?.*") as error:
        small.plan(method="gptq", layers=[{"match": "lm_head", "bits": 8}])
    assert 'method = "rtn"' in error.value.fix
    plan = small.plan(method="gptq")
    treatment = plan.layers["model.layers.0.mlp.up_proj"]
    unread = plan_compression(small.checkpoint, PRESETS["int4-gptq"])
    object.__setattr__(unread, "layers", {**unread.layers, "model.layers.0.mlp.extra": treatment})
    with pytest.raises(CheckpointError, match=r"does not read model.layers.0.mlp.extra"):
        next(by_statistics(small.statistics)(unread))
    (tmp_path / "short.txt").write_text("a mill")
    with pytest.raises(ConfigError, match="the text for statistics has"):
        sampled(small.checkpoint, str(tmp_path / "short.txt"), 2)
    whole = tmp_path / "whole.txt"
    whole.write_text(TEXT)
    context = Source.from_checkpoint(small.checkpoint).max_context
    assert sampled(small.checkpoint, str(whole), 2).ids.shape == (2, min(512, context))


def test_norms_that_add_one(tmp_path: Path) -> None:
    """Gemma multiplies with 1 + weight: that times what columns were multiplied by is what it was."""
    folder = write_checkpoint(tmp_path)
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
    config = json.loads((folder / "config.json").read_text()) | gemma
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.decoder.family == "gemma"
    text = Windows(np.random.default_rng(1).integers(3, checkpoint.decoder.vocab_size, (2, 40)).astype(np.int32), 0)
    found = statistics_of(checkpoint, text, tmp_path / "s", nothing)
    recipe = parsed({"version": 1, "bits": 8, "group": "row", "activations": 8, "smooth": "smoothquant"}, "mine")
    compress(plan_compression(checkpoint, recipe), tmp_path / "out", by_statistics(found))
    old, new = checkpoint.tensors, Checkpoint.open(tmp_path / "out").tensors
    norm, linear = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    w, scaled = (t.load(linear).astype(np.float64) for t in (old, new))
    factors = (scaled * w).sum(axis=0) / (w * w).sum(axis=0)
    before, after = (1 + t.load(norm).astype(np.float64) for t in (old, new))
    assert factors.max() > 1.5 * factors.min(), "scales moved"
    assert after * factors == pytest.approx(before, rel=0.01)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A layer as wide as those of real models, in which Gram matrices are what memory is about."""
    folder = tmp_path_factory.mktemp("wide")
    checkpoint = Checkpoint.open(write_checkpoint(folder / "c", width=1024, inner=2816))
    text = samples(checkpoint.tokenizer, TEXT, 2, 64)
    return Small(checkpoint, statistics_of(checkpoint, text, folder / "s", nothing))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["int4-wo", "int4-gptq", "int4-awq", "fp8-gptq", "int8-sq"])
def test_what_rounding_holds_is_told_before(wide: Small, tmp_path: Path, name: str) -> None:
    """Of the process that rounds, alone: not less than half of what was said, nor twice as much."""
    folder = wide.checkpoint.folder
    command = [sys.executable, "-c", _MADE, str(folder), str(folder.parent / "s"), str(tmp_path / "out"), name]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    said = plan_compression(wide.checkpoint, PRESETS[name]).memory_bytes
    assert 0.5 < said / peak < 2, (said, peak)


@pytest.mark.timing
@pytest.mark.parametrize("name", ["int4-wo-mse", "int4-gptq", "int4-gptq-clip", "int4-awq", "fp8-gptq", "int8-sq"])
def test_what_rounding_takes_is_told_before(tmp_path: Path, name: str) -> None:
    """The faster of two runs, on two idle cores: not less than half of what was said, nor twice as much."""
    checkpoint = Checkpoint.open(BUNDLED / "tiny")
    held = statistics_of(checkpoint, samples(checkpoint.tokenizer, TEXT, 4, 128), tmp_path / "s", nothing)
    plan, taken = plan_compression(checkpoint, PRESETS[name]), []
    for run in range(2):
        started_s = time.perf_counter()
        compress(plan, tmp_path / str(run), by_statistics(held))
        taken.append(time.perf_counter() - started_s)
    assert 0.5 < plan.seconds / min(taken) < 2, (plan.seconds, taken)


def test_what_measuring_takes_is_told_before(tmp_path: Path) -> None:
    """Of the process that measures, alone: not less than half of what was said, nor twice as much."""
    checkpoint = Checkpoint.open(BUNDLED / "tiny")
    compress(plan_compression(checkpoint, PRESETS["int4-wo"]), tmp_path / "out")
    command = [sys.executable, "-c", _MEASURED, str(BUNDLED / "tiny"), str(tmp_path / "out")]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0.5 < memory_bytes(checkpoint) / peak < 2, (memory_bytes(checkpoint), peak)
