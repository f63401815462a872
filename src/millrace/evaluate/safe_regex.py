"""Safe matching of untrusted regular expressions: linear in the text, without backtracking, with bounded work.

The syntax is that of structured output (docs/structured-output.md), through the same library: llguidance simulates all
alternatives in parallel, and stops if that needs too many states.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from millrace.errors import ConfigError
from millrace.runtime.structured_output.grammar_limits import parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CHARACTERS = 1000
_END = 256  # the vocabulary is the bytes and this end token


class Pattern:
    """An expression that matches whole texts; use `(.|\\n)*` to allow text before and after.

    It is compiled for each text, which takes 1 to 4 ms: every line of a file has one, and keeping all takes memory.
    """

    def __init__(self, expression: str, where: str) -> None:
        """where: file and line, for errors. raises ConfigError if it is invalid, or exceeds the limits"""
        if len(expression) > _MAX_CHARACTERS:
            raise _refused(where, f"has {len(expression):,} characters", f"at most {_MAX_CHARACTERS:,}")
        try:
            _compiled(expression)
        except ValueError as error:
            raise _refused(where, str(error)) from None
        self._expression = expression

    def matches(self, text: str) -> bool | None:
        """Whether the text matches; None if that would exceed the limits."""
        matcher, data = _compiled(self._expression), list(text.encode("utf-8", "surrogatepass"))
        n_consumed = matcher.try_consume_tokens(data)
        return None if matcher.is_error() else bool(n_consumed == len(data) and matcher.is_accepting())


class _Bytes:
    """The vocabulary in the form that llguidance needs."""

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
    """Compile for one text: copies share states and their limit, so one that exceeds it would make the others wrong.

    raises ImportError if llguidance is not installed, ValueError if the expression is not supported
    """
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
