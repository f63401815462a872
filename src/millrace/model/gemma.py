"""Gemma (arXiv:2403.08295): GeGLU, norms that store weight - 1, embeddings scaled by sqrt(hidden), a tied head."""

from millrace.checkpoint.config import ModelConfig
from millrace.model.decoder import Attention, CausalLM, GatedMLP
from millrace.model.layers import RMSNorm
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


def gemma_norm(c: ModelConfig) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.norm_eps, offset=1.0)


class GemmaLayer(Module):
    def __init__(self, c: ModelConfig) -> None:
        self.input_layernorm = gemma_norm(c)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = gemma_norm(c)
        self.mlp = GatedMLP(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        return h + self.mlp(self.post_attention_layernorm(h))


class GemmaForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        layers = [GemmaLayer(c) for _ in range(c.n_layers)]
        super().__init__(c, layers, gemma_norm(c), embedding_scale=float(c.hidden_size**0.5))
