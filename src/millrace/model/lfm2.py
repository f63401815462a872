"""LFM2 (arXiv:2511.23404): gated short convolutions in most layers, grouped-query attention in the others.

A convolution layer keeps its last input rows, whose number does not grow with the sequence.
"""

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model import ops
from millrace.model.decoder import CausalLM
from millrace.model.experts import ExpertMLP
from millrace.model.layers import Linear, RMSNorm
from millrace.model.module import Module, Parameter, Table
from millrace.model.tensor import Tensor


class ShortConvolution(Module):
    """The weights of a depthwise convolution over `taps` tokens, named as torch.nn.Conv1d's."""

    def __init__(self, n: int, taps: int, *, bias: bool) -> None:
        self.weight = Parameter(n, 1, taps)
        if bias:
            self.bias = Parameter(n)

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        return ops.short_conv(x, self.weight, positions, lengths, getattr(self, "bias", None))


class GatedConvolution(Module):
    """out(c * conv(b * x)), where b, c and x are columns of one projection."""

    def __init__(self, c: ModelConfig) -> None:
        self._width = c.hidden_size
        self.in_proj = Linear(c.hidden_size, 3 * c.hidden_size, bias=c.conv_bias)
        self.conv = ShortConvolution(c.hidden_size, c.conv_taps, bias=c.conv_bias)
        self.out_proj = Linear(c.hidden_size, c.hidden_size, bias=c.conv_bias)

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        before, behind, value = self.in_proj(x).split(self._width, self._width, self._width)
        return self.out_proj(behind * self.conv(before * value, positions, lengths))


class Lfm2Attention(Module):
    """Grouped queries; each query and key head is normalized before the rotation."""

    def __init__(self, c: ModelConfig) -> None:
        self._heads, self._kv_heads, self._size = c.n_heads, c.n_kv_heads, c.head_dim
        self.q_proj = Linear(c.hidden_size, c.n_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim)
        self.out_proj = Linear(c.n_heads * c.head_dim, c.hidden_size)
        self.q_layernorm, self.k_layernorm = RMSNorm(c.head_dim, c.norm_eps), RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        T = x.shape[0]
        q = self.q_layernorm(self.q_proj(x).reshape(T, self._heads, self._size))  # (T, H, D)
        k = self.k_layernorm(self.k_proj(x).reshape(T, self._kv_heads, self._size))  # (T, K, D)
        v = self.v_proj(x).reshape(T, self._kv_heads, self._size)  # (T, K, D)
        q, k = ops.rope(q, positions, rotary), ops.rope(k, positions, rotary)
        return self.out_proj(ops.attention(q, k, v, positions, lengths).reshape(T, self._heads * self._size))


class FeedForward(Module):
    """w2(silu(w1(x)) * w3(x)) (arXiv:2002.05202)."""

    def __init__(self, c: ModelConfig) -> None:
        self.w1 = Linear(c.hidden_size, c.intermediate_size)
        self.w3 = Linear(c.hidden_size, c.intermediate_size)
        self.w2 = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.silu(self.w1(x)) * self.w3(x))


class Lfm2Layer(Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        self._convolves = c.convolves[layer]
        if self._convolves:
            self.conv = GatedConvolution(c)
        else:
            self.self_attn = Lfm2Attention(c)
        self.operator_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.feed_forward = ExpertMLP(c) if c.has_experts(layer) else FeedForward(c)
        self.ffn_norm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        normed = self.operator_norm(x)
        if self._convolves:
            h = x + self.conv(normed, positions, lengths)
        else:
            h = x + self.self_attn(normed, rotary, positions, lengths)
        return h + self.feed_forward(self.ffn_norm(h))


class Lfm2ForCausalLM(CausalLM):
    def __init__(self, c: ModelConfig) -> None:
        layers = [Lfm2Layer(c, layer) for layer in range(c.n_layers)]
        super().__init__(c, layers, RMSNorm(c.hidden_size, c.norm_eps), norm_name="embedding_norm")
