"""OLMo 2 (arXiv:2501.00656): Llama's layers with norms behind attention and MLP, and over all queries and keys.

By their configuration also OLMo 3 (windows in three of four layers) and EXAONE 4 (arXiv:2507.11407: norms of each query
and key head, and rotary positions in layers with windows alone).
"""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model.decoder import Attention, CausalLM, GatedMLP
from millrace.model.layers import RMSNorm
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class Olmo2Layer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = x + self.post_attention_layernorm(self.self_attn(x, rotary, positions, lengths))
        return h + self.post_feedforward_layernorm(self.mlp(h))


class Olmo2ForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [Olmo2Layer(c, layer) for layer in range(c.n_layers)], RMSNorm(c.hidden_size, c.norm_eps))
