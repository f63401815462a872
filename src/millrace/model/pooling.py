"""Sentence encoders (arXiv:1908.10084): how the rows of a text become its vector.

T tokens of a run, S sequences.
"""

from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.model import ops
from millrace.model.module import ENCODER, ENCODER_OF_FIRST, Module
from millrace.model.tensor import Tensor


class TextEncoder(Module):
    """Base of the encoders: a row for each token."""

    def __init__(self, c: EncoderConfig) -> None:
        self._normalised = c.normalised

    def _hidden(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        """Return the last layer's rows (T, hidden)."""
        raise NotImplementedError


class MeanPooling(TextEncoder):
    """The pooling of sentence-transformers: here the mean of a text's rows, optionally normalized."""

    signature = ENCODER

    def forward(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        return self._vectors(ops.mean_rows(self._hidden(tokens, types, positions, lengths), lengths))

    def _vectors(self, x: Tensor) -> Tensor:
        return ops.normalise(x) if self._normalised else x  # (S, hidden)


class FirstTokenPooling(MeanPooling):
    """The row of a text's first token, [CLS], instead of the mean."""

    signature = ENCODER_OF_FIRST

    def forward(self, tokens: Tensor, types: Tensor, positions: Tensor, lengths: Tensor, *rows: Tensor) -> Tensor:
        return self._vectors(ops.gather_rows(self._hidden(tokens, types, positions, lengths), *rows))
