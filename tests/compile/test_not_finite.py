"""Weights that are not finite, or that a narrower type cannot hold: the build says which, and leaves nothing behind."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from millrace.errors import CheckpointError
from millrace.kernels.matmul.pack import finite, rounded_codes
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build

TENSORS = (
    "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias",
    "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(
        tmp_path_factory.mktemp("qwen2") / "checkpoint", "qwen2", seed=6, max_shard_size="1GB", hidden_size=64,
        intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=1003,
        tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8", "w4a16"])
@pytest.mark.parametrize("name", TENSORS)
def test_the_build_names_the_tensor(name: str, precision: str, checkpoint: Path, tmp_path: Path) -> None:
    (shard,) = checkpoint.glob("*.safetensors")
    whole = shard.read_bytes()
    tensors = safetensors.numpy.load_file(shard)
    for bad in (np.nan, np.inf, -np.inf):
        tensors[name].flat[-3] = bad
        safetensors.numpy.save_file(tensors, shard, {"format": "pt"})
        try:
            with pytest.raises(CheckpointError, match=f"{name}.*: weights that are not finite"):
                build(checkpoint, tmp_path / "engine", precision, group=32)
        finally:
            shard.write_bytes(whole)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dtype", "largest"), [(np.float16, 65504.0), (ml_dtypes.bfloat16, 3.389e38)])
def test_what_rounds_to_infinity_is_refused(dtype: type[np.generic], largest: float) -> None:
    wide = np.array([largest, -largest, 0, 1e-40], np.float32)
    assert np.isfinite(finite(wide, np.dtype(dtype))).all()
    with pytest.raises(CheckpointError, match=f"too large for {np.dtype(dtype).name}"):
        finite(wide * np.float32(1.004), np.dtype(dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_too_small_for_its_scales_is_refused(bits: int) -> None:
    """A matrix of which most would change; but not for the sake of groups that are next to nothing beside others."""
    w = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    for size in (1e-3, 1e-4):
        q = rounded_codes(w * np.float32(size), bits, 32)
        kept = q.codes.reshape(64, 8, 32) * q.scales.astype(np.float32)[:, :, None]
        error = np.abs(kept.reshape(64, 256) - w * np.float32(size)).max()
        assert error <= 4.5 * size / 2 ** (bits - 1) + 2 ** (bits - 1) * 2.0**-25  # a step; the rounding of scales
    for size in (1e-7, 1e-9, 1e-30):
        with pytest.raises(CheckpointError, match="too small for the scales"):
            rounded_codes(w * np.float32(size), bits, 32)
    w[1:, 32:] *= np.float32(1e-9)
    w[5] = 0
    assert rounded_codes(w, bits, 32).codes[0].min() == -(1 << bits - 1)
    rounded_codes(np.zeros((32, 64), np.float32), bits, 32)
