"""Qwen3 (arXiv:2505.09388): Llama's layers with an RMSNorm over each query and key head, before the rotation."""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model.decoder import Attention, CausalLM, GatedMLP
from millrace.model.layers import RMSNorm
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class Qwen3Layer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, layer, head_norms=True)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        return h + self.mlp(self.post_attention_layernorm(h))


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [Qwen3Layer(c, layer) for layer in range(c.n_layers)], RMSNorm(c.hidden_size, c.norm_eps))
