"""Nomic-BERT (arXiv:2402.01613): BERT with rotary positions (arXiv:2104.09864), a gated MLP, and no biases.

T tokens of a run, H heads, D head size.
"""

from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.model import ops
from millrace.model.layers import Embedding, LayerNorm, Linear, rotary_table
from millrace.model.module import Module, ModuleList
from millrace.model.pooling import FirstTokenPooling, MeanPooling, TextEncoder
from millrace.model.tensor import Tensor


class NomicBertAttention(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self._heads, self._width = c.n_heads, c.hidden_size
        self.Wqkv = Linear(c.hidden_size, 3 * c.hidden_size)
        self.out_proj = Linear(c.hidden_size, c.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        T, H, D = x.shape[0], self._heads, self._width // self._heads
        q, k, v = (y.reshape(T, H, D) for y in self.Wqkv(x).split(*[self._width] * 3))  # (T, H, D)
        q, k = ops.rope(q, positions, table), ops.rope(k, positions, table)
        return self.out_proj(ops.full_attention(q, k, v, lengths).reshape(T, self._width))


class NomicBertMLP(Module):
    """fc2(fc11(x) * activation(fc12(x))) (arXiv:2002.05202)."""

    def __init__(self, c: EncoderConfig) -> None:
        self._activation = ops.ACTIVATIONS[c.activation]
        self.fc11, self.fc12 = (Linear(c.hidden_size, c.intermediate_size) for _ in range(2))
        self.fc2 = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self._activation(self.fc12(x)) * self.fc11(x))


class NomicBertLayer(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.attn, self.mlp = NomicBertAttention(c), NomicBertMLP(c)
        self.norm1, self.norm2 = (LayerNorm(c.hidden_size, c.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x, positions, lengths, table))
        return self.norm2(x + self.mlp(x))


class NomicBertEncoder(Module):
    def __init__(self, c: EncoderConfig) -> None:
        assert c.rope is not None, c
        self.layers = ModuleList([NomicBertLayer(c) for _ in range(c.n_layers)])
        self.rotary = rotary_table(c.rope, c.hidden_size // c.n_heads, c.max_context)

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, lengths, self.rotary)
        return x  # (T, hidden)


class NomicBertEmbeddings(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)
        self.token_type_embeddings = Embedding(c.n_types, c.hidden_size)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        return self.word_embeddings(tokens) + self.token_type_embeddings(types)


class NomicBertModel(TextEncoder):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__(c)
        self.embeddings = NomicBertEmbeddings(c)
        self.emb_ln = LayerNorm(c.hidden_size, c.norm_eps)
        self.encoder = NomicBertEncoder(c)

    def _hidden(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.emb_ln(self.embeddings(tokens, types)), positions, lengths)
        return hidden  # (T, hidden)


class NomicBertSentences(MeanPooling, NomicBertModel):
    pass


class NomicBertFirstTokens(FirstTokenPooling, NomicBertModel):
    pass


def nomic_bert_sentences(c: EncoderConfig) -> MeanPooling:
    return NomicBertFirstTokens(c) if c.pooling == "cls" else NomicBertSentences(c)
