"""Encoder inputs: whole texts, packed one after the other."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


def text_inputs(texts: Sequence[NDArray[np.integer]], names: Collection[str]) -> dict[str, Ids]:
    """Return the inputs `names`, of model/module.py's ENCODER_OF_FIRST. texts: token ids of each, none empty"""
    lengths = np.array([len(ids) for ids in texts], np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    tokens = np.concatenate(texts).astype(np.int32)
    result = {
        "tokens": tokens, "types": np.zeros_like(tokens), "lengths": lengths, "rows": starts,
        "positions": np.arange(len(tokens), dtype=np.int32) - np.repeat(starts, lengths),
    }  # fmt: skip
    return {name: result[name] for name in names}
