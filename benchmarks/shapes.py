"""Real models' shapes with random weights: speed depends on shapes and formats, not on what the weights say."""

import zlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.config import ModelConfig, RopeConfig
from millrace.compile.source import Source
from millrace.model.families import build_model
from millrace.model.module import Weights

_BASE = ModelConfig(
    architecture="LlamaForCausalLM", family="llama", hidden_size=2048, intermediate_size=5632, n_layers=22, n_heads=32,
    n_kv_heads=4, head_dim=64, vocab_size=32000, max_context=8192, norm_eps=1e-5, rope=RopeConfig(theta=10000.0),
    tie_embeddings=False, attention_bias=False, attention_output_bias=False, mlp_bias=False, activation="silu",
    sliding_window=None, dtype="bfloat16", bos_token_id=1, eos_token_ids=(2,), notes=(),
)  # fmt: skip

SHAPES = {
    "tinyllama-1.1b": _BASE,
    "llama-143m": replace(
        _BASE, hidden_size=576, intermediate_size=1536, n_layers=30, n_heads=9, n_kv_heads=3, tie_embeddings=True
    ),
    "qwen2.5-0.5b": replace(
        _BASE, architecture="Qwen2ForCausalLM", family="qwen2", hidden_size=896, intermediate_size=4864, n_layers=24,
        n_heads=14, n_kv_heads=2, vocab_size=151936, tie_embeddings=True, attention_bias=True,
        rope=RopeConfig(theta=1e6), norm_eps=1e-6,
    ),
}  # fmt: skip


def random_source(shape: str, context: int) -> Source:
    """As `source_of`, of one of `SHAPES`."""
    return source_of(replace(SHAPES[shape], max_context=context))


def source_of(config: ModelConfig) -> Source:
    """Normal weights with a standard deviation of 0.02, norms at 1; each tensor from a seed of its own."""
    model = build_model(config)
    sizes = {n: tuple(d for d in p.shape if isinstance(d, int)) for n, p in model.parameters() if "rotary" not in n}

    def load(name: str) -> NDArray[np.float32]:
        if name.endswith("norm.weight"):
            return np.ones(sizes[name], np.float32)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return rng.standard_normal(sizes[name], np.float32) * np.float32(0.02)

    return Source(
        module=model,
        weights=Weights(sizes, load),
        max_context=config.max_context,
        architecture=config.architecture,
        dtype=config.dtype,
    )
