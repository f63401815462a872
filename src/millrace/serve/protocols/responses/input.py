"""What a request for a response says, in the words of the one path that answers: messages, tools, parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.serve.llm.request_types import CalledFunction, Message, ToolCall
from millrace.serve.llm.structured_output import response_format
from millrace.serve.llm.tools import RESPONSES, Tools, tools_of
from millrace.serve.protocols.responses.items import CALLS, OUTPUTS, called, output_of
from millrace.serve.protocols.responses.protocol import LOGPROBS, ResponsesRequest

# What is given back, and as what where it was left out.
_TOLD: Mapping[str, object] = {
    "text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto",
    "reasoning": {"effort": None, "summary": None}, "metadata": {},
}  # fmt: skip
MAX_TOLD_BYTES = 128 * 1024
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def params_of(asked: ResponsesRequest) -> SamplingParams:
    """raises RequestError"""
    wants_logprobs = LOGPROBS in (asked.include or ())
    if asked.top_logprobs and not wants_logprobs:
        raise RequestError(
            f'top_logprobs is set, but include has no "{LOGPROBS}"', "both", "add it to include", "top_logprobs"
        )
    return SamplingParams(
        max_tokens=asked.max_output_tokens, temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed,
        structured_outputs=_form(asked.text), logprobs=(asked.top_logprobs or 0) if wants_logprobs else None,
    )  # fmt: skip


def told_of(asked: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """What is given back as it came, as JSON: it is kept as long as the response.

    raises RequestError where it is large; tools have a bound of their own
    """
    told = {name: msgspec.json.encode(getattr(asked, name) or default) for name, default in _TOLD.items()}
    for name, written in {**told, "chat_template_kwargs": msgspec.json.encode(asked.chat_template_kwargs)}.items():
        if name != "tools" and len(written) > MAX_TOLD_BYTES:
            what = f"{name} has {len(written)} bytes"
            raise RequestError(what, f"at most {MAX_TOLD_BYTES}", f"shorten {name}", name)
    return {name: msgspec.Raw(written) for name, written in told.items()}


def _form(text: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """`text.format` is a chat's `response_format` with the schema's fields one level higher."""
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"text.format is of type {type(given).__name__}", "an object", "correct text", "text")
    described = {name: value for name, value in given.items() if name != "type"}
    return response_format({"type": given.get("type"), **({"json_schema": described} if described else {})})


def tools_of_response(asked: ResponsesRequest) -> Tools | None:
    """Functions stand one level higher here than in a chat. raises RequestError naming the field"""
    given: list[dict[str, object]] = []
    for i, tool in enumerate(asked.tools or ()):
        if tool.get("type") != "function":
            raise _wrong_tool(f"tools[{i}].type is {tool.get('type')!r:.60}")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        given.append({"type": "function", "function": function})
    choice: object = asked.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return tools_of(given, choice, asked.parallel_tool_calls, RESPONSES)


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """raises RequestError naming the item"""
    if isinstance(given, str):
        return [Message("user", given)]
    messages: list[Message] = []
    thoughts = ""  # of the assistant's next message
    for i, item in enumerate(given):
        where = f"input[{i}]"
        match item:
            case {"type": "reasoning"}:
                thoughts = _texts(item.get("content") or [], f"{where}.content")
                continue
            case {"type": str(kind)} if kind in CALLS or kind in OUTPUTS:
                _add_call(messages, item, where, thoughts)
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                if role not in _ROLES:
                    raise _wrong(f"{where}.role is {role!r:.60}", ", ".join(_ROLES))
                text = _texts(content, f"{where}.content")
                is_ours = role == "assistant"
                message = Message(role, text, reasoning_content=(thoughts or None) if is_ours else None)  # type: ignore[arg-type]
                message.prefix, message.partial = item.get("prefix") is True, item.get("partial") is True
                messages.append(message)
            case {"type": "item_reference"}:
                raise RequestError(f"{where} is an item_reference", "the item itself", "send the item", "input")
            case _:
                raise _wrong(f"{where} is {item!r:.100}", "a message, a function_call, or a function_call_output")
        thoughts = ""
    if not messages:
        raise _wrong("input has no messages", "at least one")
    return messages


def _add_call(messages: list[Message], item: Mapping[str, Any], where: str, thoughts: str) -> None:
    """A call of a tool, or what came of one. raises RequestError for an item that lacks a part"""
    made, result = called(item), output_of(item)
    if made is None and (result is None or item["type"] in CALLS):
        raise _wrong(f"{where} is {item!r:.100}", "a whole call with its call_id, or the output of one")
    if made is not None:
        call_id, name, arguments = made
        call = ToolCall(CalledFunction(name, arguments), call_id)
        last = messages[-1] if messages else None
        if last is not None and last.role == "assistant":  # the calls of one turn are one message
            last.tool_calls = last.tool_calls or []
            last.tool_calls.append(call)
        else:
            messages.append(Message("assistant", None, tool_calls=[call], reasoning_content=thoughts or None))
    if result is not None:
        messages.append(Message("tool", _texts(result[1], f"{where}.output"), tool_call_id=result[0]))


def _texts(content: object, where: str) -> str:
    """A text, or parts of it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where} is of type {type(content).__name__}", "a text, or parts of it")
    texts = []
    for i, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise _wrong(f"{where}[{i}] is {part!r:.100}", '{"type": "input_text", "text": ...}')
    return "\n".join(texts)


def _wrong_tool(what: str) -> RequestError:
    return RequestError(what, RESPONSES.tool, "correct tools", "tools")


def _wrong(what: str, expected: str) -> RequestError:
    return RequestError(what, expected, "correct input; images, files and sound are not read", "input")
