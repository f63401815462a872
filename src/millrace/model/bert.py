"""BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692) as encoders of sentences (arXiv:1908.10084): a vector for
each text.

T tokens of a run, S sequences, H heads, D head size.
"""

import re

from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.model import ops
from millrace.model.layers import Embedding, LayerNorm, Linear
from millrace.model.module import CROSS_ENCODER, Module, ModuleList
from millrace.model.pooling import FirstTokenPooling, MeanPooling, TextEncoder
from millrace.model.tensor import Tensor


class BertEmbeddings(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)
        self.position_embeddings = Embedding(c.max_positions, c.hidden_size, first_row=c.first_position)
        self.token_type_embeddings = Embedding(c.n_types, c.hidden_size)
        self.LayerNorm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, tokens: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.token_type_embeddings(types) + self.position_embeddings(positions)
        return self.LayerNorm(x)  # (T, hidden)


class BertSelfAttention(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self._heads, self._size = c.n_heads, c.hidden_size // c.n_heads
        self.query, self.key, self.value = (Linear(c.hidden_size, c.hidden_size, bias=True) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        T = x.shape[0]
        q, k, v = (p(x).reshape(T, self._heads, self._size) for p in (self.query, self.key, self.value))  # (T, H, D)
        return ops.full_attention(q, k, v, lengths).reshape(T, self._heads * self._size)


class BertOutput(Module):
    """Project to the hidden size, add the input, and normalize: BERT's norms come last."""

    def __init__(self, n_in: int, c: EncoderConfig) -> None:
        self.dense = Linear(n_in, c.hidden_size, bias=True)
        self.LayerNorm = LayerNorm(c.hidden_size, c.norm_eps)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(x + self.dense(y))


class BertAttention(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.self = BertSelfAttention(c)
        self.output = BertOutput(c.hidden_size, c)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.output(self.self(x, lengths), x)


class BertIntermediate(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self._activation = ops.ACTIVATIONS[c.activation]
        self.dense = Linear(c.hidden_size, c.intermediate_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._activation(self.dense(x))


class BertLayer(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.attention = BertAttention(c)
        self.intermediate = BertIntermediate(c)
        self.output = BertOutput(c.intermediate_size, c)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(x, lengths)
        return self.output(self.intermediate(x), x)


class BertEncoder(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.layer = ModuleList([BertLayer(c) for _ in range(c.n_layers)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, lengths)
        return x  # (T, hidden)


class BertModel(TextEncoder):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__(c)
        self.embeddings = BertEmbeddings(c)
        self.encoder = BertEncoder(c)

    def _hidden(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embeddings(tokens, types, positions), lengths)
        return hidden  # (T, hidden)


class BertSentences(MeanPooling, BertModel):
    pass


class BertFirstTokens(FirstTokenPooling, BertModel):
    pass


def bert_sentences(c: EncoderConfig) -> MeanPooling:
    return BertFirstTokens(c) if c.pooling == "cls" else BertSentences(c)


class CrossEncoder(BertModel):
    """A score of two texts (arXiv:1901.04085), from the row of their first token."""

    signature = CROSS_ENCODER

    def __init__(self, c: EncoderConfig) -> None:
        super().__init__(c)
        self._is_probability = c.score_activation == "sigmoid"

    def forward(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        y = self._head(ops.gather_rows(self._hidden(tokens, types, positions, lengths), rows))
        return ops.sigmoid(y) if self._is_probability else y  # (S, 1)

    def _head(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class BertPooler(Module):
    def __init__(self, c: EncoderConfig) -> None:
        self.dense = Linear(c.hidden_size, c.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(self.dense(x))


class BertForSequenceClassification(CrossEncoder):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__(c)
        self.pooler = BertPooler(c)
        self.classifier = Linear(c.hidden_size, 1, bias=True)

    def _head(self, x: Tensor) -> Tensor:
        return self.classifier(self.pooler(x))


class RobertaClassificationHead(Module):
    """BERT's pooler and classifier under other names."""

    def __init__(self, c: EncoderConfig) -> None:
        self.dense = Linear(c.hidden_size, c.hidden_size, bias=True)
        self.out_proj = Linear(c.hidden_size, 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(ops.tanh(self.dense(x)))


class RobertaForSequenceClassification(CrossEncoder):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__(c)
        self.classifier = RobertaClassificationHead(c)

    def _head(self, x: Tensor) -> Tensor:
        return self.classifier(x)


POOLED = {"BertForSequenceClassification"}  # architectures whose pooler is used
_PREFIX = re.compile(r"(bert|roberta|mpnet)\.")  # of checkpoints with a head
_HEADS = re.compile(r"pooler\.|cls\.(predictions|seq_relationship)\.|lm_head\.")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # of converted checkpoints


def parameter_name(tensor: str, architecture: str) -> str | None:
    """Return the parameter of a checkpoint's tensor; None for parts that do not affect a text's vector or the score."""
    prefix = _PREFIX.match(tensor)
    name = tensor[prefix.end() :] if prefix else tensor
    if _HEADS.match(name) and not (architecture in POOLED and name.startswith("pooler.")):
        return None
    for old, new in _OLD_NAMES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name
