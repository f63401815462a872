"""How one model writes what is not plain text: calls of tools, and thoughts. Found by its chat template."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from millrace.checkpoint.tokenizer import Tokenizer, VocabularyTokenizer
from millrace.checkpoint.tool_calls.formats import reasoning, tool_format
from millrace.checkpoint.tool_calls.reader import Reader
from millrace.runtime.grammar import Thoughts
from millrace.runtime.params import SamplingParams
from millrace.serve.tools import Tools

_TAIL = 16  # tokens of a prompt among which the mark of its last line is


@dataclass(frozen=True, slots=True)
class Heard:
    """How answers are read. new_reader: takes one apart; None: all of it is text

    thoughts: may go before what an answer is held to
    """

    new_reader: Callable[[], Reader] | None = None
    thoughts: Thoughts | None = None


PLAIN_TEXT = Heard()


class Speech:
    """calls: the format of tool calls; thoughts: the marks of thoughts, None where the model has none"""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self.calls, self.thoughts = tool_format(template), reasoning(template)
        self._tokenizer = tokenizer
        marks = (*self.calls.opens, *self.calls.between)
        self._has_special_marks = any(self.special(mark) is not None for mark in marks)
        around = (self.thoughts.begin, self.thoughts.end) if self.thoughts else ()
        self._thought_marks_are_special = any(self.special(mark) is not None for mark in around)
        self._around_ids = [self._id(mark) for mark in around]

    def special(self, text: str) -> int | None:
        """The id of a text that is one special token: it does not stand for its characters."""
        token = self._id(text)
        return token if token in self._tokenizer.special_ids else None

    def is_thinking(self, prompt: list[int]) -> bool:
        """It ends within the model's thoughts."""
        if self.thoughts is None:
            return False
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        return tail.rstrip().endswith(self.thoughts.begin)

    def params(self, params: SamplingParams, tools: Tools | None) -> SamplingParams:
        """With what tools ask of the answer, and with the special tokens that its reader looks for."""
        if tools is not None:
            form = tools.form(self.calls, self.special, params.structured_outputs)
            params = replace(params, structured_outputs=form or params.structured_outputs)
        shown = (tools is not None and self._has_special_marks) or self._thought_marks_are_special
        return replace(params, skip_special_tokens=False) if shown else params

    def heard(self, tools: Tools | None, is_thinking: bool) -> Heard:
        names, most = (frozenset(tools.schemas), tools.most) if tools else (None, 0)
        return Heard(partial(self._reader, names, most, is_thinking), self._free_thoughts(is_thinking))

    def _free_thoughts(self, is_thinking: bool) -> Thoughts | None:
        """What an answer that is held to a form may say before."""
        if self.thoughts is None or None in self._around_ids:
            return None
        begin, end = self._around_ids
        assert begin is not None and end is not None
        return Thoughts(begin, end, is_thinking)

    def _reader(self, tools: frozenset[str] | None, most_calls: int, is_thinking: bool) -> Reader:
        """Of one answer. tools: their names"""
        if tools is None:
            return Reader(None, self.thoughts, thinks=is_thinking)
        return Reader(self.calls, self.thoughts, tools=tools, most_calls=most_calls, thinks=is_thinking)

    def _id(self, text: str) -> int | None:
        return self._tokenizer.token_id(text) if isinstance(self._tokenizer, VocabularyTokenizer) else None
