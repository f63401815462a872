"""How one model writes what is not plain text: calls of tools, and thoughts. Found by its chat template."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial

from millrace.checkpoint.tokenizer.tokenizer import Detokenizer, Tokenizer, VocabularyTokenizer
from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, ParsedDelta, joined
from millrace.checkpoint.tool_calls.formats import Reasoning, reasoning, tool_format
from millrace.runtime.request.sampling_params import Delta, SamplingParams
from millrace.runtime.structured_output.grammar import ReasoningSpan
from millrace.serve.llm.tools import Tools

_TAIL = 16  # tokens of a prompt among which the mark of its last line is


class ReasoningState(Enum):
    """Where a prompt ends: a thought may come, is begun, or is over, so that none comes before the answer."""

    BEFORE = auto()
    WITHIN = auto()
    BEHIND = auto()


class ThoughtTokens:
    """Counts the reasoning tokens of an answer, including the marks around them, as its `AnswerParser` finds them.

    It goes by the text of each token, so that marks count that are spelled, and deltas may be merged.
    """

    def __init__(self, marks: Reasoning, detokenizer: Detokenizer, opened: bool) -> None:
        """opened: the prompt ended within them"""
        self._marks, self._detokenizer = marks, detokenizer
        self._is_thinking: bool | None = True if opened else None  # not known yet
        self._text = ""  # that may be the beginning of a mark
        self._n_mark = 0  # tokens of it
        self.n = 0

    def take(self, tokens: Iterable[int]) -> None:
        """The next ones of the answer."""
        for token in tokens:
            if self._is_thinking is False:
                return
            self._text += self._detokenizer.push((token,))
            if self._is_thinking is None:
                self._begin()
            else:
                self.n += 1
            if self._is_thinking:
                self._is_thinking = self._marks.end not in self._text
                self._text = self._text[1 - len(self._marks.end) :]

    def _begin(self) -> None:
        """White space may go before them."""
        begin, self._text = self._marks.begin, self._text.lstrip()
        self._n_mark += bool(self._text)
        if self._text.startswith(begin):
            self._is_thinking, self.n, self._text = True, self._n_mark, self._text[len(begin) :]
        elif not begin.startswith(self._text):
            self._is_thinking = False


class OutputParser:
    """Takes one answer apart, and counts the tokens of its thoughts."""

    def __init__(self, reader: AnswerParser, thoughts: ThoughtTokens | None) -> None:
        """thoughts: None for a model that has none"""
        self._reader, self._thoughts = reader, thoughts

    @property
    def n_calls(self) -> int:
        return self._reader.n_calls

    @property
    def n_thought(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.n

    def read(self, delta: Delta) -> ParsedDelta:
        """What it adds to the parts of the answer; each delta once, in order."""
        if self._thoughts is not None:
            self._thoughts.take(delta.token_ids)
        parsed = self._reader.push(delta.text)
        return parsed if delta.finish_reason is None else joined(parsed, self._reader.flush())


@dataclass(frozen=True, slots=True)
class OutputReaderFactory:
    """How answers are read. new_reader: takes one apart; None: all of it is text

    thoughts: may go before what an answer is held to
    """

    new_reader: Callable[[], OutputParser] | None = None
    thoughts: ReasoningSpan | None = None


PLAIN_TEXT = OutputReaderFactory()


class OutputFormat:
    """calls: the format of tool calls; thoughts: the marks of thoughts, None where the model has none"""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self.calls, self.thoughts = tool_format(template), reasoning(template)
        self._tokenizer = tokenizer
        marks = (*self.calls.opens, *self.calls.between)
        self._has_special_marks = any(self.special(mark) is not None for mark in marks)
        around = (self.thoughts.begin, self.thoughts.end) if self.thoughts else ()
        self._thought_marks_are_special = any(self.special(mark) is not None for mark in around)
        self._around_ids = [self._id(mark) for mark in around]
        self._gap_ids = self._gap(self.thoughts.gap) if self.thoughts else {}

    def special(self, text: str) -> int | None:
        """The id of a text that is one special token: it does not stand for its characters."""
        token = self._id(text)
        return token if token in self._tokenizer.special_ids else None

    def reasoning_state(self, prompt: list[int], begun: str) -> ReasoningState:
        """As to the model's thoughts. begun: of the answer, in the conversation's last message"""
        if self.thoughts is None:
            return ReasoningState.BEFORE
        begin, end = self.thoughts.begin, self.thoughts.end
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if begun.rfind(begin) > begun.rfind(end) or tail.endswith(begin):
            return ReasoningState.WITHIN
        return ReasoningState.BEHIND if end in begun or tail.endswith(end) else ReasoningState.BEFORE

    def params(self, params: SamplingParams, tools: Tools | None) -> SamplingParams:
        """With what tools ask of the answer, and with the special tokens that its reader looks for."""
        if tools is not None:
            form = tools.constraint(self.calls, self.special, params.structured_outputs)
            params = replace(params, structured_outputs=form or params.structured_outputs)
        shown = (tools is not None and self._has_special_marks) or self._thought_marks_are_special
        return replace(params, skip_special_tokens=False) if shown else params

    def reader_factory(self, tools: Tools | None, place: ReasoningState, is_held: bool) -> OutputReaderFactory:
        """place: where the prompt ends; is_held: the answer has a form"""
        names, most = (frozenset(tools.schemas), tools.max_calls(self.calls)) if tools else (None, 0)
        free, is_thinking = self._free_thoughts(place), place is ReasoningState.WITHIN
        if is_held and free is None:  # the form begins with the first token: there is no thought before it
            is_thinking = False
        return OutputReaderFactory(partial(self._reader, names, most, is_thinking), free)

    def _free_thoughts(self, place: ReasoningState) -> ReasoningSpan | None:
        """What an answer that is held to a form may say before."""
        if self.thoughts is None or None in self._around_ids or place is ReasoningState.BEHIND:
            return None
        begin, end = self._around_ids
        assert begin is not None and end is not None
        return ReasoningSpan(begin, end, place is ReasoningState.WITHIN, self._gap_ids, len(self.thoughts.gap))

    def _gap(self, text: str) -> dict[int, int]:
        """The tokens of which it and its ends are made, each with how many of its characters it is."""
        ends = (text[i:] for i in range(len(text)))
        ids = {token for end in ends for token in self._tokenizer.encode(end, add_special_tokens=False)}
        pieces = {token: self._tokenizer.token_bytes(token) for token in ids}
        return {token: len(piece) for token, piece in pieces.items() if piece and text.encode().endswith(piece)}

    def _reader(self, tools: frozenset[str] | None, most_calls: int, is_thinking: bool) -> OutputParser:
        """Of one answer. tools: their names"""
        counted = None
        if self.thoughts is not None:
            shown = Detokenizer(self._tokenizer, skip_special_tokens=not self._thought_marks_are_special)
            counted = ThoughtTokens(self.thoughts, shown, is_thinking)
        if tools is None:
            return OutputParser(AnswerParser(None, self.thoughts, thinks=is_thinking), counted)
        reader = AnswerParser(self.calls, self.thoughts, tools=tools, most_calls=most_calls, thinks=is_thinking)
        return OutputParser(reader, counted)

    def _id(self, text: str) -> int | None:
        return self._tokenizer.token_id(text) if isinstance(self._tokenizer, VocabularyTokenizer) else None
