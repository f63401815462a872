"""The text that precisions are measured on: the bundled one, or a user's file."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import ConfigError
from millrace.evaluate.sizes import LENGTH, SHORTEST
from millrace.evaluate.text_files import read_text
from millrace.evaluate.text_windows import Windows, windows_of

TOKENS = 3 * LENGTH  # maximum to read of a text: takes about a minute with a model of 1B parameters
VARIED = 4  # minimum of different tokens: on a single repeated letter, 4 bits would seem as good as 32
_UNSCORED = 4  # a quarter of each window is only context; half, as for perplexities, would waste computation
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration text. file: None for the bundled one"""

    content: str
    file: Path | None = None

    @classmethod
    def open(cls, file: str | None) -> "Calibration":
        """Read a text. raises ConfigError if the file is no text, or too long"""
        if file is None:
            return cls((BUNDLED / "calibration.txt").read_text(encoding="utf-8"))
        expected = f"a text of some pages: {TOKENS:,} tokens of it are read"
        return cls(read_text(file, "--calibration", _MAX_BYTES, expected), Path(file))

    @property
    def kind(self) -> Literal["bundled", "own"]:
        return "bundled" if self.file is None else "own"

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.content.encode(), digest_size=16).hexdigest()

    def windows(self, tokenizer: Tokenizer, max_context: int) -> Windows:
        """Return windows of equal length, spread evenly over the text; shorter if the context or the bundled text is.

        raises as `every`
        """
        return _sampled(self.all_windows(tokenizer, max_context))

    def held_out(self, tokenizer: Tokenizer, max_context: int) -> Windows | None:
        """Return as many other windows of the text that do not overlap with those; None if there are not enough."""
        all_windows = self.all_windows(tokenizer, max_context)
        used = {ids.tobytes() for ids in _sampled(all_windows).ids}
        left = [ids for ids in all_windows.ids if ids.tobytes() not in used]
        return _sampled(replace(all_windows, ids=np.stack(left))) if left else None

    def all_windows(self, tokenizer: Tokenizer, max_context: int) -> Windows:
        """Return all windows of the text. raises ConfigError if the text, or the context, is too short for one"""
        if max_context < SHORTEST:
            raise ConfigError(
                f"a context of {max_context} tokens is too short to measure a precision in", f"at least {SHORTEST}",
                "build for a longer --max-context, or name a --precision",
            )  # fmt: skip
        length, ids = min(LENGTH, max_context), tokenizer.encode(self.content)
        if self.file is None:
            length = min(length, max(len(ids), SHORTEST))
        text = f"--calibration {self.file}" if self.file else "the bundled text"
        if len(ids) < length:
            raise ConfigError(
                f"{text} has {len(ids)} tokens of this model", f"at least {length}, one window", "give a longer text"
            )
        result = replace(windows_of(tokenizer, ids, length), first=length // _UNSCORED)
        if (different := len(np.unique(result.ids[:, 1:]))) < VARIED:  # the first may be added by the tokenizer
            raise ConfigError(
                f"{text} has {different} different tokens of this model: any precision predicts them",
                f"at least {VARIED}, as running text has", "give a text like those that the model will read",
            )  # fmt: skip
        return result


def _sampled(every: Windows) -> Windows:
    return every.spread(min(len(every.ids), TOKENS // int(every.ids.shape[1])))
