"""Real models' shapes with random weights: speed depends on shapes and formats, not on what the weights say."""

from dataclasses import replace

from millrace.checkpoint.config.expert_config import ExpertConfig
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.checkpoint.config.routing import Routing
from millrace.compile.random_weights import source_of
from millrace.compile.source import Source

_BASE = ModelConfig(
    architecture="LlamaForCausalLM", family="llama", hidden_size=2048, intermediate_size=5632, n_layers=22, n_heads=32,
    n_kv_heads=4, head_dim=64, vocab_size=32000, max_context=8192, norm_eps=1e-5, rope=RopeConfig(theta=10000.0),
    tie_embeddings=False, attention_bias=False, attention_output_bias=False, mlp_bias=False, activation="silu",
    dtype="bfloat16", bos_token_id=1, eos_token_ids=(2,), notes=(),
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
    # 16 experts of which a token uses 2: 0.6 B of 3 B parameters.
    "moe-3b": replace(
        _BASE, architecture="Qwen3MoeForCausalLM", family="qwen3_moe", hidden_size=1536, n_layers=24, n_heads=24,
        n_kv_heads=8, qk_norm="head", norm_eps=1e-6, rope=RopeConfig(theta=1e6),
        experts=ExpertConfig(
            count=16, size=1536, routing=Routing(chosen=2, normalise=True), layers=(True,) * 24
        ),
    ),
}  # fmt: skip


def random_source(shape: str, context: int) -> Source:
    """As `source_of`, of one of `SHAPES`."""
    return source_of(replace(SHAPES[shape], max_context=context))
