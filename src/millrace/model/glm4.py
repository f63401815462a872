"""GLM-4 (arXiv:2406.12793): Llama's layers with gate and up in one matrix, and half of each head rotated, interleaved.

The 0414 models have a norm behind attention and MLP, too.
"""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model.decoder import Attention, CausalLM, FusedGatedMLP
from millrace.model.layers import RMSNorm
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class GlmLayer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = FusedGatedMLP(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        return h + self.mlp(self.post_attention_layernorm(h))


class Glm4Layer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_self_attn_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = FusedGatedMLP(c)
        self.post_mlp_layernorm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        h = x + self.post_self_attn_layernorm(attended)
        return h + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(h)))


class GlmForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [GlmLayer(c, layer) for layer in range(c.n_layers)], RMSNorm(c.hidden_size, c.norm_eps))


class Glm4ForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [Glm4Layer(c, layer) for layer in range(c.n_layers)], RMSNorm(c.hidden_size, c.norm_eps))
