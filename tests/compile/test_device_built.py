"""An engine folder on a GPU: bit for bit what the checkpoint's own weights become there."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.builder import Builder, build_engine
from millrace.compile.lower_gpu.from_checkpoint import engine_from_checkpoint
from millrace.compile.lower_gpu.from_engine import engine_from_folder
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.accuracy_loss import AccuracyLoss, Evaluation
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.folder_lock import in_use
from millrace.engine.artifact.manifest import MANIFEST, GpuSection, Manifest, sealed
from millrace.engine.cuda.device_constants import Loaded, load
from millrace.engine.cuda.engine import GpuEngine
from millrace.errors import ConfigError, EngineError
from millrace.graph.rewrite import listing
from tests.e2e.test_on_gpu import HERE
from tests.support.checkpoints import random_checkpoint, random_encoder
from tests.support.compressed_files import FP8_PER_TOKEN, write_compressed
from tests.support.compressed_files import Kind as Compressed
from tests.support.gguf_files import BLOCKY, write_gguf

FLOATS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
NOTHING_ASKED = BuildSettings()
MAP = {"default": "w4a8:32", "lm_head": "bf16", "layers.0.*": "w8a16", "*.1.*.up_proj": "w8a8", "*.q_proj": "fp32"}


def pair(
    path: Path, folder: Path, asked: Mapping[str, Any], precisions: Mapping[str, str] | None = None
) -> tuple[GpuEngine, GpuEngine]:
    """Of the same weights: from the checkpoint, and from an engine that was built of it."""
    built = BuildSettings(tune=0, evaluate=False, **asked)
    checkpoint = Checkpoint.open(path)
    Builder.from_settings("m", checkpoint, built, None, precisions, for_gpu=True).write(folder)
    of_checkpoint = engine_from_checkpoint("m", checkpoint, BuildSettings(**asked), HERE, None, precisions)
    return of_checkpoint, engine_from_folder(Engine.open(folder), NOTHING_ASKED, HERE, None)


def tensors(engine: GpuEngine) -> Iterator[Tensor]:
    """All constants in the order in which nodes read them, codes as bytes."""
    loaded: Loaded = load(engine.model.lowered, FLOATS[engine.model.lowered.dtype], CPU)
    for node in engine.model.lowered.graph.nodes:
        yield from (loaded.tensors[value] for value in node.inputs if value in loaded.tensors)
        for matrix in loaded.coded.get(node, ()):
            yield from (matrix.codes.view(torch.uint8), matrix.scales, torch.tensor([matrix.group, matrix.zero]))
            yield from () if matrix.minimums is None else (matrix.minimums,)


def assert_same(one: GpuEngine, other: GpuEngine) -> None:
    a, b = one.model, other.model
    assert listing(a.lowered.graph) == listing(b.lowered.graph) and replace(a, lowered=b.lowered) == b
    assert a.lowered.dtype == b.lowered.dtype
    assert sorted(n.origin for n in a.lowered.e4m3) == sorted(n.origin for n in b.lowered.e4m3)
    assert one.needs == other.needs and one.page_bytes == other.page_bytes
    kept = ("precision", "group", "symbols", "max_context", "vocab_size", "eos_token_ids", "bos_token_id", "cpu")
    assert all(getattr(one.manifest, name) == getattr(other.manifest, name) for name in kept)
    for mine, theirs in zip(tensors(one), tensors(other), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tied heads, biases, norms that are folded; floats of 16 bits; codes of GGUF and of E4M3."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {family: random_checkpoint(folder / family, family, seed=3) for family in ("llama", "qwen2", "gemma")}
    found["half"] = random_checkpoint(folder / "half", "llama", seed=4, dtype="float16")
    blocky = random_checkpoint(folder / "blocky", "llama", seed=3, **BLOCKY)
    kinds = [Kind.Q4_K, Kind.Q6_K, Kind.Q5_1, Kind.Q4_1, Kind.Q4_0, Kind.Q8_0, Kind.F16]
    found["gguf"] = write_gguf(folder / "mixed.gguf", blocky, lambda name: kinds[sum(map(ord, name)) % len(kinds)])
    fp8 = Compressed("float-quantized", 8, None, floats=True, scale="float32", activations=FP8_PER_TOKEN)
    floats = ("lm_head", *(f"model.layers.0.{name}" for name in ("self_attn.k_proj", "mlp.up_proj")))
    write_compressed(folder / "fp8", blocky, fp8, ignore=floats, kv_cache_scheme=FP8_PER_TOKEN)
    found["fp8"] = folder / "fp8"
    found["codes and floats"] = write_gguf(
        folder / "floats.gguf", blocky, lambda name: Kind.F32 if "attn_k" in name or "ffn_up" in name else Kind.Q8_0
    )  # fmt: skip
    return found


@pytest.mark.parametrize(("name", "asked"), [
    ("llama", {"precision": "fp8"}), ("llama", {"precision": "w4a16", "group": 32, "max_batch": 70}),
    ("qwen2", {"precision": "w4a8", "head": "w4a8", "kv_cache_dtype": "int8"}), ("qwen2", {"precision": "tf32"}),
    ("gemma", {"precision": "w8a8"}), ("gemma", {"precision": "bf16", "max_context": 100}), ("half", {}),
    ("half", {"precision": "w8a16"}), ("gguf", {}), ("fp8", {}), ("fp8", {"kv_cache_dtype": "int8"}),
    ("fp8", {"precision": "fp8"}), ("fp8", {"precision": "fp16"}),
    ("codes and floats", {"precision": "w8a16", "group": 32}),
], ids=str)  # fmt: skip
def test_the_checkpoints_own_weights(
    name: str, asked: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    one, other = pair(checkpoints[name], tmp_path / "e", asked)
    assert_same(one, other)
    assert bool(other.model.lowered.e4m3) == (asked.get("precision", name) == "fp8")
    one.close()
    assert other.folder == tmp_path / "e" and in_use(tmp_path / "e")
    other.close()
    assert not in_use(tmp_path / "e") and (tmp_path / "e" / MANIFEST).is_file(), "an engine folder is not a start's own"


def test_the_cache_keeps_apart_what_only_a_gpu_tells_apart(checkpoints: dict[str, Path]) -> None:
    """float16 runs as float32 on a CPU: the same weights, and on a GPU other answers."""
    half, asked = Checkpoint.open(checkpoints["half"]), BuildSettings(evaluate=False)
    as_asked = Builder.from_settings("m", half, replace(asked, precision="fp32"), None)
    assert Builder.from_settings("m", half, asked, None).key != as_asked.key


@pytest.mark.parametrize("precisions", [MAP, {"default": "bf16", "l*": "w8a8", "lm_head": "fp32"}], ids=len)
def test_a_map_of_precisions(precisions: dict[str, str], checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """In the second the head's own pattern comes too late: the first that matches decides."""
    assert_same(*pair(checkpoints["llama"], tmp_path / "e", {}, precisions))


@pytest.mark.parametrize(("asked", "precisions", "dtype"), [
    ({"precision": "fp16", "head": "bf16"}, None, "fp16"), ({}, {"default": "fp32", "*.q_proj": "bf16"}, "fp32"),
])  # fmt: skip
def test_floats_of_two_types_are_refused(
    asked: dict[str, Any], precisions: dict[str, str] | None, dtype: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint's start has all of them in one type, and an engine rounded some: its answers would be others."""
    words = f"(lm_head|q_proj) is built in bf16, and a GPU would have it in {dtype}"
    checkpoint = Checkpoint.open(checkpoints["llama"])
    with pytest.raises(ConfigError, match=words):
        Builder.from_settings(
            "m", checkpoint, BuildSettings(tune=0, evaluate=False, **asked), None, precisions, for_gpu=True
        )
    on_cpu = BuildSettings(tune=0, evaluate=False, head="bf16", precision="fp32")
    Builder.from_settings("m", checkpoint, on_cpu, None).write(tmp_path / "e")
    with pytest.raises(ConfigError, match="lm_head is built in bf16, and a GPU would have it in fp32"):
        opened(tmp_path / "e")


def test_keys_in_bfloat16_of_a_model_in_float16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Of 16 bits that are others a checkpoint's start says so, and so does what a CPU was built for."""
    built = BuildSettings(tune=0, evaluate=False, kv_cache_dtype="bf16")
    Builder.from_settings("m", Checkpoint.open(checkpoints["half"]), built, None).write(tmp_path / "e")
    with pytest.raises(EngineError, match="keys and values in bf16 of a model in fp16"):
        opened(tmp_path / "e")
    assert opened(tmp_path / "e", kv_cache_dtype="int8").model.lowered.dtype == "fp16"


@pytest.mark.parametrize("more", [{}, {"pooling": "cls", "normalised": False}], ids=["mean", "cls"])
def test_an_encoder(more: dict[str, Any], tmp_path: Path) -> None:
    assert_same(*pair(random_encoder(tmp_path / "c", seed=2, **more), tmp_path / "e", {"precision": "w8a8"}))


def test_an_encoder_in_fp8_is_refused_by_that_name(tmp_path: Path) -> None:
    encoder = Checkpoint.open(random_encoder(tmp_path / "c", seed=2))
    with pytest.raises(ConfigError, match="precision fp8 is not measured for encoders"):
        Builder.from_settings("m", encoder, BuildSettings(precision="fp8"), None, for_gpu=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As for a CPU: nothing is said of GPUs."""
    folder = tmp_path_factory.mktemp("built") / "tiny.engine"
    build_engine(
        "tiny", BUNDLED / "tiny", folder, BuildSettings(precision="w8a16", tune=0, evaluate=False, max_batch=8)
    )
    return folder


def opened(folder: Path, **asked: Any) -> GpuEngine:
    return engine_from_folder(Engine.open(folder), BuildSettings(**asked), HERE, None)


def test_what_a_start_may_ask_for(built: Path) -> None:
    usual, asked = opened(built), opened(built, max_batch=3, max_context=100, kv_cache_dtype="int8")
    assert (usual.manifest.max_sequences, usual.manifest.max_step_tokens) == (64, 2048)
    assert (asked.manifest.max_sequences, asked.manifest.max_context) == (3, 100)
    assert asked.page_bytes < usual.page_bytes and asked.model.kv is not None
    with pytest.raises(ConfigError, match=r"context=?.2049 .*tiny.engine"):
        opened(built, max_context=2049)
    words = [words for words, _ in opened(built).smaller()]
    assert words == ["--max-batch 8", "--kv-cache-dtype int8"], "of an engine nothing else is open"


def test_a_damaged_weight_is_found_while_it_is_loaded(built: Path, tmp_path: Path) -> None:
    for file in built.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "weights.bin"
    good, table = weights.read_bytes(), json.loads((tmp_path / "program.json").read_text())
    norm = next(weight["offset"] for weight in table["weights"] if "norm" in weight["name"])
    no_number = good[:norm] + b"\xff" * 4 + good[norm + 4 :]  # for which a checkpoint would be blamed
    for bad in (good[:-100] + bytes([good[-100] ^ 1]) + good[-99:], no_number):
        weights.write_bytes(bad)
        with pytest.raises(EngineError, match=r"weights.bin is damaged: the checksum of model\..* differs"):
            opened(tmp_path).on_gpu(40)
    weights.write_bytes(good)
    engine = opened(tmp_path)
    weights.write_bytes(good[: len(good) // 2])  # a page of a map would be a signal now
    with pytest.raises(EngineError, match=r"weights.bin is damaged"):
        engine.on_gpu(40)
    weights.unlink()
    with pytest.raises(EngineError, match=r"weights.bin cannot be read"):
        engine.on_gpu(40)


def test_a_network_of_ones_own_is_refused(tmp_path: Path) -> None:
    from millrace.compile.build import BuildOptions, plan_engine, write_engine
    from millrace.compile.source import Source
    from tests.support.networks import IMAGES, Digits, parameters

    source = Source.from_module(Digits(), parameters(Digits()))
    write_engine(source, plan_engine(source, BuildOptions(profile=IMAGES)), tmp_path / "e", name="digits")
    with pytest.raises(EngineError, match="on a GPU: it gives scores, hidden"):
        opened(tmp_path / "e")


@pytest.mark.parametrize("head", [None, "w8a8"])
def test_a_language_model_of_ones_own(head: str | None, tmp_path: Path) -> None:
    """Its head has a name of its own, which its manifest does not say."""
    from examples.own_model import CONTEXT, Babbler
    from millrace.compile.build import BuildOptions, plan_engine, write_engine
    from millrace.compile.precision import precision_map
    from millrace.compile.source import Source
    from tests.support.networks import parameters

    source = Source.from_module(Babbler(), parameters(Babbler()), max_context=CONTEXT)
    options = BuildOptions(precision=precision_map("w4a16", head=head))
    write_engine(source, plan_engine(source, options), tmp_path / "e", name="babbler")
    engine = opened(tmp_path / "e")
    assert engine.manifest.precision == {"default": "w4a16", "lm_head": head or "w8a16"}
    assert len(list(tensors(engine))) > 20


def with_manifest(folder: Path, built: Path, **changed: Any) -> Path:
    """A copy whose manifest says something else, and is sealed again."""
    for file in built.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(sealed(msgspec.structs.replace(manifest, **changed))))
    return folder


@pytest.mark.parametrize(
    ("words", "vocab"), [("rows for tokens", {"vocab_size": 4096}), ("rows for", {"max_context": 4096})]
)
def test_tables_that_are_too_short(words: str, vocab: dict[str, int], built: Path, tmp_path: Path) -> None:
    """A token or a position behind a table's end would be read from somebody else's memory."""
    with pytest.raises(EngineError, match=words):
        opened(with_manifest(tmp_path, built, **vocab))


def test_what_a_price_leaves_out_is_said(built: Path, tmp_path: Path) -> None:
    """It was measured on a CPU, whose rows are never E4M3."""
    price, said = AccuracyLoss("fp8a16", 0.01, 1.01, 0.9, 1 << 20), list[str]()
    evaluation = Evaluation("", "bundled", tokens=100, tried=[price])
    folder = with_manifest(tmp_path, built, evaluation=evaluation, gpu=GpuSection(fp8_rows=["model.layers.0.mlp.up"]))
    engine = engine_from_folder(Engine.open(folder), NOTHING_ASKED, HERE, None, said.append)
    assert said == [engine.manifest.notes[-1]] == [f"on a CPU {evaluation.summary}; rows of E4M3 are not in it"]


@pytest.mark.parametrize("more", [4096, -64])
def test_weights_of_another_size(more: int, built: Path, tmp_path: Path) -> None:
    cpu = Engine.open(built).manifest.cpu
    with pytest.raises(EngineError, match="bytes of weights in another"):
        opened(with_manifest(tmp_path, built, cpu=msgspec.structs.replace(cpu, weights_bytes=cpu.weights_bytes + more)))
