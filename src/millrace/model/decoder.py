"""Common parts of decoders: attention with rotary positions, gated MLP, embedding and head.

T tokens of a step, S sequences, R rows for which logits are computed, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.model import ops
from millrace.model.layers import Embedding, LayerNorm, Linear, RMSNorm, rotary_table
from millrace.model.module import DECODER, Module, ModuleList, Parameter, Table
from millrace.model.tensor import Tensor


class Attention(Module):
    """Grouped queries (arXiv:2305.13245).

    layer: determines the window (arXiv:2310.06825 section 2), unless no sequence is longer, and whether it rotates
    offset: of the weights of the norms of queries and keys, as in RMSNorm
    output: the name of the last projection in checkpoints
    """

    def __init__(self, c: ModelConfig, layer: int, *, offset: float = 0.0, output: str = "o_proj") -> None:
        self._window, self._scale, self._softcap = c.window_of(layer), c.attention_scale, c.attention_softcap
        self._heads, self._kv_heads, self._size = c.n_heads, c.n_kv_heads, c.head_dim
        self._qk_norm, self._rotates, self._interleaved = c.qk_norm, c.has_rotary(layer), c.rope.interleaved
        self.q_proj = Linear(c.hidden_size, c.n_heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.attention_bias)
        self._output = output
        setattr(self, output, Linear(c.n_heads * c.head_dim, c.hidden_size, bias=c.attention_output_bias))
        if c.qk_norm:
            heads, kv_heads = (c.n_heads, c.n_kv_heads) if c.qk_norm == "full" else (1, 1)
            self.q_norm = RMSNorm(heads * c.head_dim, c.norm_eps, offset=offset)
            self.k_norm = RMSNorm(kv_heads * c.head_dim, c.norm_eps, offset=offset)
        if c.attention_sinks:
            self.sinks = Parameter(c.n_heads)

    def forward(self, x: Tensor, rotary: Table, positions: Tensor, lengths: Tensor) -> Tensor:
        T = x.shape[0]
        q, k = self.q_proj(x), self.k_proj(x)
        if self._qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.reshape(T, self._heads, self._size)  # (T, H, D)
        k = k.reshape(T, self._kv_heads, self._size)  # (T, K, D)
        v = self.v_proj(x).reshape(T, self._kv_heads, self._size)  # (T, K, D)
        if self._qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self._rotates:
            q, k = (ops.rope(heads, positions, rotary, interleaved=self._interleaved) for heads in (q, k))
        sinks = getattr(self, "sinks", None)
        y = ops.attention(
            q, k, v, positions, lengths, self._scale, window=self._window, softcap=self._softcap, sinks=sinks
        )
        projected: Tensor = getattr(self, self._output)(y.reshape(T, self._heads * self._size))
        return projected


def add_scaled(x: Tensor, change: Tensor, multiplier: float) -> Tensor:
    """Return x + change * multiplier: the residual stream after attention or MLP."""
    return x + (change if multiplier == 1 else change * multiplier)


def build_norm(c: ModelConfig) -> RMSNorm | LayerNorm:
    """Return the norm of the residual stream that `c.norm` names."""
    if c.norm == "rms":
        return RMSNorm(c.hidden_size, c.norm_eps)
    offset = 1.0 if c.norm == "layer_offset" else 0.0
    return LayerNorm(c.hidden_size, c.norm_eps, offset=offset, bias=c.norm != "layer_without_bias")


class MLP(Module):
    """down(activation(up(x)))."""

    def __init__(self, c: ModelConfig) -> None:
        self._activation = ops.ACTIVATIONS[c.activation]
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._activation(self.up_proj(x)))


class GatedMLP(Module):
    """down(activation(gate(x)) * up(x)) (arXiv:2002.05202). size: its width; 0: as configured"""

    def __init__(self, c: ModelConfig, size: int = 0) -> None:
        size = size or c.intermediate_size
        self._activation = ops.ACTIVATIONS[c.activation]
        self.gate_proj = Linear(c.hidden_size, size, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, size, bias=c.mlp_bias)
        self.down_proj = Linear(size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class FusedGatedMLP(Module):
    """As GatedMLP, of checkpoints that store gate and up as one matrix."""

    def __init__(self, c: ModelConfig) -> None:
        self._activation, self._width = ops.ACTIVATIONS[c.activation], c.intermediate_size
        self.gate_up_proj = Linear(c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).split(self._width, self._width)
        return self.down_proj(self._activation(gate) * up)


class Decoder(Module):
    """Embedding, layers, norm. Layers with a window may have rotary angles of their own (arXiv:2503.19786)."""

    def __init__(
        self, c: ModelConfig, layers: Sequence[Module], norm: Module, embedding_scale: float, norm_name: str
    ) -> None:
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, scale=embedding_scale)
        self.rotary = rotary_table(c.rope, c.head_dim, c.max_context)
        if c.local_rope is not None:
            self.local_rotary = rotary_table(c.local_rope, c.head_dim, c.max_context)
        self._is_local = [c.local_rope is not None and window > 0 for window in c.windows or (0,) * c.n_layers]
        self.layers = ModuleList(list(layers))
        self._norm_name = norm_name
        setattr(self, norm_name, norm)

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)  # (T, hidden)
        for layer, is_local in zip(self.layers, self._is_local, strict=True):
            x = layer(x, self.local_rotary if is_local else self.rotary, positions, lengths)
        normed: Tensor = getattr(self, self._norm_name)(x)
        return normed


class CausalLM(Module):
    """A decoder with its head, which may be the embedding. norm_name: of the last norm, in checkpoints"""

    signature = DECODER

    def __init__(
        self, c: ModelConfig, layers: Sequence[Module], norm: Module, *, embedding_scale: float | None = None,
        norm_name: str = "norm",
    ) -> None:  # fmt: skip
        scale = c.embedding_multiplier if embedding_scale is None else embedding_scale
        self.model = Decoder(c, layers, norm, scale, norm_name)
        tied = self.model.embed_tokens.weight if c.tie_embeddings else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=c.head_bias, weight=tied)
        self._softcap, self._multiplier = c.logits_softcap, c.logits_multiplier

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        x = self.model(tokens, positions, lengths)
        logits = self.lm_head(ops.gather_rows(x, rows))  # (R, vocabulary)
        if self._multiplier != 1:
            logits = logits * self._multiplier
        return ops.softcap(logits, self._softcap) if self._softcap else logits
