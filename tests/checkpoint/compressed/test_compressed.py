"""Folders of compressed-tensors, read: values and codes as an independent reading of the format has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.compressed.packing import pack, unpack, words_of
from millrace.checkpoint.compressed.scheme import read_compression
from millrace.checkpoint.weights.quantized_matrix import FP8, QuantisedFormat
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from millrace.errors import CheckpointError
from tests.fuzz.originals import write_checkpoint
from tests.support.compressed_files import (
    FP8_PER_TOKEN,
    PER_TOKEN,
    Kind,
    packed_by_spec,
    read_file,
    unpacked_by_spec,
    write_compressed,
)

Edit = Callable[[dict[str, Any]], None]
Q = "model.layers.0.self_attn.q_proj"
INTS, FLOATS = "int-quantized", "float-quantized"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K of 256 and 200: groups of 128 have a short one."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), width=256, inner=200)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 31, 32, 33, 576])
def test_words_are_the_formats(bits: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    codes = rng.integers(-(1 << bits - 1), 1 << bits - 1, (5, columns)).astype(np.int8)
    words = packed_by_spec(codes, bits)
    assert words.shape == (5, words_of(columns, bits))
    np.testing.assert_array_equal(pack(codes, bits), words)
    np.testing.assert_array_equal(unpack(words, bits, columns), codes)
    np.testing.assert_array_equal(unpacked_by_spec(words, bits, columns), codes)


# (how it is stored, what is kept of it, in which precision it runs)
ROW = None
KINDS: list[tuple[Kind, QuantisedFormat | None, str]] = [
    (Kind(), QuantisedFormat(4, 128), "w4a16"),
    (Kind(group=32), QuantisedFormat(4, 32), "w4a16"),
    (Kind(group=ROW), QuantisedFormat(4, 256), "w4a16"),
    (Kind(scale="bfloat16", coarse=8), QuantisedFormat(4, 128), "w4a16"),
    (Kind(scale="float32"), QuantisedFormat(4, 128), "w4a16"),
    (Kind(scale="float32", coarse=24), None, "bf16"),
    (Kind(symmetric=False, coarse=7), QuantisedFormat(4, 128, minimums=True), "w4a16"),
    (Kind(symmetric=False), QuantisedFormat(5, 128), "w8a16"),  # a zero times a scale of 11 bits needs more
    (Kind(bits=8), QuantisedFormat(8, 128), "w8a16"),
    (Kind(bits=8, group=ROW), QuantisedFormat(8, 256), "w8a16"),
    (Kind(bits=8, symmetric=False, coarse=3), QuantisedFormat(8, 128, minimums=True), "w8a16"),
    (Kind(bits=8, symmetric=False), None, "bf16"),
    (Kind(INTS, 8, ROW, activations=PER_TOKEN), QuantisedFormat(8, 256), "w8a8"),
    (Kind(INTS, 8, ROW, symmetric=False, coarse=3), QuantisedFormat(8, 256, minimums=True), "w8a16"),
    (Kind(FLOATS, 8, ROW, floats=True, scale="float32", activations=FP8_PER_TOKEN), FP8, "fp8a16"),
    (Kind(FLOATS, 8, ROW, floats=True, per_tensor=True, activations=FP8_PER_TOKEN), FP8, "fp8a16"),
    (Kind("naive-quantized", 8, ROW, floats=True), FP8, "fp8a16"),
    (Kind(FLOATS, 8, 32, floats=True, scale="float32"), None, "bf16"),
]


@pytest.mark.parametrize("i", range(len(KINDS)))
def test_values_and_codes(tmp_path: Path, source: Path, i: int) -> None:
    kind, kept, precision = KINDS[i]
    exact = write_compressed(tmp_path / "c", source, kind, seed=i)
    opened = Checkpoint.open(tmp_path / "c")
    tensors = opened.tensors
    assert set(tensors) == set(Checkpoint.open(source).tensors)
    for name, values in exact.items():
        np.testing.assert_array_equal(tensors.load(name), values.astype(np.float32), err_msg=name)
    assert tensors.format(f"{Q}.weight") == kept
    for name, values in exact.items():
        held = tensors.format(name)
        assert (held is None) == (kept is None)
        if held is None:
            continue
        found = tensors.stored(name, 8, held.group)
        assert found is not None and (tensors.stored(name, 4, held.group) is None) == (held.bits > 4)
        np.testing.assert_array_equal(found.dequantise(), values, err_msg=name)
        assert tensors.stored(name, 8, held.group + 4) is None
    made = plan_engine(Source.from_checkpoint(opened), BuildOptions())
    assert made.precision.default == precision
    assert any("16-bit floats" in note for note in made.notes) == (kept is None)
    assert any("FP8" in note and "activations" in note for note in made.notes) == (kind.activations is FP8_PER_TOKEN)


def test_an_engine_holds_the_files_codes(tmp_path: Path, source: Path) -> None:
    """In its own groups, of each row its own; q, k and v are one product."""
    for kind, formats in (
        (Kind(symmetric=False, coarse=7), {"w4g128 with minimums"}),
        (Kind(INTS, 8, ROW, activations=PER_TOKEN), {"w8g256", "w8g64", "w8g200"}),
    ):
        write_compressed(folder := tmp_path / kind.format, source, kind)
        made = plan_engine(Source.from_checkpoint(Checkpoint.open(folder)), BuildOptions())
        matrices = [w for w in made.program.weights if w.format.startswith("w")]
        assert {w.format for w in matrices} == formats and {len(w.origin) for w in matrices} == {1, 2, 3}
        for packed in matrices:
            assert packed.pack(map).nbytes == packed.nbytes
        assert made.notes == ("the embedding table, stored as float32, is rounded to bfloat16",)


def panels_by_spec(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Of 32 outputs each: pairs of inputs, all outputs of a pair side by side, then the outputs' float scales."""
    N, K = codes.shape
    wide = np.zeros((-(-N // 32) * 32, -(-K // 2) * 2), np.uint8)
    wide[:N, :K] = codes
    of_all = np.zeros(len(wide), np.float32)
    of_all[:N] = scales
    parts = []
    for first in range(0, len(wide), 32):
        rows = slice(first, first + 32)
        parts += [wide[rows, k : k + 2].reshape(-1) for k in range(0, wide.shape[1], 2)]
        parts.append(of_all[rows].view(np.uint8))
    return np.concatenate(parts)


def interleaved(halves: list[NDArray[Any]]) -> list[NDArray[Any]]:
    return [half[first : first + 16] for first in range(0, len(halves[0]), 16) for half in halves]


@pytest.mark.parametrize("per_tensor", [False, True])
def test_an_engine_holds_the_files_bytes_of_fp8(tmp_path: Path, source: Path, per_tensor: bool) -> None:
    """Half of what bfloat16 takes; q, k and v are one product, and so are gate and up, each with its own scales."""
    kind = Kind(FLOATS, 8, ROW, floats=True, scale="float32", coarse=24, per_tensor=per_tensor)
    write_compressed(folder := tmp_path / "c", source, kind)
    file = read_file(folder / "model.safetensors")
    made = plan_engine(Source.from_checkpoint(Checkpoint.open(folder)), BuildOptions())
    matrices = [w for w in made.program.weights if w.format == "fp8"]
    assert {len(w.origin) for w in matrices} == {1, 2, 3} and not any("again" in note for note in made.notes)
    for packed in matrices:
        parts = [(file[name].view(np.uint8), file[f"{name}_scale"]) for name in packed.origin]
        codes, scales = [c for c, _ in parts], [np.broadcast_to(s.reshape(-1), len(c)) for c, s in parts]
        if len(parts) == 2:  # gate and up, by 16 rows in turn, with zeros where there are no more
            codes = interleaved([np.pad(c, ((0, -len(c) % 16), (0, 0))) for c in codes])
            scales = interleaved([np.pad(s, (0, -len(s) % 16)) for s in scales])
        expected = panels_by_spec(np.concatenate(codes), np.concatenate(scales).astype(np.float32))
        np.testing.assert_array_equal(packed.pack(map), expected, err_msg=packed.name)
        assert packed.nbytes == expected.nbytes


@pytest.mark.parametrize(("said", "kept", "notes"), [
    (None, KvFormat.BF16, 0), (PER_TOKEN, KvFormat.INT8, 0), (FP8_PER_TOKEN, KvFormat.FP8, 0),
    ({**PER_TOKEN, "num_bits": 4, "symmetric": False}, KvFormat.INT4, 0),
    ({**FP8_PER_TOKEN, "strategy": "tensor", "dynamic": False}, KvFormat.BF16, 1),
    ({**FP8_PER_TOKEN, "strategy": "attn_head"}, KvFormat.BF16, 1),
])  # fmt: skip
def test_keys_and_values(tmp_path: Path, source: Path, said: object, kept: KvFormat, notes: int) -> None:
    """As the folder says, unless something else is asked for; scales of FP8 ones are left aside, and where they were
    meant, that is said."""
    write_compressed(folder := tmp_path / "c", source, Kind(), kv_cache_scheme=said)
    if notes or kept == KvFormat.FP8:
        path = folder / "model.safetensors"
        scale = {f"model.layers.0.self_attn.{name}_scale": np.ones(1, np.float32) for name in "kv"}
        safetensors.numpy.save_file({**safetensors.numpy.load_file(path), **scale}, path)
    opened = Source.from_checkpoint(Checkpoint.open(folder))
    made = plan_engine(opened, BuildOptions())
    assert sum("keys and values stay bfloat16" in note for note in made.notes) == notes
    assert {cache.format for cache in made.program.caches} == {kept}
    exact = BuildOptions(precision=precision_map("fp32"))
    assert {cache.format for cache in plan_engine(opened, exact).program.caches} == {KvFormat.F32}
    for asked in KvFormat:
        assert {c.format for c in plan_engine(opened, BuildOptions(kv_format=asked)).program.caches} == {asked}


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_fp8_that_are_no_numbers(tmp_path: Path, source: Path, code: int) -> None:
    write_compressed(tmp_path / "c", source, Kind(FLOATS, 8, ROW, floats=True))
    path = tmp_path / "c" / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin = json.loads(data[8 : 8 + size])[f"{Q}.weight"]["data_offsets"][0]
    data[8 + size + begin + 3 * 256 + 5] = code
    path.write_bytes(data)
    tensors = Checkpoint.open(tmp_path / "c").tensors
    for read in (lambda: tensors.load(f"{Q}.weight"), lambda: tensors.stored(f"{Q}.weight", 8, 0)):
        with pytest.raises(CheckpointError, match=r"q_proj\.weight has 1 FP8 codes that are no numbers.*\[3, 5\]"):
            read()


def at(path: str, value: object) -> Edit:
    """Sets a key of quantization_config, by its path."""

    def edit(said: dict[str, Any]) -> None:
        *above, last = path.split("/")
        for key in above:
            said = said[key]
        said[last] = value

    return edit


G = "config_groups/group_0"
WRONG: list[tuple[Edit, list[str]]] = [
    (at("quant_method", "bitnet"), ["quantization_config", "compressed-tensors"]),
    (at("fromat", 1), ["fromat", "format"]),
    (at("format", "marlin-24"), ["marlin-24", "pack-quantized"]),
    (at("kv_cache_scheme", {"num_bits": 8}), ["kv_cache_scheme.dynamic is None", "true"]),
    (at("kv_cache_scheme", {**PER_TOKEN, "num_bits": 2}), ["kv_cache_scheme.num_bits is 2", "8 or 4"]),
    (at("kv_cache_scheme", {**PER_TOKEN, "num_bits": 4}), ["kv_cache_scheme.symmetric is True", "false"]),
    (at("kv_cache_scheme", {**FP8_PER_TOKEN, "num_bits": 4}), ["kv_cache_scheme.num_bits is 4", "8"]),
    (at("kv_cache_scheme", {**PER_TOKEN, "strategy": "tensor"}), ["kv_cache_scheme.strategy", "token"]),
    (at("kv_cache_scheme", "fp8"), ["kv_cache_scheme is 'fp8'", "null"]),
    (at("quantization_status", "frozen"), ["frozen", "compressed"]),
    (at("sparsity_config", {"format": "sparse-24-bitmask"}), ["sparsity_config"]),
    (at("transform_config", {"config_groups": {}}), ["transform_config"]),
    (at("config_groups", {}), ["config_groups", "1 to"]),
    (at("ignore", "lm_head"), ["ignore", "a list"]),
    (at("ignore", ["re:(a+)+$"]), ["(a+)+$", "pattern"]),
    (at("ignore", []), ["lm_head.weight holds float32", "ignore"]),
    (at("ignore", ["lm_head", Q]), [Q, "no scheme"]),
    (at(f"{G}/targets", ["re:.*k_proj"]), ["no scheme"]),
    (at(f"{G}/output_activations", {"num_bits": 8}), ["output_activations"]),
    (at(f"{G}/input_activations", {**PER_TOKEN, "dynamic": False}), ["input_activations.dynamic", "true"]),
    (at(f"{G}/input_activations", {**PER_TOKEN, "num_bits": 4}), ["input_activations.num_bits", "8"]),
    (at(f"{G}/weights", None), ["weights", "None"]),
    (at(f"{G}/weights/num_bits", 3), ["num_bits is 3", "4 or 8"]),
    (at(f"{G}/weights/num_bits", True), ["num_bits is True"]),
    (at(f"{G}/weights/num_bits", 8), ["down_proj.weight_packed is (256, 25)", "(256, 50)"]),
    (at(f"{G}/weights/type", "float"), ["num_bits is 4", "8 bits of floats"]),
    (at(f"{G}/weights/actorder", "group"), ["actorder", "static"]),
    (at(f"{G}/weights/group_size", 64), ["down_proj.weight_scale is (256, 2)", "(256, 4)"]),
    (at(f"{G}/weights/group_size", 2), ["group_size is 2", "multiple of 4"]),
    (at(f"{G}/weights/strategy", "block"), ["block", "channel"]),
    (at(f"{G}/weights/symmetric", False), ["weight_zero_point"]),
    (at(f"{G}/weights/symetric", False), ["symetric", "symmetric"]),
]


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_what_is_not_read_is_named(tmp_path: Path, source: Path, i: int) -> None:
    edit, says = WRONG[i]
    write_compressed(tmp_path / "c", source, Kind())
    path = tmp_path / "c" / "config.json"
    raw = json.loads(path.read_text())
    edit(raw["quantization_config"])
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(tmp_path / "c")
    assert all(word in str(error.value) for word in says), error.value


DAMAGES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("a shape of another matrix", lambda t: t[f"{Q}.weight_shape"].__setitem__(1, 240), "weight_packed"),
    ("a negative shape", lambda t: t[f"{Q}.weight_shape"].__setitem__(0, -1), "a matrix"),
    ("a shape beyond all", lambda t: t[f"{Q}.weight_shape"].__setitem__(0, 1 << 40), "a matrix"),
    ("no scale", lambda t: t.pop(f"{Q}.weight_scale"), "weight_scale"),
    ("no shape", lambda t: t.pop(f"{Q}.weight_shape"), "weight_shape"),
    ("a scale too many", lambda t: t.update({f"{Q}.weight_scale": np.ones((64, 3), np.float16)}), "(64, 2)"),
    ("integer scales", lambda t: t.update({f"{Q}.weight_scale": np.ones((64, 2), np.int8)}), "int8"),
    ("an order of its inputs", lambda t: t.update({f"{Q}.weight_g_idx": np.zeros(256, np.int32)}), "order of"),
    ("two of one", lambda t: t.update({f"{Q}.weight": np.zeros((64, 256), np.float32)}), "weight_packed"),
    ("a stray part", lambda t: t.update({"model.norm.weight_scale": np.ones(1, np.float16)}), "no compressed layer"),
    ("stray integers", lambda t: t.update({"model.more": np.ones(1, np.int32)}), "no compressed layer"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=[d[0] for d in DAMAGES])
def test_damaged_layers(tmp_path: Path, source: Path, damage: tuple[str, Callable[[Any], object], str]) -> None:
    write_compressed(tmp_path / "c", source, Kind())
    path = tmp_path / "c" / "model.safetensors"
    held = {name: array.copy() for name, array in safetensors.numpy.load_file(path).items()}
    damage[1](held)
    safetensors.numpy.save_file(held, path)
    with pytest.raises(CheckpointError, match=damage[2].replace("(", r"\(").replace(")", r"\)")):
        Checkpoint.open(tmp_path / "c")


def test_scales_that_are_no_numbers(tmp_path: Path, source: Path) -> None:
    write_compressed(tmp_path / "c", source, Kind())
    path = tmp_path / "c" / "model.safetensors"
    held = {name: array.copy() for name, array in safetensors.numpy.load_file(path).items()}
    held[f"{Q}.weight_scale"][3, 1] = np.nan
    safetensors.numpy.save_file(held, path)
    tensors = Checkpoint.open(tmp_path / "c").tensors
    for read in (lambda: tensors.load(f"{Q}.weight"), lambda: tensors.format(f"{Q}.weight")):
        with pytest.raises(CheckpointError, match="not finite"):
            read()


def test_names_go_before_patterns_and_these_before_classes(tmp_path: Path, source: Path) -> None:
    """Three schemes that differ in their bits alone; an ignored name is nobody's."""

    def scheme(bits: int, target: str) -> dict[str, object]:
        return {"targets": [target], "weights": Kind(bits=bits).weights}

    found = read_compression({
        "format": "pack-quantized", "ignore": ["lm_head", "re:.*\\.1\\..*gate_proj$"],
        "config_groups": {"a": scheme(8, "Linear"), "b": scheme(4, "re:.*q_proj"), "c": scheme(8, Q)},
    })  # fmt: skip
    bits = {
        Q: 8, Q.replace(".0.", ".1."): 4, Q.replace("q_proj", "k_proj"): 8, "lm_head": None,
        "model.layers.1.mlp.gate_proj": None, "model.layers.1.mlp.gate_proj_2": 8, "model.layers.0.mlp.gate_proj": 8,
    }  # fmt: skip
    assert {name: (s := found.scheme_of(name)) and s.bits for name in bits} == bits
