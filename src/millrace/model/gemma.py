"""Gemma (arXiv:2403.08295): GeGLU, norms that store weight - 1, embeddings scaled by sqrt(hidden), a tied head.

Gemma 2 (arXiv:2408.00118) has windows in every other layer, norms before and after each part of a layer, and soft caps
of scores and logits. Gemma 3 (arXiv:2503.19786) has windows in five of six layers, with rotary angles of their own, and
norms of each query and key head in place of the caps of scores.
"""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model.decoder import Attention, CausalLM, GatedMLP
from millrace.model.layers import RMSNorm
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


def gemma_norm(c: ModelConfig) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.norm_eps, offset=1.0)


class GemmaLayer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = gemma_norm(c)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = gemma_norm(c)
        self.mlp = GatedMLP(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        return h + self.mlp(self.post_attention_layernorm(h))


class GemmaForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        layers = [GemmaLayer(c, layer) for layer in range(c.n_layers)]
        super().__init__(c, layers, gemma_norm(c), embedding_scale=float(c.hidden_size**0.5))


class Gemma2Layer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = gemma_norm(c)
        self.self_attn = Attention(c, layer, offset=1.0)
        self.post_attention_layernorm = gemma_norm(c)
        self.pre_feedforward_layernorm = gemma_norm(c)
        self.mlp = GatedMLP(c)
        self.post_feedforward_layernorm = gemma_norm(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        h = x + self.post_attention_layernorm(attended)
        return h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))


class Gemma2ForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        layers = [Gemma2Layer(c, layer) for layer in range(c.n_layers)]
        super().__init__(c, layers, gemma_norm(c), embedding_scale=float(c.hidden_size**0.5))
