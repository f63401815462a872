"""Steps with random tokens, for measuring and tuning."""

from collections.abc import Sequence

import numpy as np

from millrace.engine.executor import StepInputs, plain_rows

_Int = np.int32


def dummy_step(lengths: Sequence[int], first: int, n_pages: int, *, seed: int = 0, vocab: int = 32000) -> StepInputs:
    """Return a step of sequences of `lengths` random tokens from position `first`, with one greedy row each.

    n_pages: pages in all, divided among the sequences
    """
    rng = np.random.default_rng(seed)
    pages_each = n_pages // len(lengths)
    rows = plain_rows(len(lengths))
    rows["token"] = np.cumsum(lengths) - 1
    empty = np.zeros(0, _Int)
    return StepInputs(
        tokens=rng.integers(0, vocab, sum(lengths)).astype(_Int),
        positions=np.concatenate([np.arange(first, first + n, dtype=_Int) for n in lengths]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(_Int),
        pages=np.arange(pages_each * len(lengths), dtype=_Int),
        page_starts=(np.arange(len(lengths) + 1) * pages_each).astype(_Int),
        sampling=rows, history=empty, bias_ids=empty, bias_values=np.zeros(0, np.float32),
    )  # fmt: skip
