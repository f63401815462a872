"""Finds out which contents and turns a chat template can render, by rendering short conversations.

Templates differ: some fail on null content, print "None" for it, print a list of text parts as Python's repr, or refuse
system messages. `TemplateProbe` converts messages to what a template can render, and runs each probe once.

Loaded by `chat_worker.py` in its own process: standard library only.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

Message = dict[str, object]
Messages = list[Message]
# Returns the text of a conversation, with or without TOOL passed to the template; None if it cannot be rendered.
Probe = Callable[[Messages, bool], str | None]
_Texts = Callable[[object], list[str | None]]
# Recognizable texts for probes: letters only, so that trimming, quoting and escaping do not change them.
_SYSTEM, _USER, _ANSWER, _RESULT = "zqSystemzq", "zqUserzq", "zqAnswerzq", "zqResultzq"
_FIRST, _SECOND, _FUNCTION, _ARGUMENT = "zqFirstzq", "zqSecondzq", "zqFunctionzq", "zqArgumentzq"
TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": _FUNCTION, "description": "probe", "parameters": {"type": "object", "properties": {}, "required": []},
    },
}  # fmt: skip
# A list of text parts printed as Python or JSON, also inside a JSON string.
_DUMPED = re.compile(r"""\\*['"]text\\*['"]\s*:""")
_CALLING = "calling"  # kind of an assistant message with tool calls; the kind of other messages is their role
_ID = "abcdefgh0"  # nine letters and digits: some templates accept nothing else
ABSENT = object()


class TemplateProbe:
    """Finds and caches which contents a template renders for each kind of message."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._cache: dict[tuple[object, ...], object] = {}

    def system_renders(self) -> bool:
        """Whether a leading system message is rendered: some templates refuse or drop it."""
        if (key := ("system renders",)) not in self._cache:
            user = _message("user", _USER)
            text = self._probe([_message("system", _SYSTEM), user], False)
            self._cache[key] = self._probe([user], False) is None if text is None else _SYSTEM in text
        return bool(self._cache[key])

    def list_renders(self, message: Message, has_tools: bool) -> bool:
        """Whether a list of parts is rendered like a string: all its texts, and not as a printed list."""

        def all_shown(texts: _Texts) -> bool:
            plain, lists = texts(_FIRST), texts(_parts(_FIRST, _SECOND))
            is_rendered = [_shows(text, _FIRST, _SECOND) for text in lists]
            dumped = any(_n_dumped(text) > _n_dumped(base) for text, base in zip(lists, plain, strict=True))
            needed = [_shows(text, _FIRST) for text in plain]
            return any(is_rendered) and not dumped and all(s or not n for s, n in zip(is_rendered, needed, strict=True))

        return bool(self._cached("list", message, has_tools, all_shown))

    def text_renders(self, message: Message, has_tools: bool) -> bool:
        """Whether a string is rendered. False only if a list of one part is rendered instead."""

        def is_rendered(texts: _Texts) -> bool:
            if any(_shows(text, _FIRST) for text in texts(_FIRST)):
                return True
            return not any(_shows(text, _FIRST) and not _n_dumped(text) for text in texts(_parts(_FIRST)))

        return bool(self._cached("text", message, has_tools, is_rendered))

    def empty(self, message: Message, has_tools: bool) -> object:
        """Return how to represent a content without text: "", ABSENT or None, whichever renders.

        Like in transformers, a null content is first tried as an absent one. Few templates require null: those that
        render calls only if the content is null.
        """
        own: object = ABSENT if message.get("content") is None else ""
        order = [ABSENT, "", None] if own is ABSENT else ["", ABSENT, None]

        def best(texts: _Texts) -> object:
            plain = texts(_FIRST)
            rendered = [texts(content) for content in order]
            shows_call = [all(_shows(text, _ARGUMENT) for text in each) for each in rendered]
            for content, each, calls in zip(order, rendered, shows_call, strict=True):
                if _is_clean(each, plain) and (calls or not any(shows_call)):
                    return content
            return "" if any(text is not None for text in texts("")) else own

        return self._cached(("empty", own == ""), message, has_tools, best)

    def tools_render(self) -> bool:
        """Whether the template describes the tools that it gets."""
        return _shows(self._probe([_message("user", _USER)], True), _FUNCTION)

    def calls_render(self) -> bool:
        """Whether the template renders tool calls and their results."""
        calling: Message = {"role": "assistant", "tool_calls": [_call({})]}
        each = [self._contexts(calling, content, True) for content in (_FIRST, "", None)]
        return any(all(_shows(text, _ARGUMENT, _RESULT) for text in texts) for texts in each)

    def fit(self, message: Message, has_tools: bool) -> Message:
        """Return the message with its content in a form that the template renders."""
        content = message.get("content")
        if isinstance(content, list) and content:
            if self.list_renders(message, has_tools):
                return message
            content = _text_of(content)
        if not content:
            return _with_content(message, self.empty(message, has_tools))
        if self.text_renders(message, has_tools):
            return {**message, "content": content}
        return {**message, "content": [{"type": "text", "text": content}]}

    def attempts(self, messages: Messages, preamble: str, merges: bool) -> Iterator[Messages]:
        """Yield the conversation, then variants of it for templates that require alternating turns.

        preamble: text to put before the conversation: in the system message, or in the user's first message if the
        template renders no system message
        merges: whether adjacent messages of one role, and system messages, may be merged
        """
        takes_system = not (preamble or merges) or self.system_renders()
        if preamble:
            messages = _with_preamble(messages, preamble, takes_system)
        if merges and not takes_system:
            messages = _without_system(messages)
        yield messages
        if not merges:
            return
        merged = _merged(messages)
        yield merged
        later = _merged([_as_user(message) if i else message for i, message in enumerate(merged)])
        yield later
        yield _merged(later, after_results=True)

    def _cached(
        self, question: object, message: Message, has_tools: bool, answer: Callable[[_Texts], object]
    ) -> object:
        key = (question, _kind(message), _has_text_arguments(message), has_tools)
        if key not in self._cache:
            self._cache[key] = answer(lambda content: self._contexts(message, content, has_tools))
        return self._cache[key]

    def _contexts(self, like: Message, content: object, has_tools: bool) -> list[str | None]:
        """Render conversations with a message of the same kind as `like`, at the end and earlier."""
        kind, user, answer = _kind(like), _message("user", _USER), _message("assistant", _ANSWER)
        arguments: object = {_ARGUMENT: 1}
        if _has_text_arguments(like):
            arguments = f'{{"{_ARGUMENT}": 1}}'
        calling: Message = {"role": "assistant", "tool_calls": [_call(arguments)]}
        result: Message = {**_message("tool", _RESULT), "name": _FUNCTION, "tool_call_id": _ID}
        if kind == "tool":
            for of_call in ("", None, _FIRST):  # whichever the template accepts: this probe does not depend on it
                turn = [user, _with_content(calling, of_call), _with_content(result, content)]
                texts = [self._probe(each, has_tools) for each in (turn, [*turn, answer, user])]
                if any(text is not None for text in texts):
                    return texts
            return [None, None]
        subject = _with_content(calling if kind == _CALLING else {"role": like["role"]}, content)
        if kind == _CALLING:
            turns = [[user, subject, result], [user, subject, result, answer, user]]
        elif kind == "assistant":
            turns = [[user, subject], [user, subject, user]]
        elif kind == "user":
            turns = [[subject], [user, answer, subject]]
        else:
            turns = [[subject, user]]
        return [self._probe(turn, has_tools) for turn in turns]


def _kind(message: Message) -> str:
    return _CALLING if message.get("tool_calls") else str(message["role"])


def _has_text_arguments(message: Message) -> bool:
    calls = cast(Any, message.get("tool_calls"))
    return bool(calls) and isinstance(calls[0]["function"].get("arguments"), str)


def _with_content(message: Message, content: object) -> Message:
    if content is ABSENT:
        return {key: value for key, value in message.items() if key != "content"}
    return {**message, "content": content}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _call(arguments: object) -> dict[str, object]:
    return {"id": _ID, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _shows(text: str | None, *marks: str) -> bool:
    return text is not None and all(mark in text for mark in marks)


def _n_dumped(text: str | None) -> int:
    return len(_DUMPED.findall(text or ""))


def _is_clean(texts: Sequence[str | None], plain: Sequence[str | None]) -> bool:
    """Whether rendering succeeds wherever it does for a plain text, and prints no "None"."""
    pairs = list(zip(texts, plain, strict=True))
    return any(text is not None for text in texts) and all(
        base is None if text is None else text.count("None") <= (base or "").count("None") for text, base in pairs
    )


def _text_of(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in cast(list[dict[str, str]], content))
    return str(content or "")


def _put_before(text: str, message: Message) -> Message:
    return {**message, "content": "\n\n".join(filter(None, (text, _text_of(message.get("content")))))}


def _with_preamble(messages: Messages, preamble: str, takes_system: bool) -> Messages:
    role = "system" if takes_system else "user"
    first = next((i for i, m in enumerate(messages) if m["role"] == role and (role == "user" or i == 0)), None)
    if first is None:
        at = 0 if takes_system else sum(m["role"] == "system" for m in messages[:1])
        return [*messages[:at], _message(role, preamble), *messages[at:]]
    if takes_system:
        joined = "\n\n".join(filter(None, (_text_of(messages[0].get("content")), preamble)))
        return [{**messages[0], "content": joined}, *messages[1:]]
    return [*messages[:first], _put_before(preamble, messages[first]), *messages[first + 1 :]]


def _without_system(messages: Messages) -> Messages:
    """Move leading system messages into the user's first message; later ones become user messages."""
    n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    text = "\n\n".join(filter(None, (_text_of(m.get("content")) for m in messages[:n])))
    rest = [_as_user(message) for message in messages[n:]]
    if not text:
        return rest or [_message("user", "")]
    if rest and rest[0]["role"] == "user":
        return [_put_before(text, rest[0]), *rest[1:]]
    return [_message("user", text), *rest]


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _merged(messages: Messages, after_results: bool = False) -> Messages:
    """Merge adjacent messages of one role, except tool results and calls.

    after_results: also append a user message that follows a tool result to that result
    """
    joined: Messages = []
    for message in messages:
        last = joined[-1] if joined else None
        role, calls = message["role"], message.get("tool_calls")
        same = last is not None and last["role"] == role != "tool" and not last.get("tool_calls")
        follows = after_results and last is not None and last["role"] == "tool" and role == "user"
        if last is None or not (same or follows):
            joined.append(message)
            continue
        text = "\n\n".join(filter(None, (_text_of(last.get("content")), _text_of(message.get("content")))))
        merged = last if follows else {**last, **message}
        joined[-1] = {**merged, "content": text if text or not calls else None}
    return joined
