"""Tool-call and reasoning formats of one model, detected from its chat template, and their parsers."""

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
    """Reasoning state at the end of a prompt: it may still begin, has begun, or is over."""

    BEFORE = auto()
    WITHIN = auto()
    BEHIND = auto()


class ThoughtTokens:
    """Counter of the reasoning tokens of an answer, including the marks around them, as its `AnswerParser` sees them.

    It compares the text of each token, so that marks spelled by several tokens count, and deltas may be merged.
    """

    def __init__(self, marks: Reasoning, detokenizer: Detokenizer, opened: bool) -> None:
        """opened: the prompt ended within the reasoning"""
        self._marks, self._detokenizer = marks, detokenizer
        self._is_thinking: bool | None = True if opened else None  # not known yet
        self._text = ""  # that may be the beginning of a mark
        self._n_mark = 0  # tokens of it
        self.n = 0

    def take(self, tokens: Iterable[int]) -> None:
        """Count the next tokens of the answer."""
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
        """Look for the opening mark; white space may precede it."""
        begin, self._text = self._marks.begin, self._text.lstrip()
        self._n_mark += bool(self._text)
        if self._text.startswith(begin):
            self._is_thinking, self.n, self._text = True, self._n_mark, self._text[len(begin) :]
        elif not begin.startswith(self._text):
            self._is_thinking = False


class OutputParser:
    """Parser of one answer, which also counts its reasoning tokens."""

    def __init__(self, reader: AnswerParser, thoughts: ThoughtTokens | None) -> None:
        """thoughts: the counter of reasoning tokens; None for a model without reasoning"""
        self._reader, self._thoughts = reader, thoughts

    @property
    def n_calls(self) -> int:
        return self._reader.n_calls

    @property
    def n_thought(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.n

    def read(self, delta: Delta) -> ParsedDelta:
        """Return what a delta adds to the parts of the answer; to be called once per delta, in order."""
        if self._thoughts is not None:
            self._thoughts.take(delta.token_ids)
        parsed = self._reader.push(delta.text)
        return parsed if delta.finish_reason is None else joined(parsed, self._reader.flush())


@dataclass(frozen=True, slots=True)
class OutputReaderFactory:
    """Factory of answer parsers. new_reader: creates one; None: all of an answer is text

    thoughts: the reasoning that may precede a structured output
    """

    new_reader: Callable[[], OutputParser] | None = None
    thoughts: ReasoningSpan | None = None


PLAIN_TEXT = OutputReaderFactory()


class OutputFormat:
    """Output format of one model. calls: of tool calls; thoughts: marks of reasoning, None if the model has none"""

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
        """Return the id of a text that is one special token, or None."""
        token = self._id(text)
        return token if token in self._tokenizer.special_ids else None

    def reasoning_state(self, prompt: list[int], answer_prefix: str) -> ReasoningState:
        """Return the reasoning state at a prompt's end. answer_prefix: beginning of the answer in the last message"""
        if self.thoughts is None:
            return ReasoningState.BEFORE
        begin, end = self.thoughts.begin, self.thoughts.end
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if answer_prefix.rfind(begin) > answer_prefix.rfind(end) or tail.endswith(begin):
            return ReasoningState.WITHIN
        return ReasoningState.BEHIND if end in answer_prefix or tail.endswith(end) else ReasoningState.BEFORE

    def params(self, params: SamplingParams, tools: Tools | None) -> SamplingParams:
        """Return the parameters with the tools' constraint, and with the special tokens that the parser needs."""
        if tools is not None:
            form = tools.constraint(self.calls, self.special, params.structured_outputs)
            params = replace(params, structured_outputs=form or params.structured_outputs)
        shown = (tools is not None and self._has_special_marks) or self._thought_marks_are_special
        return replace(params, skip_special_tokens=False) if shown else params

    def reader_factory(self, tools: Tools | None, state: ReasoningState, is_constrained: bool) -> OutputReaderFactory:
        """Return the factory of parsers. state: at the prompt's end; is_constrained: the output is structured"""
        names, max_calls = (frozenset(tools.schemas), tools.max_calls(self.calls)) if tools else (None, 0)
        free, is_thinking = self._reasoning_span(state), state is ReasoningState.WITHIN
        if is_constrained and free is None:  # the form begins with the first token: there is no thought before it
            is_thinking = False
        return OutputReaderFactory(partial(self._reader, names, max_calls, is_thinking), free)

    def _reasoning_span(self, state: ReasoningState) -> ReasoningSpan | None:
        """Return the reasoning that may precede a structured output, or None."""
        if self.thoughts is None or None in self._around_ids or state is ReasoningState.BEHIND:
            return None
        begin, end = self._around_ids
        assert begin is not None and end is not None
        return ReasoningSpan(begin, end, state is ReasoningState.WITHIN, self._gap_ids, len(self.thoughts.gap))

    def _gap(self, text: str) -> dict[int, int]:
        """Return the tokens that make up a text and its suffixes, each with its number of characters."""
        ends = (text[i:] for i in range(len(text)))
        ids = {token for end in ends for token in self._tokenizer.encode(end, add_special_tokens=False)}
        pieces = {token: self._tokenizer.token_bytes(token) for token in ids}
        return {token: len(piece) for token, piece in pieces.items() if piece and text.encode().endswith(piece)}

    def _reader(self, tools: frozenset[str] | None, max_calls: int, is_thinking: bool) -> OutputParser:
        """Create the parser of one answer. tools: their names"""
        counted = None
        if self.thoughts is not None:
            shown = Detokenizer(self._tokenizer, skip_special_tokens=not self._thought_marks_are_special)
            counted = ThoughtTokens(self.thoughts, shown, is_thinking)
        if tools is None:
            return OutputParser(AnswerParser(None, self.thoughts, thinks=is_thinking), counted)
        reader = AnswerParser(self.calls, self.thoughts, tools=tools, max_calls=max_calls, thinks=is_thinking)
        return OutputParser(reader, counted)

    def _id(self, text: str) -> int | None:
        return self._tokenizer.token_id(text) if isinstance(self._tokenizer, VocabularyTokenizer) else None
