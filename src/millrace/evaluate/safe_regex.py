"""Regular expressions out of files, matched in time that grows with the text alone: no backtracking, and bounded work.

They are those of structured output (docs/structured-output.md), through the same library: llguidance follows all ways
to match at once, and stops where that would take too many states.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from millrace.checkpoint.grammar_limits import parser_limits
from millrace.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CHARACTERS = 1000
_END = 256  # the vocabulary is the bytes, and this


class Pattern:
    """Of whole texts: `(.|\\n)*` stands for what may be before and behind what is looked for.

    Compiled for each text, which takes 1 to 4 ms: a file has one in each of its lines, and held they take memory.
    """

    def __init__(self, expression: str, where: str) -> None:
        """where: it is written, for errors. raises ConfigError for what is none, or is beyond the limits"""
        if len(expression) > _MAX_CHARACTERS:
            raise _refused(where, f"has {len(expression):,} characters", f"at most {_MAX_CHARACTERS:,}")
        try:
            _compiled(expression)
        except ValueError as error:
            raise _refused(where, str(error)) from None
        self._expression = expression

    def matches(self, text: str) -> bool | None:
        """None: that would take too much, and nobody knows"""
        matcher, data = _compiled(self._expression), list(text.encode("utf-8", "surrogatepass"))
        n_consumed = matcher.try_consume_tokens(data)
        return None if matcher.is_error() else bool(n_consumed == len(data) and matcher.is_accepting())


class _Bytes:
    """A vocabulary as llguidance asks for it."""

    def __init__(self) -> None:
        self.tokens: Sequence[bytes] = [*(bytes([i]) for i in range(256)), b""]
        self.special_token_ids: Sequence[int] = [_END]
        self.eos_token_id, self.bos_token_id = _END, None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _vocabulary() -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=_END + 1, eos_token=[_END], slices=[])


def _compiled(expression: str) -> "LLMatcher":
    """For one text: copies share their states, and the bound of them, so that one which gave up makes the others wrong.

    raises ImportError where llguidance is not there, ValueError for what it does not take"""
    from llguidance import LLMatcher, regex_to_lark

    lark = f"start: /{regex_to_lark(expression)}/\n"
    matcher = LLMatcher(_vocabulary(), lark, log_level=0, limits=parser_limits())
    if matcher.is_error():
        reasons = [line for line in matcher.get_error().splitlines() if line.startswith("error: ")]
        raise ValueError((reasons or [_first_line(matcher.get_error())])[0].removeprefix("error: "))
    return matcher


def _first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "")


def _refused(
    where: str, what: str, expected: str = "one without look-around and backreferences, within bounds"
) -> ConfigError:
    return ConfigError(f"{where}: the regular expression {what}", expected, "simplify it")
