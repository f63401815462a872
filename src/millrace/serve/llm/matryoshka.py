"""Matryoshka representations (arXiv:2205.13147): shorter vectors (`dimensions`) of models that were trained for them.

A model declares it in its config.json, as for vLLM: `is_matryoshka`, or `matryoshka_dimensions` with the lengths that
it was trained for.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.checkpoint.tokenizer.tokenizer import read_json_object
from millrace.errors import RequestError
from millrace.runtime.encoder_loop import Vectors


@dataclass(frozen=True, slots=True)
class Matryoshka:
    """Supported vector lengths. dimensions: the lengths that the model was trained for; empty: any"""

    dimensions: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> "Matryoshka | None":
        """Read config.json of an engine or a checkpoint; None if the model has vectors of one length only."""
        config = read_json_object(folder / "config.json")
        dimensions = config.get("matryoshka_dimensions")
        if isinstance(dimensions, list) and dimensions and all(type(n) is int and n > 0 for n in dimensions):
            return cls(tuple(sorted(set(dimensions))))
        return cls() if config.get("is_matryoshka") is True else None


def check_dimensions(dimensions: int | None, width: int, trained: Matryoshka | None) -> None:
    """Check a requested vector length. raises RequestError if the model has no vectors of that length"""
    if dimensions in (None, width):
        return
    if trained is None:
        raise RequestError(
            f"dimensions is {dimensions}", f"{width}, the length of this model's vectors",
            "leave dimensions out: the model is not trained for shorter vectors, or its config.json does not say so "
            "(is_matryoshka, matryoshka_dimensions)", "dimensions",
        )  # fmt: skip
    lengths = sorted({*(n for n in trained.dimensions if n < width), width})
    if trained.dimensions and dimensions not in lengths:
        expected = f"one of {', '.join(map(str, lengths))}"
        raise RequestError(f"dimensions is {dimensions}", expected, "choose one of them", "dimensions")
    if dimensions is not None and not 1 <= dimensions <= width:
        raise RequestError(f"dimensions is {dimensions}", f"from 1 to {width}", "choose another length", "dimensions")


def shorten(vectors: Vectors, dimensions: int | None) -> Vectors:
    """Return the first `dimensions` numbers of each vector, scaled to a length of 1; all of them as they are."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    return normalise(vectors[:, :dimensions])


def normalise(vectors: Vectors) -> Vectors:
    """Return vectors of length 1, or of length 0 if all their numbers are 0."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.where(lengths, lengths, 1.0)).astype(np.float32)
    return scaled
