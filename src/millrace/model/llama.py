"""Llama 2 and 3 (arXiv:2302.13971, arXiv:2407.21783): pre-norm decoder, rotary positions, grouped queries, SwiGLU.

By their configuration also Mistral (windows), Qwen2 (biases), Qwen3 (norms of each query and key head), SmolLM3 (layers
without rotary positions) and Granite (multipliers).
"""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model.decoder import Attention, CausalLM, GatedMLP, add_scaled
from millrace.model.layers import RMSNorm
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class LlamaLayer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c)
        self._multiplier = c.residual_multiplier

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = add_scaled(x, self.self_attn(self.input_layernorm(x), rotary, positions, lengths), self._multiplier)
        return add_scaled(h, self.mlp(self.post_attention_layernorm(h)), self._multiplier)


class LlamaForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [LlamaLayer(c, layer) for layer in range(c.n_layers)], RMSNorm(c.hidden_size, c.norm_eps))
