"""Lower bound of a text's tokens, from its bytes and words: what cannot fit is refused before it is tokenised."""

from typing import NamedTuple

import numpy as np

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.runtime.request.sampling_params import context_exceeded

# What a tokenizer may make shorter before it cuts: white space, composed and compatible characters, rare ones in a row.
_PROBE = "  a \t\n\n b   e\u0301 \ufb01 \uff21 \U0001d400 \u1112\u1161\u11ab \x01 😀😀😀 𐎀𐎀𐎀𐎀𐎀𐎀𐎀𐎀 "
_SPACE = ord(" ")  # tokens hold what goes over lines more often


class TokenBounds(NamedTuple):
    """The most that one token of a vocabulary covers. words: separated by spaces; mostly one, or a part of one"""

    n_bytes: int
    words: int


def reach(tokenizer: Tokenizer) -> TokenBounds | None:
    """Return the bounds of a tokenizer; None if it drops or joins bytes. Scans the vocabulary: tenths of a second."""
    covered = sum(len(tokenizer.token_bytes(i)) for i in tokenizer.encode(_PROBE, add_special_tokens=False))
    if covered < len(_PROBE.encode()):
        return None
    tokens = [tokenizer.token_bytes(i) for i in tokenizer.ids()]
    return TokenBounds(max(map(len, tokens)), max(1, *map(n_words, tokens)))


def n_words(text: bytes) -> int:
    is_space = np.frombuffer(text, np.uint8) == _SPACE
    return int(np.count_nonzero(is_space[:-1] & ~is_space[1:])) + int(len(text) > 0 and not is_space[0])


class TokenLowerBound:
    """Refuses texts that cannot fit a context of `max_context` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_context: int) -> None:
        self._tokenizer, self._max_context = tokenizer, max_context
        self._reach: tuple[TokenBounds | None] | None = None  # not looked at yet

    def check(self, text: str, field: str) -> None:
        """Check a text. raises ContextError if it could not fit even if all its tokens were the longest ones

        Text that a template drops is counted, too; clients do not send that much of it.
        """
        if len(text) < self._max_context:
            return
        if self._reach is None:
            self._reach = (reach(self._tokenizer),)
        if (bounds := self._reach[0]) is None:
            return
        encoded = text.encode("utf-8", "replace")
        least = max(-(-len(encoded) // bounds.n_bytes), -(-n_words(encoded) // bounds.words))
        if least >= self._max_context:
            raise context_exceeded(self._max_context, f"at least {least}", None, field)
