"""Splits a text into independent windows to measure language models on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.engine.executor import IntArray
from millrace.errors import RequestError
from millrace.evaluate.sizes import LENGTH


@dataclass(frozen=True, slots=True)
class Windows:
    """W windows of n tokens, ids (W, n). Tokens after position `first` of each are predicted."""

    ids: IntArray
    first: int

    @property
    def n_scored(self) -> int:
        """Return the number of scored tokens of all windows."""
        return len(self.ids) * (int(self.ids.shape[1]) - 1 - self.first)

    def spread(self, n: int) -> "Windows":
        """Return n windows, evenly spaced from the first to the last."""
        windows = np.linspace(0, len(self.ids) - 1, n).round().astype(int)
        return replace(self, ids=self.ids[windows])


def windows(tokenizer: Tokenizer, text: str, length: int = LENGTH, max_windows: int | None = None) -> Windows:
    """Split a text like llama-perplexity: full windows only, each with BOS as its first token if the model has one.

    The first half of each is not scored, so that every prediction has context.

    max_windows: maximum number of windows. raises RequestError if the text is shorter than one
    source: https://github.com/ggml-org/llama.cpp/tree/master/tools/perplexity
    """
    return windows_of(tokenizer, tokenizer.encode(text), length, max_windows)


def windows_of(tokenizer: Tokenizer, ids: Sequence[int], length: int, max_windows: int | None = None) -> Windows:
    """Split a text's tokens like `windows`."""
    result = len(ids) // length
    if not result:
        raise RequestError(
            f"the text has {len(ids):,} tokens", f"at least {length:,}, one window",
            "give a longer text, or a shorter --window",
        )  # fmt: skip
    windows = np.asarray(ids[: min(result, max_windows or result) * length], np.int32).reshape(-1, length)
    if tokenizer.bos_token_id is not None and tokenizer.special_around[0]:
        windows[:, 0] = tokenizer.bos_token_id
    return Windows(windows, length // 2)
