"""Llama 2 and 3 (arXiv:2302.13971, arXiv:2407.21783): pre-norm decoder, rotary positions, grouped queries, SwiGLU.

T tokens of a step, H query heads, K key/value heads, D head size.
"""

from millrace.checkpoint.config import ModelConfig
from millrace.graph.types import T
from millrace.model import ops
from millrace.model.layers import Embedding, Linear, RMSNorm, rotary_table
from millrace.model.module import Module, ModuleList, Table
from millrace.model.tensor import Tensor


class LlamaAttention(Module):
    def __init__(self, c: ModelConfig) -> None:
        self._heads, self._kv_heads, self._size = c.n_heads, c.n_kv_heads, c.head_dim
        self.q_proj = Linear(c.hidden_size, c.n_heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = Linear(c.n_heads * c.head_dim, c.hidden_size, bias=c.attention_output_bias)

    def forward(self, x: Tensor, rotary: Table) -> Tensor:
        q = self.q_proj(x).reshape(T, self._heads, self._size)  # (T, H, D)
        k = self.k_proj(x).reshape(T, self._kv_heads, self._size)  # (T, K, D)
        v = self.v_proj(x).reshape(T, self._kv_heads, self._size)  # (T, K, D)
        q, k = self.normalise(q, k)
        y = ops.attention(ops.rope(q, rotary), ops.rope(k, rotary), v)  # (T, H, D)
        return self.o_proj(y.reshape(T, self._heads * self._size))

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing in Llama; families with query and key norms say so here."""
        return q, k


class LlamaMLP(Module):
    def __init__(self, c: ModelConfig) -> None:
        self._activation = ops.ACTIVATIONS[c.activation]
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(Module):
    attention: type[LlamaAttention] = LlamaAttention
    norm_offset = 0.0

    def __init__(self, c: ModelConfig) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps, offset=self.norm_offset)
        self.self_attn = self.attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps, offset=self.norm_offset)
        self.mlp = LlamaMLP(c)

    def forward(self, x: Tensor, rotary: Table) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), rotary)
        return h + self.mlp(self.post_attention_layernorm(h))


class LlamaModel(Module):
    def __init__(self, c: ModelConfig, layer: type[LlamaLayer], embedding_scale: float) -> None:
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, scale=embedding_scale)
        self.rotary = rotary_table(c.rope, c.head_dim, c.max_context)
        self.layers = ModuleList([layer(c) for _ in range(c.n_layers)])
        self.norm = RMSNorm(c.hidden_size, c.norm_eps, offset=layer.norm_offset)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)  # (T, hidden)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.norm(x)


class LlamaForCausalLM(Module):
    layer: type[LlamaLayer] = LlamaLayer

    def __init__(self, c: ModelConfig) -> None:
        self.model = LlamaModel(c, self.layer, self.embedding_scale(c))
        tied = self.model.embed_tokens.weight if c.tie_embeddings else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size, weight=tied)

    def embedding_scale(self, c: ModelConfig) -> float:
        return 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(ops.sampled_rows(self.model(tokens)))  # (S, vocabulary)
