"""Encoder inputs: whole texts, packed one after the other."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


def text_inputs(
    texts: Sequence[NDArray[np.integer]], names: Collection[str], n_first: Sequence[int] | None = None
) -> dict[str, Ids]:
    """Return the inputs `names`, of model/module.py's ENCODER_OF_FIRST.

    texts: token ids of each, none empty; n_first: tokens of type 0 of each, the others have type 1; None: all
    """
    lengths = np.array([len(ids) for ids in texts], np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    tokens = np.concatenate(texts).astype(np.int32)
    positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(starts, lengths)
    firsts = lengths if n_first is None else np.array(n_first, np.int32)
    types = (positions >= np.repeat(firsts, lengths)).astype(np.int32)
    result = {"tokens": tokens, "types": types, "lengths": lengths, "rows": starts, "positions": positions}
    return {name: result[name] for name in names}
