"""How many tokens a text has at least, by its bytes or its beginning: what cannot fit is refused before all of it is
tokenised."""

from collections.abc import Callable, Sized

from millrace.checkpoint.tokenizer import Tokenizer
from millrace.runtime.params import context_exceeded

# Prose has 4 to 5 characters a token, so that the beginning of a prompt that is far too long tells it. Where no token
# drops or joins what it covers, only those at the cut may differ from the whole text's; a quarter is room for more.
_MOST_CHARACTERS, _BEGINNING_CHARACTERS, _SURELY_TOO_MANY = 8, 6, 1.25  # for each token of the context

# What a tokenizer may make shorter before it cuts: white space, composed and compatible characters, rare ones in a row.
_PROBE = "  a \t\n\n b   e\u0301 \ufb01 \uff21 \U0001d400 \u1112\u1161\u11ab \x01 😀😀😀 𐎀𐎀𐎀𐎀𐎀𐎀𐎀𐎀 "


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Bytes of text that one token covers at most; None where the tokenizer drops or joins some of them.

    Looks at the whole vocabulary: tenths of a second for a large one.
    """
    covered = sum(len(tokenizer.token_bytes(i)) for i in tokenizer.encode(_PROBE, add_special_tokens=False))
    if covered < len(_PROBE.encode()):
        return None
    return max(len(tokenizer.token_bytes(i)) for i in tokenizer.ids())


class LeastTokens:
    """Refuses texts that cannot fit a context of `max_context` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_context: int) -> None:
        self._tokenizer, self._max_context = tokenizer, max_context
        self._longest_token: tuple[int | None] | None = None  # not looked at yet

    def check_bytes(self, text: str, field: str) -> None:
        """raises ContextError where not even the longest token of the vocabulary, all along, would make it fit

        What a template leaves out of its messages is counted too; nobody sends that much of it.
        """
        if len(text) < self._max_context or (longest := self._longest()) is None:
            return
        self._check(-(-len(text.encode("utf-8", "replace")) // longest), self._max_context, field)

    def check_beginning(self, text: str, encode: Callable[[str], Sized], field: str) -> None:
        """raises ContextError where the beginning alone has clearly more tokens; what `encode` raises"""
        if len(text) <= _MOST_CHARACTERS * self._max_context or self._longest() is None:
            return
        n_tokens = len(encode(text[: _BEGINNING_CHARACTERS * self._max_context]))
        self._check(n_tokens, int(_SURELY_TOO_MANY * self._max_context), field)

    def _check(self, n_tokens: int, refused_from: int, field: str) -> None:
        if n_tokens >= refused_from:
            raise context_exceeded(self._max_context, f"at least {n_tokens}", None, field)

    def _longest(self) -> int | None:
        if self._longest_token is None:
            self._longest_token = (longest_token(self._tokenizer),)
        return self._longest_token[0]
