"""Converts a conversation with tools for the chat template."""

import json
from collections.abc import Iterator, Mapping, Sequence

from millrace.checkpoint.tool_calls.families import ToolFormat

Message = Mapping[str, object]
_INSTRUCTIONS = """You can call functions. These are their signatures, each a JSON object:
<tools>
{tools}
</tools>
{how}"""
_IN_WORDS = """To call a function, write a JSON object with its name and arguments within tags, and nothing behind it:
{example}
What it returned will be given to you within <tool_response> tags."""
_IN_ITS_FORM = """To call a function, write its name and a JSON object of its arguments so, and nothing behind it:
{example}"""
_EXAMPLE = ("name of the function", '{"name of an argument": "its value"}')


def with_tools(messages: Sequence[Message], tools: Sequence[object], tool_format: ToolFormat) -> list[Message]:
    """Return messages in the form that the template accepts: for most, arguments are objects that it renders as JSON.

    If the template does not render calls, or does not describe the tools, they are written as text instead.
    """
    if tool_format.native:
        plain = [_with_null(message) if tool_format.text_arguments else _with_objects(message) for message in messages]
    else:
        plain = list(_in_words(messages, tool_format))
    if not tools or tool_format.describes_tools:
        return plain
    how = (_IN_ITS_FORM if tool_format.native else _IN_WORDS).format(example=tool_format.syntax.calls([_EXAMPLE]))
    instructions = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool) for tool in tools), how=how)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{_text(plain[0])}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _with_null(message: Message) -> Message:
    """Set an empty content to null: DeepSeek's templates render calls only if the content is null."""
    return {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message


def _with_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [{**call, "function": _with_object(call["function"])} for call in calls]}


def _with_object(function: Mapping[str, str]) -> dict[str, object]:
    """Parse the arguments. If they are not an object, as a model may have written, they stay text."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return {**function, "arguments": arguments if isinstance(arguments, dict) else function["arguments"]}


def _in_words(messages: Sequence[Message], tool_format: ToolFormat) -> Iterator[Message]:
    """Yield messages with calls as text of the assistant, and results as one user message."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{_text(message)}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            yield message
            continue
        calls_text = tool_format.syntax.calls(
            [(call["function"]["name"], call["function"]["arguments"] or "{}") for call in calls]
        )
        content = "\n".join(filter(None, (_text(message), calls_text)))
        yield {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content or "")
