"""Rotary angles against transformers, for each kind of scaling."""

import numpy as np
import pytest

from millrace.checkpoint.config.model_config import read_config
from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.model.layers import inverse_frequencies, rotary_angles

transformers = pytest.importorskip("transformers", reason="the independent truth")

YARN = {"kind": "yarn", "theta": 10000.0, "original_max_positions": 4096}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
KINDS = [
    RopeConfig(theta=10000.0),
    RopeConfig(theta=1e6, kind="linear", factor=4.0),
    RopeConfig(theta=500000.0, kind="llama3", **LLAMA3),  # type: ignore[arg-type]
    RopeConfig(**YARN, factor=16.0),  # type: ignore[arg-type]
    RopeConfig(**YARN, factor=4.0, beta_fast=8.0, beta_slow=2.0),  # type: ignore[arg-type]
    RopeConfig(**YARN, factor=4.0, truncate=False),  # type: ignore[arg-type]
    RopeConfig(**YARN, factor=4.0, beta_fast=4096.0, beta_slow=4095.5),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("rope", KINDS, ids=lambda r: r.kind)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_inverse_frequencies(rope: RopeConfig, head_dim: int) -> None:
    parameters = {
        "rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions, "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow, "truncate": rope.truncate,
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


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0}, {"factor": 8.0, "attention_factor": 1.3},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"factor": 1.0}, {"factor": 32.0, "mscale": 0.5},
    ],
)  # fmt: skip
def test_cosines_of_yarn_have_its_attention_factor(scaling: dict[str, float]) -> None:
    """At position 0 a cosine is the factor."""
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 512, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=4096, rope_parameters=parameters
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).attention_scaling
    rope = read_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    assert rotary_angles(rope, 64, 4)[0, 0] == np.float32(theirs)
