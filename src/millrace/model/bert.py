"""BERT (arXiv:1810.04805) as an encoder of sentences (arXiv:1908.10084): the mean of its rows, as a unit vector.

T tokens of a run, S sequences, H heads, D head size.
"""

from dataclasses import dataclass

from millrace.model import ops
from millrace.model.layers import Embedding, LayerNorm, Linear
from millrace.model.module import ENCODER, Module, ModuleList
from millrace.model.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    max_positions: int
    n_types: int
    norm_eps: float
    activation: str  # of ops.ACTIVATIONS


class BertEmbeddings(Module):
    def __init__(self, c: BertConfig) -> None:
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)
        self.position_embeddings = Embedding(c.max_positions, c.hidden_size)
        self.token_type_embeddings = Embedding(c.n_types, c.hidden_size)
        self.LayerNorm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, tokens: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.token_type_embeddings(types) + self.position_embeddings(positions)
        return self.LayerNorm(x)  # (T, hidden)


class BertSelfAttention(Module):
    def __init__(self, c: BertConfig) -> None:
        self._heads, self._size = c.n_heads, c.hidden_size // c.n_heads
        self.query, self.key, self.value = (Linear(c.hidden_size, c.hidden_size, bias=True) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        T = x.shape[0]
        q, k, v = (p(x).reshape(T, self._heads, self._size) for p in (self.query, self.key, self.value))  # (T, H, D)
        return ops.full_attention(q, k, v, lengths).reshape(T, self._heads * self._size)


class BertOutput(Module):
    """Back to the hidden size, added to what went in, and normalised: BERT's norms come last."""

    def __init__(self, n_in: int, c: BertConfig) -> None:
        self.dense = Linear(n_in, c.hidden_size, bias=True)
        self.LayerNorm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(x + self.dense(y))


class BertAttention(Module):
    def __init__(self, c: BertConfig) -> None:
        self.self = BertSelfAttention(c)
        self.output = BertOutput(c.hidden_size, c)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.output(self.self(x, lengths), x)


class BertIntermediate(Module):
    def __init__(self, c: BertConfig) -> None:
        self._activation = ops.ACTIVATIONS[c.activation]
        self.dense = Linear(c.hidden_size, c.intermediate_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._activation(self.dense(x))


class BertLayer(Module):
    def __init__(self, c: BertConfig) -> None:
        self.attention = BertAttention(c)
        self.intermediate = BertIntermediate(c)
        self.output = BertOutput(c.intermediate_size, c)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(x, lengths)
        return self.output(self.intermediate(x), x)


class BertEncoder(Module):
    def __init__(self, c: BertConfig) -> None:
        self.layer = ModuleList([BertLayer(c) for _ in range(c.n_layers)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, lengths)
        return x  # (T, hidden)


class BertSentences(Module):
    """Mean pooling and normalisation over BertModel, as the folders of sentence-transformers ask for it."""

    signature = ENCODER

    def __init__(self, c: BertConfig) -> None:
        self.embeddings = BertEmbeddings(c)
        self.encoder = BertEncoder(c)

    def forward(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        x = self.encoder(self.embeddings(tokens, types, positions), lengths)
        return ops.normalise(ops.mean_rows(x, lengths))  # (S, hidden)
