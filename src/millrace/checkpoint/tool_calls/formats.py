"""Detects the tool-call format of a chat template by rendering a conversation with a call.

The template's source does not decide, because many templates mention several formats. A call is rendered, and the
format is the one whose parser finds that call in it and nothing else. Every other template is GENERIC: the prompt
describes the tools in text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.checkpoint.chat.chat_template import ChatLimits, ChatTemplate
from millrace.checkpoint.tool_calls.answer_parser import AnswerParser, joined
from millrace.checkpoint.tool_calls.families import GENERIC, NATIVE
from millrace.checkpoint.tool_calls.families import HERMES as HERMES
from millrace.checkpoint.tool_calls.families import LLAMA as LLAMA
from millrace.checkpoint.tool_calls.families import MISTRAL as MISTRAL
from millrace.checkpoint.tool_calls.families import MISTRAL_ARGS as MISTRAL_ARGS
from millrace.checkpoint.tool_calls.families import Reasoning as Reasoning
from millrace.checkpoint.tool_calls.families import ToolFormat as ToolFormat
from millrace.errors import CheckpointError, RequestError

_NAME, _ARGUMENTS, _ABOUT = "look_up_tides", {"harbour_number": 47119}, "when the water is high at a harbour"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": _ABOUT,
        "parameters": {
            "type": "object",
            "properties": {"harbour_number": {"type": "integer", "description": "the number of the harbour"}},
            "required": ["harbour_number"],
        },
    },
}
_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "When can we leave?"}
_ANSWER = "Let us leave at noon."
_LIMITS = ChatLimits(timeout_s=2.0)
# Allowed around a call in its turn: white space, empty reasoning, marks such as <|eom_id|>.
_MARKS = re.compile(r"(?:\s|</?[a-z_]{1,30}>|<[|｜][^<>|｜]{1,40}[|｜]>|\[/?[A-Z_]{1,20}\])*")
_CALL_ID = re.compile(r"\[CALL_ID\]\w*")
_BEGUN_MARK = re.compile(r"(?:<[|｜]?[^<>\s]{0,40}|\[[A-Z_/]{0,20})$")
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "", "unk_token": ""}

Message = Mapping[str, object]


def tool_format(template: str) -> ToolFormat:
    """Return the format of the model that has this chat template."""
    if not re.search(r"\btool", template):
        return GENERIC
    rendering = ChatTemplate(template, _SPECIAL, _LIMITS)
    try:
        return _Probe(rendering).format()
    except CheckpointError:  # the template is broken or takes too long, which is reported when it is used
        return GENERIC
    finally:
        rendering.close()


def reasoning(template: str) -> Reasoning | None:
    """Return the marks of a model's reasoning; None if it has none, or unknown marks."""
    reasoning = Reasoning()
    return reasoning if reasoning.end in template else None


@dataclass(frozen=True, slots=True)
class _MessageVariant:
    """One way to represent a conversation with calls for a template."""

    text_arguments: bool
    content: str | None
    begin: tuple[Message, ...]
    result: bool  # include the tool's result: some templates refuse calls without one

    def conversation(self, n_calls: int) -> list[Message]:
        arguments = json.dumps(_ARGUMENTS) if self.text_arguments else _ARGUMENTS
        ids = [f"abcdefgh{i}" for i in range(n_calls)]
        function = {"name": _NAME, "arguments": arguments}
        calls = [{"id": each, "type": "function", "function": function} for each in ids]
        result = [{"role": "tool", "name": _NAME, "content": "noon", "tool_call_id": each} for each in ids]
        turn_with_calls = {"role": "assistant", "content": self.content, "tool_calls": calls}
        return [*self.begin, _USER, turn_with_calls, *(result if self.result else ())]


def _message_variants() -> Iterator[_MessageVariant]:
    for result in (False, True):
        for begin in ((), (_SYSTEM,)):
            for text_arguments in (False, True):
                for content in (None, ""):
                    yield _MessageVariant(text_arguments, content, begin, result)


class _Probe:
    """Renders calls with one template. Methods raise CheckpointError if the template is broken."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def format(self) -> ToolFormat:
        for way in _message_variants():
            turn = self._turn(way)
            fitting = [each for each in NATIVE if turn is not None and _matches_turn(each, turn, way.result)]
            if turn is not None and fitting:
                exact = (each for each in fitting if _opening(each) in _CALL_ID.sub("", turn))
                result = next(exact, None) or _as_rendered(fitting[0], turn)
                describes_tools, single = self._describes_tools(way), self._rendered(way.conversation(2)) is None
                return replace(
                    result, text_arguments=way.text_arguments, describes_tools=describes_tools, single=single
                )
        return GENERIC

    def _turn(self, way: _MessageVariant) -> str | None:
        """Return the text rendered in the place of the answer, from its first character; None if it has no call."""
        rendered = self._rendered(way.conversation(1))
        if rendered is None or _NAME not in rendered:
            return None
        plain = self._rendered([*way.begin, _USER, {"role": "assistant", "content": _ANSWER}])
        header = "" if plain is None else plain.partition(_ANSWER)[0]
        n = _n_common(header, rendered)
        begun = None if n == len(header) else _BEGUN_MARK.search(rendered[:n])
        return rendered[begun.start() if begun else n :]

    def _describes_tools(self, way: _MessageVariant) -> bool:
        """Whether the template describes the tools."""
        rendered = self._rendered([*way.begin, _USER]) or self._rendered(way.conversation(1)) or ""
        return _ABOUT in rendered

    def _rendered(self, messages: Sequence[Message]) -> str | None:
        """Return the text, or None if the template refuses these messages."""
        try:
            return self._template.render(messages, add_generation_prompt=False, extra={"tools": [_TOOL]})
        except RequestError:
            return None


def _n_common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _opening(tool_format: ToolFormat) -> str:
    return f"{tool_format.syntax.prologue}{tool_format.syntax.before}{_NAME}{tool_format.syntax.middle}"


def _matches_turn(tool_format: ToolFormat, turn: str, has_more: bool) -> bool:
    """Whether the turn is a call in this format, and nothing else. has_more: the tool's result follows"""
    lead = _MARKS.match(turn)
    assert lead is not None
    begins = [_without_whitespace(_CALL_ID.sub("", turn[at:])) for at in range(lead.end() + 1)]
    strict = tool_format.bare or tool_format.header is not None  # otherwise keys may have any order
    opening = _without_whitespace(_opening(tool_format) if strict else tool_format.opens[0])
    if not any(begin.startswith(opening) for begin in begins):
        return False
    reader = AnswerParser(tool_format, None, tools=[_NAME])
    parsed = joined(reader.push(turn), reader.flush())
    if [part.name for part in parsed.calls if part.name is not None] != [_NAME]:
        return False
    try:
        arguments = json.loads("".join(part.arguments for part in parsed.calls))
    except ValueError:
        return False
    return bool(arguments == _ARGUMENTS and (has_more or _MARKS.fullmatch(parsed.content)))


def _as_rendered(tool_format: ToolFormat, turn: str) -> ToolFormat:
    """Return a format whose calls are rendered as in the turn, with the same keys and white space.

    If the arguments precede the name, calls keep the syntax of the format's family.
    """
    syntax, closing = tool_format.syntax, tool_format.between[0] if tool_format.between else ""
    begin = turn.find(tool_format.opens[0])
    name_at = turn.find(_NAME, begin)
    for separators in (None, (",", ":")):
        arguments = json.dumps(_ARGUMENTS, separators=separators)
        at = turn.find(arguments, name_at)
        end = turn.find(closing, at + len(arguments))
        if tool_format.header is None and not syntax.prologue and closing and 0 <= begin < name_at < at < end:
            rendered = replace(
                syntax,
                before=turn[begin:name_at],
                middle=turn[name_at + len(_NAME) : at],
                after=turn[at + len(arguments) : end + len(closing)],
            )
            return replace(tool_format, syntax=rendered)
    return tool_format


def _without_whitespace(text: str) -> str:
    return re.sub(r"\s", "", text)
