"""GPT-OSS folders with experts in MXFP4: values as transformers reads them, and the engine's answers."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.mxfp4.tensors import StackedExpertTensors
from millrace.errors import CheckpointError
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, last_logits
from tests.support.tolerance import assert_no_worse

STACKS = ("gate_up_proj", "down_proj")
Arrays = dict[str, np.ndarray]


def write(folder: Path, seed: int = 0, lowest: int = 112) -> tuple[Path, Path]:
    """A folder with experts in codes, and one with the floats that transformers makes of them."""
    plain = random_checkpoint(folder / "plain", "gpt_oss", seed, max_shard_size="1GB", intermediate_size=96)
    arrays: Arrays = load_file(plain / "model.safetensors")
    coded, rng = dict(arrays), np.random.default_rng(seed)
    for name in [n for n in arrays if n.endswith(STACKS)]:
        experts, n_in, n_out = arrays[name].shape
        blocks = rng.integers(0, 256, (experts, n_out, n_in // 32, 16), np.uint8)
        scales = rng.integers(lowest, 125, blocks.shape[:3], np.uint8)
        floats = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
        arrays[name] = floats.numpy().copy()
        del coded[name]
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(arrays, plain / "model.safetensors", {"format": "pt"})
    mxfp4 = folder / "mxfp4"
    mxfp4.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (mxfp4 / file.name).write_bytes(file.read_bytes())
    edit(mxfp4, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    save_file(coded, mxfp4 / "model.safetensors", {"format": "pt"})
    return mxfp4, plain


def edit(folder: Path, **keys: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **keys}))


def test_values_and_codes(tmp_path: Path) -> None:
    mxfp4, plain = write(tmp_path)
    tensors, floats = Checkpoint.open(mxfp4).tensors, Checkpoint.open(plain).tensors
    assert isinstance(tensors, StackedExpertTensors)
    assert list(tensors) and set(tensors) == set(floats)
    for name in tensors:
        exact = floats.load(name)
        assert (tensors.load(name) == exact).all(), name
        stored = tensors.stored(name, 8, 32)
        is_expert = ".experts." in name and name.endswith(".weight")
        assert (stored is not None) == is_expert == (tensors.format(name) is not None)
        if stored:
            assert (stored.dequantise() == exact).all()
    raw = load_file(plain / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    assert (tensors.load("model.layers.1.mlp.experts.4.up_proj.weight") == raw[4, :, 1::2].T).all()


@pytest.mark.parametrize(("precision", "own"), [(None, "w8a16"), ("fp32", "fp32")])
def test_logits(precision: str | None, own: str, tmp_path: Path) -> None:
    """By default the codes are used as they are; in float32 the answers are those of transformers."""
    mxfp4, plain = write(tmp_path)
    engine = build(mxfp4, tmp_path / "engine", precision)
    assert engine.manifest.precision["default"] == own
    prompt = np.random.default_rng(0).integers(3, 1003, 80).tolist()
    theirs = []
    for dtype in (torch.float64, torch.float32 if own == "fp32" else torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        with torch.no_grad():
            theirs.append(model(torch.tensor([prompt])).logits[0, -1].double().numpy())
    with closing(engine.executor(n_pages=4)) as executor:
        ours = last_logits(engine, executor, [prompt])[0]
    assert_no_worse(ours, theirs[1], theirs[0], factor=3.0)


def test_scales_beyond_float16_are_refused_for_integers(tmp_path: Path) -> None:
    mxfp4, _ = write(tmp_path, lowest=90)
    with pytest.raises(CheckpointError, match="has a scale of 2"):
        build(mxfp4, tmp_path / "engine", None)
    build(mxfp4, tmp_path / "floats", "bf16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("model.layers.1.mlp.experts.down_proj_scales"), "has no tensor"),
        (lambda a: a.update({"model.layers.0.mlp.extra_blocks": np.zeros((2, 2), np.uint8)}), "belongs to no expert"),
        (
            lambda a: a.update({
                "model.layers.0.mlp.experts.down_proj_scales": a["model.layers.0.mlp.experts.down_proj_scales"][1:]
            }),
            "by config.json",
        ),
    ],
)  # fmt: skip
def test_damaged_stacks(change: object, message: str, tmp_path: Path) -> None:
    mxfp4, _ = write(tmp_path)
    arrays: Arrays = load_file(mxfp4 / "model.safetensors")
    change(arrays)  # type: ignore[operator]
    save_file(arrays, mxfp4 / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(mxfp4)


def test_only_experts_of_gpt_oss(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "llama", "llama")
    edit(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match="quant_method"):
        Checkpoint.open(folder)
