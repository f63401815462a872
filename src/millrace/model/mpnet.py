"""MPNet (arXiv:2004.09297) as an encoder of sentences: BERT with biases of scores by distance, equal in all layers.

T tokens of a run, S sequences, H heads, D head size.
"""

from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.model import ops
from millrace.model.bert import BertIntermediate, BertOutput
from millrace.model.layers import Embedding, LayerNorm, Linear
from millrace.model.module import Module, ModuleList, Parameter
from millrace.model.pooling import FirstTokenPooling, MeanPooling, TextEncoder
from millrace.model.tensor import Tensor


class MPNetEmbeddings(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)
        self.position_embeddings = Embedding(c.max_positions, c.hidden_size, first_row=c.first_position)
        self.LayerNorm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.LayerNorm(self.word_embeddings(tokens) + self.position_embeddings(positions))  # (T, hidden)


class MPNetSelfAttention(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self._heads, self._size, self._positions = c.n_heads, c.hidden_size // c.n_heads, c.max_positions
        self.q, self.k, self.v, self.o = (Linear(c.hidden_size, c.hidden_size, bias=True) for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor, biases: Tensor) -> Tensor:
        T = x.shape[0]
        q, k, v = (p(x).reshape(T, self._heads, self._size) for p in (self.q, self.k, self.v))  # (T, H, D)
        y = ops.full_attention(q, k, v, lengths, biases=biases, positions=self._positions)
        return self.o(y.reshape(T, self._heads * self._size))


class MPNetAttention(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.attn = MPNetSelfAttention(c)
        self.LayerNorm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, lengths: Tensor, biases: Tensor) -> Tensor:
        return self.LayerNorm(x + self.attn(x, lengths, biases))


class MPNetLayer(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.attention = MPNetAttention(c)
        self.intermediate = BertIntermediate(c)
        self.output = BertOutput(c.intermediate_size, c)

    def forward(self, x: Tensor, lengths: Tensor, biases: Tensor) -> Tensor:
        x = self.attention(x, lengths, biases)
        return self.output(self.intermediate(x), x)


class DistanceBiases(Module):
    """A bias for each bucket of distances and each head."""

    def __init__(self, c: EncoderConfig) -> None:
        self.weight = Parameter(c.distance_buckets, c.n_heads)


class MPNetEncoder(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.layer = ModuleList([MPNetLayer(c) for _ in range(c.n_layers)])
        self.relative_attention_bias = DistanceBiases(c)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, lengths, self.relative_attention_bias.weight)
        return x  # (T, hidden)


class MPNetModel(TextEncoder):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__(c)
        self.embeddings = MPNetEmbeddings(c)
        self.encoder = MPNetEncoder(c)

    def _hidden(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embeddings(tokens, positions), lengths)
        return hidden  # (T, hidden)


class MPNetSentences(MeanPooling, MPNetModel):
    pass


class MPNetFirstTokens(FirstTokenPooling, MPNetModel):
    pass


def mpnet_sentences(c: EncoderConfig) -> MeanPooling:
    return MPNetFirstTokens(c) if c.pooling == "cls" else MPNetSentences(c)
