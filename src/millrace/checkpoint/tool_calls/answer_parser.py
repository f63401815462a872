"""Parses an answer incrementally into reasoning, content and tool calls.

The concatenated parts do not depend on how the text is split into pieces. Text that begins like a call but is not one
stays content. The work is linear in the text: white space that decides nothing is buffered unread, and text that turns
out not to be a call is read once more in pieces, not repeatedly.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from millrace.checkpoint.tool_calls.families import Reasoning, ToolFormat
from millrace.checkpoint.tool_calls.incremental_json import CallObject, JsonValue, behind_blank

MAX_HEADER = 512  # characters of a name and the markup around it
MAX_REREAD = 256 * 1024  # limit on characters that are read twice due to false calls; after it no calls are parsed
_WINDOW = 4096  # characters that are processed at a time, because consuming some copies the rest


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of call number `index`: the name (in its first part), and more of the arguments' JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """The content, reasoning and calls that a piece of text adds to an answer.

    spans: ranges of the content in the answer's text, in characters; None: all of the text is content
    n_settled: length of the leading text from which no more content will come, in characters
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    spans: tuple[tuple[int, int], ...] | None = field(default=None, compare=False)
    n_settled: int = field(default=0, compare=False)


def joined(a: ParsedDelta, b: ParsedDelta) -> ParsedDelta:
    """Join two consecutive deltas of one parser."""
    spans, n_settled = (a.spans or ()) + (b.spans or ()), max(a.n_settled, b.n_settled)
    return ParsedDelta(a.content + b.content, a.reasoning + b.reasoning, a.calls + b.calls, spans, n_settled)


class AnswerParser:
    """Parses one answer.

    calls: format of tool calls; None: calls are ordinary text
    thoughts: marks of reasoning; None: there is none
    tools: names of tools; a call without a mark must have one of them
    max_calls: maximum number of calls; later ones are dropped
    thinks: whether the prompt ends inside the model's reasoning
    """

    def __init__(
        self,
        calls: ToolFormat | None,
        thoughts: Reasoning | None,
        *,
        tools: Collection[str] = (),
        max_calls: int = sys.maxsize,
        thinks: bool = False,
    ) -> None:
        self._format, self._thoughts, self._tools, self._max_calls = calls, thoughts, tools, max_calls
        self._text = ""  # text that is not classified yet
        self._input_stack: list[
            tuple[str, int]
        ] = []  # the text that follows, with start offsets; a stack, the next on top
        self._n_received, self._n_buffered = 0, 0  # characters received, and characters in `_input_stack`
        self._only_whitespace = False  # `_text` is white space only: every state waits for more
        self._blanks: list[str] = []  # white space after it that decides nothing
        self._flushed = False
        self._state: Callable[[], bool] = self._before_reasoning if thinks else self._begin
        self._pending: list[str] | None = None  # text that seemed to open calls, until one begins
        self._candidate_start: int | None = (
            None  # offset in the answer of a possible call that may turn out to be content
        )
        self._n_reread = 0  # characters read twice so far
        self._is_marked = False  # whether a mark that opens calls was found
        self._object, self._value = CallObject(), JsonValue()
        self._content: list[str] = []
        self._spans: list[tuple[int, int]] = []
        self._reasoning: list[str] = []
        self._parts: list[CallPart] = []
        self.n_calls = 0

    def push(self, text: str) -> ParsedDelta:
        """Return what a piece of text adds."""
        if self._only_whitespace and text.isspace():
            self._blanks.append(text)
            return _NOTHING
        self._append_input("".join([*self._blanks, text]))
        return self._read()

    def flush(self) -> ParsedDelta:
        """Return the rest at the end of the answer."""
        self._flushed = True
        self._append_input("".join(self._blanks))
        return self._read()

    @property
    def _is_text_over(self) -> bool:
        """Whether no text follows `_text`."""
        return self._flushed and not self._input_stack

    def _append_input(self, text: str) -> None:
        """Append text to the unclassified text."""
        self._blanks = []
        self._n_received += len(text)
        self._push_input(text, 0)
        self._advance()

    def _push_input(self, text: str, at: int) -> None:
        self._n_buffered += len(text) - at
        self._input_stack.append((text, at))

    @property
    def _at(self) -> int:
        """Return the offset in the answer of the unclassified text."""
        return self._n_received - self._n_buffered - len(self._text)

    def _advance(self) -> bool:
        if not self._input_stack:
            return False
        text, at = self._input_stack.pop()
        some = text[at : at + _WINDOW]
        self._text += some
        self._n_buffered -= len(some)
        if at + _WINDOW < len(text):
            self._input_stack.append((text, at + _WINDOW))
        return True

    def _read(self) -> ParsedDelta:
        while self._state() or self._advance():
            pass
        n_settled = self._at if self._candidate_start is None else self._candidate_start
        content, thoughts = "".join(self._content), "".join(self._reasoning)
        delta = ParsedDelta(content, thoughts, tuple(self._parts), tuple(self._spans), n_settled)
        self._content, self._spans, self._reasoning, self._parts = [], [], [], []
        self._only_whitespace = self._text.isspace()
        return delta

    # Each state consumes what it can of the text, and returns whether the next state can continue.

    def _begin(self) -> bool:
        text = self._text.lstrip()
        begin = self._thoughts.begin if self._thoughts else ""
        if begin and text.startswith(begin):
            return self._go_to_state(self._before_reasoning, text[len(begin) :])
        if begin and begin.startswith(text) and not self._is_text_over:
            return False
        return self._go_to_state(self._begin_answer, self._text)

    def _before_reasoning(self) -> bool:
        text = self._text.lstrip()
        return bool(text) and self._go_to_state(self._in_reasoning, text)

    def _in_reasoning(self) -> bool:
        assert self._thoughts is not None
        before, end, behind = self._text.partition(self._thoughts.end)
        if end:
            self._reasoning.append(before.rstrip())
            return self._go_to_state(self._after_reasoning, behind)
        self._reasoning.append(self._take_certain_text((self._thoughts.end,)))
        return False

    def _after_reasoning(self) -> bool:
        """Skip the white space between reasoning and answer, which belongs to neither."""
        text = self._text.lstrip()
        return bool(text) and self._go_to_state(self._begin_answer, text)

    def _begin_answer(self) -> bool:
        text = self._text.lstrip()
        if (
            self._format is None
            or not self._format.bare
            or (text and text[0] != "{")
            or (self._is_text_over and not text)
        ):
            self._pending = self._candidate_start = None
            return self._go_to_state(self._in_content, self._text)
        self._pending, self._candidate_start = [self._text[: len(self._text) - len(text)]], self._at
        return bool(text) and self._begin_object(text)

    def _in_content(self) -> bool:
        opens = self._format.opens if self._format and self._n_reread < MAX_REREAD else ()
        result = [(at, mark) for mark in opens if (at := self._text.find(mark)) >= 0]
        if not result:
            self._add_content(self._at, self._take_certain_text(opens) if opens else self._take_all())
            return False
        at, mark = min(result)
        before = self._text[:at].rstrip()
        self._add_content(self._at, before)
        self._pending, self._is_marked = [self._text[len(before) : at + len(mark)]], True
        self._candidate_start = self._at + len(before)
        return self._go_to_state(self._between_calls, self._text[at + len(mark) :])

    def _between_calls(self) -> bool:
        """Calls were opened: parse the start of one, or separators, or detect that the calls are over."""
        assert self._format is not None
        marks, at = (*self._format.opens, *self._format.between), behind_blank(self._text, 0)
        while not self._may_begin(marks, at):
            mark = next((m for m in marks if self._text.startswith(m, at)), None)
            if mark is None:
                break
            self._skip(at + len(mark))
            at = behind_blank(self._text, 0)
        else:
            return False  # an answer that ends here was cut off after its calls
        text = self._text[at:]
        if not text:
            return self._pending is not None and self._not_a_call(self._text, 1)
        if text[0] == "{" and (self._format.header is None or self._format.mixed):
            self._skip(at)
            return self._begin_object(text)
        header = self._format.header.match(text[:MAX_HEADER]) if self._format.header else None
        if header is not None:
            self._start_call(header["name"])
            return self._go_to_state(self._arguments, text[header.end() :])
        if self._format.header and len(text) < MAX_HEADER and not self._is_text_over:
            return False
        return self._not_a_call(self._text, MAX_HEADER if self._format.header else 1)

    def _may_begin(self, marks: Sequence[str], at: int) -> bool:
        """Whether the text from `at` may be an incomplete mark, or is empty."""
        n = len(self._text) - at
        short = n < MAX_HEADER and any(len(m) > n and m.startswith(self._text[at:]) for m in marks)
        return short and bool(self.n_calls or not self._is_text_over)

    def _begin_object(self, text: str) -> bool:
        self._object = CallObject()
        self._candidate_start = self._at if self._candidate_start is None else self._candidate_start
        return self._go_to_state(self._in_object, text)

    def _in_object(self) -> bool:
        call = self._object
        is_begun = call.name is not None
        call.push(self._take_all())
        if call.name is None:
            was_cut_off = self._is_text_over and not call.broken and self.n_calls > 0
            return (call.broken or self._is_text_over) and not was_cut_off and self._not_a_call(call.text, call.n_taken)
        if not is_begun:
            if not self._is_marked and call.name not in self._tools:
                return self._not_a_call(call.text, call.n_taken)
            self._start_call(call.name)
        is_over = call.complete or call.broken
        self._add(call.last_arguments() if is_over else call.arguments())
        return is_over and self._go_to_state(
            self._between_calls, call.rest
        )  # otherwise it continues, or was cut off here

    def _arguments(self) -> bool:
        end = self._value.take(self._text, 0)
        self._add(self._text[:end])
        self._text = self._text[end:]
        return self._value.complete and self._go_to_state(self._between_calls, self._text)

    def _go_to_state(self, state: Callable[[], bool], text: str) -> bool:
        self._state, self._text = state, text
        return True

    def _skip(self, n: int) -> None:
        """Skip characters between calls; they become content only if no call follows."""
        if self._pending is not None:
            self._pending.append(self._text[:n])
        self._text = self._text[n:]

    def _not_a_call(self, text: str, n_read: int) -> bool:
        """Treat `text`, and what seemed to open a call, as content. n_read: its characters that were already read"""
        begin = self._at if self._candidate_start is None else self._candidate_start
        self._add_content(begin, "".join([*(self._pending or ()), text[:1]]))
        self._pending = self._candidate_start = None
        self._n_reread += n_read
        self._go_to_state(self._in_content, "")
        self._push_input(text, 1)
        return self._advance()

    def _start_call(self, name: str) -> None:
        self._value, self._pending, self._candidate_start = JsonValue(), None, None
        if self.n_calls < self._max_calls:
            self._parts.append(CallPart(self.n_calls, name, ""))
        self.n_calls += 1

    def _add(self, arguments: str) -> None:
        if not arguments or self.n_calls > self._max_calls:
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and last.index == self.n_calls - 1:
            self._parts[-1] = CallPart(last.index, last.name, last.arguments + arguments)
        else:
            self._parts.append(CallPart(self.n_calls - 1, None, arguments))

    def _add_content(self, at: int, content: str) -> None:
        """Add content. at: its offset in the answer"""
        if not content:
            return
        self._content.append(content)
        begin = self._spans.pop()[0] if self._spans and self._spans[-1][1] == at else at
        self._spans.append((begin, at + len(content)))

    def _take_all(self) -> str:
        text, self._text = self._text, ""
        return text

    def _take_certain_text(self, marks: Iterable[str]) -> str:
        """Consume the text that belongs to the current part whatever follows; trailing white space may be dropped."""
        if self._is_text_over:
            return self._take_all()
        text = self._text
        n_held = max((_overlap(text, mark) for mark in marks), default=0)
        end = len(text[: len(text) - n_held].rstrip())
        self._text = text[end:]
        return text[:end]


_NOTHING = ParsedDelta(spans=())


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the text's end may begin the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
