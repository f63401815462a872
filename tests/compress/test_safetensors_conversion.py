"""Folders with weights of PyTorch become Hugging Face folders with the same tensors."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compress.checkpoint.safetensors_conversion import convert_to_safetensors
from millrace.errors import CheckpointError, ConfigError, MachineError
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, last_logits

torch = pytest.importorskip("torch", reason="the independent truth")
safetensors = pytest.importorskip("safetensors.torch", reason="the independent truth")
transformers = pytest.importorskip("transformers", reason="the independent truth")


def folder(path: Path, shards: Mapping[str, Mapping[str, Any]], index: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, state in shards.items():
        torch.save(dict(state), path / name)
    if index:
        names = {tensor: name for name, state in shards.items() for tensor in state}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def tensors_of(out: Path) -> dict[str, Any]:
    return {k: v for file in out.glob("*.safetensors") for k, v in safetensors.load_file(file).items()}


def assert_equal(out: Path, state: Mapping[str, Any]) -> None:
    found = tensors_of(out)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].is_contiguous() and torch.equal(found[name], tensor), name


def some(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(40, 30, generator=generator)
    return {f"{seed}.whole": base, f"{seed}.mT": base.T, f"{seed}.half": base[::2, 3:9].half(), f"{seed}.n": base[0, 0],
            f"{seed}.mask": base > 0, f"{seed}.ids": torch.arange(9).expand(1, -1),
            f"{seed}.none": base[:0]}  # fmt: skip


def test_a_model_gives_the_same_logits(tmp_path: Path) -> None:
    """By transformers and natively, as the source did."""
    source = random_checkpoint(tmp_path / "source", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    old = Path(shutil.copytree(source, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors*")))
    torch.save(model.state_dict(), old / "pytorch_model.bin")
    out = tmp_path / "out"
    result = convert_to_safetensors(old, out)
    assert_equal(out, model.state_dict())
    assert {*result.copied} == {path.name for path in old.iterdir()} - {"pytorch_model.bin"} and not result.notes
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    ids = torch.tensor([[1, 5, 9, 2, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(again(ids).logits, expected)
    engine = build(out, tmp_path / "engine", "fp32")
    logits = last_logits(engine, engine.executor(n_pages=16), ids.tolist())
    np.testing.assert_allclose(logits, expected[:, -1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads(tmp_path: Path, tied: bool) -> None:
    """One storage of two names, as torch.save keeps it: both are written, and load whatever config.json ties."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if not tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    old = tmp_path / "old"
    config.save_pretrained(old)
    torch.save(model.state_dict(), old / "pytorch_model.bin")
    out = convert_to_safetensors(old, tmp_path / "out").folder
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tensors_of(out).keys()
    again, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert Checkpoint.without_weights(out).decoder.tie_embeddings == tied


def test_shards(tmp_path: Path) -> None:
    """In and out; those of the result are as transformers names them."""
    shards = {f"pytorch_model-0000{i}-of-00003.bin": some(i) for i in (1, 2, 3)}
    source, state = folder(tmp_path / "old", shards, index=True), some(1) | some(2) | some(3)
    out = tmp_path / "out"
    result = convert_to_safetensors(source, out, shard_bytes=12_000)
    names = [f"model-{i:05d}-of-{len(result.weights):05d}.safetensors" for i in range(1, len(result.weights) + 1)]
    assert list(result.weights) == names and len(names) >= 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys() and {*index["weight_map"].values()} == {*names}
    assert index["metadata"]["total_size"] == result.nbytes == sum(t.numel() * t.element_size() for t in state.values())
    assert not (out / "pytorch_model.bin.index.json").exists()
    assert_equal(out, state)


@pytest.mark.parametrize("name", ["model.pt", "weights.pth", "epoch-3.ckpt", "model.bin"])
def test_one_file_of_any_name(tmp_path: Path, name: str) -> None:
    """Beside what a trainer leaves, and under a key of its own."""
    source = folder(tmp_path / "old", {name: {"epoch": 1, "state_dict": some(1)}})
    for other in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (source / other).write_bytes(b"not read")
    result = convert_to_safetensors(source, tmp_path / "out")
    assert_equal(tmp_path / "out", some(1))
    assert result.extras == ("epoch (int)",)
    assert {*result.left_out} == {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"}
    assert result.notes[0] == "not in the result, because they are not tensors: epoch (int)"
    assert "optimizer.pt" in result.notes[1]


def test_files_that_are_copied(tmp_path: Path) -> None:
    """Links of the hub's cache are followed, folders are kept; weights in other formats and hidden files are not."""
    source = folder(tmp_path / "old", {"pytorch_model.bin": some(1)})
    (tmp_path / "blob").write_text("{}")
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / ".git").mkdir()
    (source / ".git" / "index").write_text("x")
    (source / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(source / "pipe")
    for name in ("tf_model.h5", "flax_model.msgpack", "model.onnx"):
        (source / name).write_bytes(b"x")
    result = convert_to_safetensors(source, tmp_path / "out")
    assert result.copied == ("1_Pooling/config.json", "config.json", "tokenizer.json")
    assert result.left_out == ("flax_model.msgpack", "model.onnx", "tf_model.h5")
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert files == {*result.copied, "model.safetensors"} and not (tmp_path / "out" / "tokenizer.json").is_symlink()


def one(path: Path) -> Path:
    return folder(path, {"pytorch_model.bin": some(1)})


def sharded(path: Path) -> Path:
    return folder(path, {f"pytorch_model-0000{i}-of-00002.bin": some(i) for i in (1, 2)}, index=True)


INDEX = "pytorch_model.bin.index.json"


def rewrite_index(path: Path, **names: object) -> None:
    raw = json.loads((path / INDEX).read_text())
    (path / INDEX).write_text(json.dumps({"weight_map": raw["weight_map"] | names}))


@pytest.mark.parametrize(("make", "change", "part"), [
    (one, lambda p: (p / "pytorch_model.bin").unlink(), "no weights of PyTorch"),
    (one, lambda p: (p / "config.json").unlink(), "has no config.json"),
    (one, lambda p: (p / "pytorch_model.bin").write_bytes(b"x"), "not a file of torch.save"),
    (one, lambda p: (p / "pytorch_model.bin").rename(p / "consolidated.00.pth"), "but no pytorch_model.bin.index.json"),
    (one, lambda p: Path(shutil.copy(p / "pytorch_model.bin", p / "a.pt")) and
     (p / "pytorch_model.bin").rename(p / "b.pt"),
     "has a.pt, b.pt but no"),
    (sharded, lambda p: (p / "pytorch_model-00002-of-00002.bin").unlink(), "1 of 2 weight files are missing"),
    (sharded, lambda p: (p / INDEX).unlink(), "but no pytorch_model.bin.index.json"),
    (sharded, lambda p: (p / INDEX).write_text("["), "is not JSON"),
    (sharded, lambda p: (p / INDEX).write_text("[]"), "no usable weight_map"),
    (sharded, lambda p: rewrite_index(p, x="../x.bin"), "no usable weight_map"),
    (sharded, lambda p: rewrite_index(p, x="pytorch_model-00001-of-00002.bin"), "has no tensor x"),
    (sharded, lambda p: shutil.copy(p / "pytorch_model-00001-of-00002.bin", p / "pytorch_model-00002-of-00002.bin"),
     "1.whole is in pytorch_model-00001-of-00002.bin and in pytorch_model-00002-of-00002.bin"),
])  # fmt: skip
def test_wrong_folders(tmp_path: Path, make: Any, change: Any, part: str) -> None:
    source = make(tmp_path / "old")
    change(source)
    with pytest.raises(CheckpointError) as caught:
        convert_to_safetensors(source, tmp_path / "out")
    assert part in caught.value.what
    assert [path.name for path in tmp_path.iterdir()] == ["old"], "nothing is left"


def test_what_is_there_stays(tmp_path: Path) -> None:
    source, out = one(tmp_path / "old"), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(ConfigError, match="already there"):
        convert_to_safetensors(source, out)
    assert [path.name for path in out.iterdir()] == ["mine"]
    shutil.copy(source / "pytorch_model.bin", source / "model.safetensors")
    with pytest.raises(ConfigError, match="safetensors already"):
        convert_to_safetensors(source, tmp_path / "new")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written if it is full then, and without a rest if it fills up meanwhile."""
    source = one(tmp_path / "old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(MachineError, match="no room"):
            convert_to_safetensors(source, tmp_path / "out")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        convert_to_safetensors(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_memory_is_two_blocks(tmp_path: Path) -> None:
    """Of tensors in order; one in another order is held once."""
    base = torch.zeros(6000, 4000, dtype=torch.bfloat16)  # 48 MB
    peaks = []
    for number, tensor in enumerate((base, base.T)):
        source = folder(tmp_path / f"old{number}", {"pytorch_model.bin": {"w": tensor}})
        tracemalloc.start()
        convert_to_safetensors(source, tmp_path / f"out{number}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 36 << 20 and peaks[1] < 48_000_000 + (36 << 20)
