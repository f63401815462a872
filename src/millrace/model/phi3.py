"""Phi-3, 3.5, 4 and 4-mini (arXiv:2404.14219): Llama's layers, with q, k and v, and gate and up, in one matrix each."""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model import ops
from millrace.model.decoder import CausalLM, FusedGatedMLP
from millrace.model.layers import Linear, RMSNorm
from millrace.model.module import Module, Table
from millrace.model.tensor import Tensor


class Phi3Attention(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self._window = c.window_of(layer)
        self._heads, self._kv_heads, self._size = c.n_heads, c.n_kv_heads, c.head_dim
        self._widths = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.qkv_proj = Linear(c.hidden_size, sum(self._widths))
        self.o_proj = Linear(c.n_heads * c.head_dim, c.hidden_size)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        T = x.shape[0]
        q, k, v = self.qkv_proj(x).split(*self._widths)
        q = ops.rope(q.reshape(T, self._heads, self._size), positions, rotary)  # (T, H, D)
        k = ops.rope(k.reshape(T, self._kv_heads, self._size), positions, rotary)  # (T, K, D)
        y = ops.attention(q, k, v.reshape(T, self._kv_heads, self._size), positions, lengths, window=self._window)
        return self.o_proj(y.reshape(T, self._heads * self._size))


class Phi3Layer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Phi3Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = FusedGatedMLP(c)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), rotary, positions, lengths)
        return h + self.mlp(self.post_attention_layernorm(h))


class Phi3ForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c, [Phi3Layer(c, layer) for layer in range(c.n_layers)], RMSNorm(c.hidden_size, c.norm_eps))
