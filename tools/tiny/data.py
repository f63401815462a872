"""From documents to batches: tokens with loss weights, packed into rows; a function of the position in the data."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny.world import Document, document


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of T tokens: inputs, the token that follows each, its loss weight, and the document each belongs to."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    weights: Tensor  # (B, T) float32
    documents: Tensor  # (B, T) int64


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows, their length, and how long the documents in them are."""

    rows: int
    length: int
    episodes: int = 1


def encode(tokenizer: Tokenizer, pieces: Document) -> tuple[list[int], list[float]]:
    """Tokens of a document and the loss weight of each."""
    tokens: list[int] = []
    weights: list[float] = []
    encoded = tokenizer.encode_batch_fast([p.text for p in pieces], add_special_tokens=False)
    for piece, part in zip(pieces, encoded, strict=True):
        tokens += part.ids
        weights += [piece.weight] * len(part.ids)
    return tokens, weights


def next_batch(tokenizer: Tokenizer, position: int, shape: Shape) -> tuple[Batch, int]:
    """The batch that starts with document number `position`, and the position of the next one.

    Documents follow each other in a row until it is full; what does not fit of the last one is dropped.
    """
    rows: list[tuple[list[int], list[float], list[int]]] = []
    for _ in range(shape.rows):
        tokens: list[int] = []
        weights: list[float] = []
        numbers: list[int] = []
        while len(tokens) <= shape.length:
            some, their_weights = encode(tokenizer, document(position, shape.episodes))
            tokens += some
            weights += their_weights
            numbers += [position] * len(some)
            position += 1
        end = shape.length + 1
        rows.append((tokens[:end], weights[:end], numbers[:end]))
    tokens_t = torch.tensor([r[0] for r in rows])  # (B, T+1)
    weights_t = torch.tensor([r[1] for r in rows])
    numbers_t = torch.tensor([r[2] for r in rows])
    return Batch(tokens_t[:, :-1], tokens_t[:, 1:], weights_t[:, 1:], numbers_t[:, :-1]), position
