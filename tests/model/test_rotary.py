"""Rotary angles against transformers, for each kind of scaling."""

import numpy as np
import pytest

from millrace.checkpoint.config.model_config import RopeConfig
from millrace.model.layers import inverse_frequencies, rotary_angles

transformers = pytest.importorskip("transformers", reason="the independent truth")

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
KINDS = [
    RopeConfig(theta=10000.0),
    RopeConfig(theta=1e6, kind="linear", factor=4.0),
    RopeConfig(theta=500000.0, kind="llama3", **LLAMA3),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("rope", KINDS, ids=lambda r: r.kind)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_inverse_frequencies(rope: RopeConfig, head_dim: int) -> None:
    parameters = {
        "rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters=parameters,
    )  # fmt: skip
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    assert np.allclose(inverse_frequencies(rope, head_dim), theirs, rtol=1e-6)


def test_angles_are_accurate_far_out() -> None:
    table = rotary_angles(RopeConfig(theta=10000.0), 64, 4096)
    assert table.shape == (4096, 64) and table.dtype == np.float32
    assert np.allclose(table[:, :32] ** 2 + table[:, 32:] ** 2, 1, atol=1e-6)
    assert abs(table[4095, 0] - np.cos(4095.0)) < 1e-7, "the first frequency is 1"
