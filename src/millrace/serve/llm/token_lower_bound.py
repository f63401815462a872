"""How many tokens a text has at least, by its bytes and words: what cannot fit is refused before it is tokenised."""

from typing import NamedTuple

import numpy as np

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.runtime.request.sampling_params import context_exceeded

# What a tokenizer may make shorter before it cuts: white space, composed and compatible characters, rare ones in a row.
_PROBE = "  a \t\n\n b   e\u0301 \ufb01 \uff21 \U0001d400 \u1112\u1161\u11ab \x01 😀😀😀 𐎀𐎀𐎀𐎀𐎀𐎀𐎀𐎀 "
_SPACE = ord(" ")  # tokens hold what goes over lines more often


class TokenBounds(NamedTuple):
    """What one token covers at most. words: what stands between spaces; mostly one, or a part of it"""

    n_bytes: int
    words: int


def reach(tokenizer: Tokenizer) -> TokenBounds | None:
    """None where the tokenizer drops or joins some bytes. Looks at the whole vocabulary: tenths of a second."""
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
        """raises ContextError where not even tokens of the longest kind, all along, would make it fit

        What a template leaves out of its messages is counted too; nobody sends that much of it.
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
