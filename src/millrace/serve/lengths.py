"""How many tokens a text has at least, by its bytes: so that what cannot fit is refused before it is tokenised."""

from millrace.checkpoint.tokenizer import Tokenizer

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
