"""What is written: beside an independent reading of the format, and in transformers; and what leaves nothing behind."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as GgufKind

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.weights.safetensors import INDEX, Tensors
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration.layerwise_rounding import RoundedLayer, Rounding
from millrace.compress.checkpoint import checkpoint_writer as folders
from millrace.compress.checkpoint.checkpoint_writer import TensorWriter
from millrace.compress.checkpoint.compression_record import RECORD
from millrace.compress.checkpoint.tensor_layout import StoredTensorSpec
from millrace.compress.compress import CompressedPiece, by_layers, by_rounding, compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure.accuracy import measure, windows_for
from millrace.compress.methods.e4m3 import rounded_e4m3
from millrace.compress.methods.quantization_grid import Grid, RangeConvention, rounded
from millrace.compress.recipe import PRESETS, parsed
from millrace.engine.cache_specs import KV_CACHE_DTYPES, KvFormat
from millrace.errors import CheckpointError, ConfigError, MachineError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.fake_quant_activations import fp8_rows
from tests.fuzz.originals import write_checkpoint
from tests.support.checkpoints import random_encoder
from tests.support.compressed_files import Kind, dequantised_by_spec, read_file, write_compressed
from tests.support.engines import build, last_logits
from tests.support.gguf_files import write_gguf
from tests.support.tolerance import assert_no_worse

LAYERS = "model.layers.0."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 divides 256 and not 192."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), width=256, inner=192)


def plan(source: Path, **said: Any) -> CompressionPlan:
    return plan_compression(Checkpoint.open(source), parsed({"version": 1, **said}, "mine"))


RECIPES: list[tuple[dict[str, Any], str, Grid | None]] = [
    ({}, "pack-quantized", Grid()),
    ({"group": 32, "minimums": True}, "pack-quantized", Grid(group=32, minimums=True)),
    (
        {"group": "row", "scales": "model-optimizer"},
        "pack-quantized",
        Grid(4, 0, False, RangeConvention.MODEL_OPTIMIZER),
    ),
    ({"group": 64, "activations": 8}, "pack-quantized", Grid(group=64)),
    ({"group": 64, "activations": "fp8"}, "pack-quantized", Grid(group=64)),
    ({"bits": 8, "group": "row"}, "pack-quantized", Grid(8, 0)),
    ({"bits": 8, "group": "row", "activations": 8}, "int-quantized", Grid(8, 0)),
    ({"method": "fp8"}, "float-quantized", None),
    ({"method": "fp8-tensor"}, "float-quantized", None),
]


@pytest.mark.parametrize("i", range(len(RECIPES)))
def test_what_is_written(tmp_path: Path, source: Path, i: int) -> None:
    """By packbits and division alone: the grid's own values, all else bit by bit the source's."""
    said, format, grid = RECIPES[i]
    found = compress(plan(source, **said), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    compression = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert compression["ignore"] == ["lm_head"] and compression["format"] in (format, "mixed-precision")
    held, floats = read_file(tmp_path / "out" / "model.safetensors"), Tensors.open(source)
    by_name = {t: g["weights"] for g in compression["config_groups"].values() for t in g["targets"]}
    for name in floats:
        w, module = floats.load(name), name.removesuffix(".weight")
        if not name.startswith(LAYERS) or w.ndim == 1:
            np.testing.assert_array_equal(held[name].view(np.uint8), w.view(np.uint8), err_msg=name)
            continue
        own = grid and (
            Grid(grid.bits, 64, grid.minimums, grid.convention) if grid.group > w.shape[1] % 128 > 0 else grid
        )
        made = rounded(w, own) if own else rounded_e4m3(w, one_scale="tensor" in said["method"])
        values = dequantised_by_spec(held, module, by_name.get(module, by_name["Linear"]))
        np.testing.assert_array_equal(values, made.dequantise(), err_msg=name)
        error = np.square(values - w).sum() / np.square(w.astype(np.float64)).sum()
        assert found.errors[module] == pytest.approx(error, rel=1e-6)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    size = sum(a.nbytes for n, a in held.items() if n.startswith(LAYERS) and "norm" not in n and "shape" not in n)
    assert found.plan.bits_per_weight == pytest.approx(8 * size / found.plan.n_weights)
    assert found.plan.bytes_after == sum(a.nbytes for a in held.values())
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert parsed({k: v for k, v in record["recipe"].items() if k != "name"}, "mine") == found.plan.recipe


def test_a_mix_and_its_note(tmp_path: Path, source: Path) -> None:
    layers = [{"match": "*.down_proj", "bits": 8, "group": "row"}, {"match": "*.o_proj", "method": "none"}]
    planned = plan(source, layers=[*layers, {"match": "*.v_proj", "method": "fp8"}])
    compress(planned, tmp_path / "out")
    tensors = Checkpoint.open(tmp_path / "out").tensors
    assert {n.split(".")[-2]: tensors[n].dtype for n in tensors if n.startswith(LAYERS) and "norm" not in n} == {
        "q_proj": "int4", "k_proj": "int4", "v_proj": "fp8", "o_proj": "float32", "gate_proj": "int4",
        "up_proj": "int4", "down_proj": "int8",
    }  # fmt: skip
    assert planned.notes == () and "groups of 64: 128 does not divide" in plan(source).notes[0]


@pytest.mark.parametrize("said", [{}, {"method": "none", "prune": {"mlp": 0.25}}, {"method": "wanda"}])
def test_progress_counts_bytes_of_the_folder(tmp_path: Path, source: Path, said: dict[str, Any]) -> None:
    """Of all layers that are changed, also of those that stay floats."""
    planned, told = plan(source, **said), list[tuple[int, int]]()

    def way(of: CompressionPlan) -> Iterator[CompressedPiece]:
        if of.layers:
            yield from by_rounding(of)
        for name in (*of.sparse, *(of.treated if of.pruned else ())):
            yield CompressedPiece({}, {}, {f"{name}.weight": np.zeros(of.specs[f"{name}.weight"].shape)})

    def report(what: str, done: int, total: int) -> None:
        if what.startswith("compressing"):
            told.append((done, total))

    compress(planned, tmp_path / "out", way, report)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as held:
        sizes = [held.get_tensor(n).nbytes for n in held.keys() if n.rpartition(".")[0] in planned.treated]  # noqa: SIM118
    assert len(told) == len(planned.treated) > 0 and {total for _, total in told} == {sum(sizes)}
    assert told[0][0] == 0 and 0 < sum(sizes) - told[-1][0] < sum(sizes)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_a_folder_that_is_larger_is_said(tmp_path: Path, source: Path) -> None:
    """Of a file of 4 bits already."""
    file = write_gguf(tmp_path / "mill.Q4_0.gguf", source, GgufKind.Q4_0)
    planned = plan_compression(Checkpoint.open(file), PRESETS["int8-wo"])
    ratio = planned.bytes_after / planned.bytes_before
    assert ratio > 1.1 and any(f"{ratio:.2f} times the source's bytes" in note for note in planned.notes)
    assert not any("times the source's bytes" in note for note in plan(source).notes)


def test_who_cannot_read_zero_points_is_said(source: Path) -> None:
    """As docs/compress.md has it, and `test_transformers_reads_the_same` sees it."""
    assert "dequantize=True" in plan(source, minimums=True, group=32).notes[-1]
    mix = plan(source, minimums=True, group=32, layers=[{"match": "*.down_proj", "minimums": False}])
    assert "for `millrace` alone" in mix.notes[-1]
    assert not any("transformers" in note for note in plan(source, group=32).notes)


def test_shards(tmp_path: Path, source: Path) -> None:
    """Small ones hold the same; each is a file that the format's own library opens."""
    planned = plan(source)
    with folders.unfinished(tmp_path / "out") as path:
        folder = TensorWriter(path, planned.specs, 60_000)
        for name, spec in planned.specs.items():
            folder.put(name, np.full(spec.shape, 7, {"F32": "f4", "F16": "f2", "I32": "i4", "I64": "i8"}[spec.dtype]))
        folder.finish()
    index = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert set(index) == set(planned.specs) and len(set(index.values())) > 3
    for name, file in index.items():
        with safetensors.safe_open(tmp_path / "out" / file, "np") as opened:
            assert (opened.get_tensor(name) == 7).all()
            assert opened.get_tensor(name).shape == planned.specs[name].shape


# (recipe, whether transformers is asked to make floats of it when it loads: it has no other way to read packed zero
# points, and else it rounds activations of FP8; but then it knows one scheme for all layers)
READ: list[tuple[dict[str, Any], bool]] = [
    ({}, False), ({"bits": 8, "group": "row"}, False), ({"minimums": True, "group": 64}, True),
    ({"method": "fp8"}, True), ({"method": "fp8-tensor"}, True),
    ({"kv": "int8"}, False), ({"kv": "fp8"}, False), ({"kv": "int4"}, False),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # which is how it is asked
@pytest.mark.parametrize("i", range(len(READ)))
def test_transformers_reads_the_same(tmp_path: Path, source: Path, i: int) -> None:
    """Weights bit by bit, and logits as close to float64's as its own in float32."""
    said, as_floats = READ[i]
    pytest.importorskip("compressed_tensors", reason="transformers reads the format with it")
    import torch
    import transformers

    compress(plan(source, **said), tmp_path / "out")
    ours = Checkpoint.open(tmp_path / "out").tensors
    how = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if as_floats else {}
    kinds, ids = (torch.float64, torch.float32), np.random.default_rng(1).integers(0, 320, 40).tolist()
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=kind, **how) for kind in kinds]
    with torch.no_grad():
        exact, theirs = (model(torch.tensor([ids])).logits[0, -1].double().numpy() for model in models)
    named = dict(models[0].named_modules())
    for name in ours:
        weight = named[name.removesuffix(".weight")].weight.detach().numpy()
        wanted = ours.load(name)
        if "minimums" in said and name.startswith(LAYERS) and wanted.ndim == 2:
            wanted = wanted.astype(np.float16)  # the type of their scales, in which it multiplies
        np.testing.assert_array_equal(weight, wanted, err_msg=name)
    if "minimums" in said or "kv" in said:  # it rounds keys and values as well, for each head with one scale
        return
    engine = build(tmp_path / "out", tmp_path / "engine", "fp32")
    executor = engine.executor(n_pages=8)
    assert_no_worse(last_logits(engine, executor, [ids])[0], theirs, exact)
    executor.close()


@pytest.mark.parametrize("method", ["fp8", "fp8-tensor"])
def test_fp8_runs_in_the_folders_bytes(tmp_path: Path, source: Path, method: str) -> None:
    """As close to the folder's floats as bfloat16, whose weights are the same numbers (`methods/e4m3.py`)."""
    compress(plan(source, method=method), folder := tmp_path / "out")
    ids = [np.random.default_rng(seed).integers(0, 320, 33).tolist() for seed in range(7)]
    logits, kept = {}, {}
    for precision in ("fp32", "bf16", None):
        engine = build(folder, tmp_path / f"{precision}.engine", precision, kv=KvFormat.F32)
        executor = engine.executor(n_pages=8)
        logits[precision], kept[precision] = last_logits(engine, executor, ids), engine.manifest
        executor.close()
    assert kept[None].precision["default"] == "fp8a16" and not any("again" in note for note in kept[None].notes)
    off = {name: float(np.square(logits[name] - logits["fp32"]).mean()) for name in ("bf16", None)}
    assert 0 < off[None] <= 1.5 * off["bf16"], off


def test_fp8_beside_four_bits(tmp_path: Path, source: Path) -> None:
    """llm-compressor's W4AFP8 in the file; here activations stay bfloat16, which is said once, and is simulated."""
    compress(plan(source, group=64, activations="fp8"), tmp_path / "out")
    (group,) = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert group["weights"]["num_bits"] == 4 and group["weights"]["type"] == "int"
    rows = group["input_activations"]
    assert (rows["num_bits"], rows["type"], rows["strategy"], rows["dynamic"]) == (8, "float", "token", True)
    opened = Source.from_checkpoint(Checkpoint.open(tmp_path / "out"))
    made = plan_engine(opened, BuildOptions())
    assert made.precision.default == "w4a16" and len(fp8_rows(opened)) == len(opened.stored) - 1  # but for the head
    assert sum("stay bfloat16 here" in note for note in made.notes) == 1


def test_keys_and_values_are_kept_as_a_recipe_says(tmp_path: Path, source: Path) -> None:
    """Unasked, with the bits of the same folder without it whose cache is asked for; so it is measured, too."""
    ids, logits = [list(range(1, 200)), list(range(50, 90))], {}
    for name in ("float", "int8", "fp8", "int4"):
        compress(plan(source, group=64, **({} if name == "float" else {"kv": name})), tmp_path / name)
        engine = build(tmp_path / name, tmp_path / f"{name}.engine", None)
        logits[name] = last_logits(engine, executor := engine.executor(n_pages=8), ids)
        executor.close()
    for name in ("int8", "fp8", "int4"):
        for folder in ("float", *(["int8"] if name == "int8" else [])):
            engine = build(tmp_path / folder, tmp_path / f"{folder} {name}", None, kv=KV_CACHE_DTYPES[name])
            asked = last_logits(engine, executor := engine.executor(n_pages=8), ids)
            executor.close()
            assert (asked == logits[name]).all()
        assert all((logits[name] != logits[other]).any() for other in logits if other != name)


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_cannot_be_compressed(tmp_path: Path, source: Path) -> None:
    write_compressed(tmp_path / "done", source, Kind(group=32))
    random_encoder(tmp_path / "bert")
    write_checkpoint(tmp_path / "odd", width=64, inner=100)
    for folder, recipe, kind, says in (
        ("done", {}, CheckpointError, ["compressed already", "twice"]),
        ("bert", {}, CheckpointError, ["is an encoder", "w8a8"]),
        ("odd", {}, CheckpointError, ["down_proj has 100 inputs", "multiple of 32", 'match = "*.down_proj"']),
        (source, {"layers": [{"match": "*.experts.*", "bits": 8}]}, ConfigError, ["*.experts.*", "lm_head"]),
        (BUNDLED / "tiny", {"layers": [{"match": "lm_head"}]}, ConfigError, ["head is its embedding", "leave it out"]),
        (source, {"method": "none"}, ConfigError, ["leaves all layers"]),
        (source, {"method": "wanda", "kv": "int8"}, ConfigError, ["keys and values", "--kv-cache-dtype int8"]),
    ):
        with pytest.raises(kind) as error:
            plan(tmp_path / folder, **recipe)
        assert all(word in str(error.value) for word in says), error.value


def test_a_perplexity_beyond_all_numbers_is_said(tmp_path: Path) -> None:
    """A head a hundred thousand times as large is sure of tokens that do not come; its KL beside itself is none."""
    shutil.copytree(BUNDLED / "tiny", tmp_path / "loud")
    file = tmp_path / "loud" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.embed_tokens.weight"] = (tensors["model.embed_tokens.weight"].astype(np.float32) * 1e5).astype(
        tensors["model.embed_tokens.weight"].dtype
    )
    safetensors.numpy.save_file(tensors, file)
    loud = Checkpoint.open(tmp_path / "loud")
    with pytest.raises(MachineError, match="perplexity is more than a number can be"):
        measure(loud, loud, windows_for(loud, Calibration.open(None)), lambda *_: None)


def test_where_it_cannot_be_written(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="already there"):
        compress(plan(source), tmp_path / "there")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)

    def never(_: CompressionPlan) -> Iterator[CompressedPiece]:
        raise AssertionError("nothing is computed before")

    with pytest.raises(MachineError, match="has no room"):
        compress(plan(source), tmp_path / "out", never)
    assert left(tmp_path) == ["there"]


def broken(planned: CompressionPlan) -> Iterator[CompressedPiece]:
    yield next(by_rounding(planned))
    raise KeyboardInterrupt


def test_what_fails_leaves_nothing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        compress(plan(source), tmp_path / "out", broken)
    shutil.copytree(source, tmp_path / "nan")
    held = {n: a.copy() for n, a in safetensors.numpy.load_file(source / "model.safetensors").items()}
    held[f"{LAYERS}mlp.up_proj.weight"][3, 3] = np.inf
    safetensors.numpy.save_file(held, tmp_path / "nan" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.*not finite"):
        compress(plan(tmp_path / "nan"), tmp_path / "out")
    put = TensorWriter.put

    def flipped(folder: TensorWriter, name: str, array: Any) -> None:
        put(folder, name, array ^ 1 if name.endswith("k_proj.weight_packed") else array)

    monkeypatch.setattr(TensorWriter, "put", flipped)
    with pytest.raises(MachineError, match=r"k_proj\.weight does not read back"):
        compress(plan(source), tmp_path / "out")
    assert left(tmp_path) == ["nan"]


def test_changed_floats_are_written(tmp_path: Path, source: Path) -> None:
    """What a method moves into a norm takes its place."""
    norm = f"{LAYERS}input_layernorm.weight"

    def moved(planned: CompressionPlan) -> Iterator[CompressedPiece]:
        yield CompressedPiece({}, {}, {norm: np.full(256, 0.5)})
        yield from by_rounding(planned)

    compress(plan(source), tmp_path / "out", moved)
    assert (Checkpoint.open(tmp_path / "out").tensors.load(norm) == 0.5).all()


def test_layers_of_methods_are_written(tmp_path: Path, source: Path) -> None:
    """Matrices, the norm that took up their scales, and errors that the method measured."""
    planned, grid = plan(source, group=64), Grid(group=64)
    tensors = planned.checkpoint.tensors
    norm = f"{LAYERS}post_attention_layernorm.weight"
    layer = RoundedLayer("model.layers.0", floats={norm: tensors.load(norm) * np.float32(0.5)})
    for name in planned.layers:
        twice = 2 if "mlp.gate" in name or "mlp.up" in name else 1
        layer.matrices[name] = Rounding(rounded(tensors.load(f"{name}.weight") * np.float32(twice), grid), 0.25)
    found = compress(planned, tmp_path / "out", by_layers([layer]))
    made = Checkpoint.open(tmp_path / "out").tensors
    np.testing.assert_array_equal(made.load(norm), tensors.load(norm) * np.float32(0.5))
    for name, rounding in layer.matrices.items():
        values = rounding.matrix.dequantise().astype(np.float32)
        np.testing.assert_array_equal(made.load(f"{name}.weight"), values, err_msg=name)
    assert set(found.errors.values()) == {0.25} and set(found.errors) == set(planned.layers)


def test_presets_are_what_they_say(source: Path) -> None:
    forms = {
        name: set(plan_compression(Checkpoint.open(source), recipe).layers.values()) for name, recipe in PRESETS.items()
    }
    found = {name: sorted({(f.format, f.bits, f.group) for _, f in some}) for name, some in forms.items()}
    four = [("pack-quantized", 4, 64), ("pack-quantized", 4, 128)]  # 192 inputs
    assert found["int4-wo"] == found["int4-wo-mse"] == four
    assert found["int8-wo"] == [("pack-quantized", 8, 0)] and found["fp8"] == [("float-quantized", 8, 0)]
    assert found["fp8-tensor"] == found["fp8"] and {form.one_scale for _, form in forms["fp8-tensor"]} == {True}
    assert StoredTensorSpec("I64", (2,)).nbytes == 16


@pytest.mark.parametrize("what", ["unfinished", "statistics", "search"])
def test_what_a_killed_run_left_is_swept_away(tmp_path: Path, what: str) -> None:
    """Of the same name alone, and not where somebody is still at work."""
    out = tmp_path / "out"
    script = "import sys, os, signal; from pathlib import Path\n"
    script += "from millrace.compress.checkpoint.checkpoint_writer import staging_folder\n"
    script += "with staging_folder(Path(sys.argv[1]), sys.argv[2]) as path:\n    (path / 'part').write_bytes(b'x')\n"
    script += "    os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script, str(out), what], check=False)
    (left,) = tmp_path.glob(f".out.*.{what}")
    other = tmp_path / f".outer.0123456789ab.{what}"
    shutil.copytree(left, other)
    with folders.unfinished(out) as path:
        assert not left.exists() and other.exists()
        with folders.unfinished(out) as second:
            assert path.exists()
            (second / "part").write_bytes(b"second")
        shutil.rmtree(out)
    assert not any(out.iterdir()) and sorted(tmp_path.iterdir()) == [other, out]
