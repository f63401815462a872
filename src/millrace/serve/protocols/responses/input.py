"""Conversion of a Responses request into messages, tools and sampling parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.serve.llm.request_types import CalledFunction, Message, ToolCall
from millrace.serve.llm.structured_output import response_format
from millrace.serve.llm.tools import RESPONSES, Tools, tools_of
from millrace.serve.protocols.responses.items import CALLS, OUTPUTS, call_of, output_of
from millrace.serve.protocols.responses.protocol import LOGPROBS, ResponsesRequest

# Fields that the reply echoes, with their values if the request leaves them out.
_ECHO_DEFAULTS: Mapping[str, object] = {
    "text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto",
    "reasoning": {"effort": None, "summary": None}, "metadata": {},
}  # fmt: skip
MAX_ECHO_BYTES = 128 * 1024
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def params_of(request: ResponsesRequest) -> SamplingParams:
    """Return the sampling parameters of a request. raises RequestError"""
    wants_logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not wants_logprobs:
        raise RequestError(
            f'top_logprobs is set, but include has no "{LOGPROBS}"', "both", "add it to include", "top_logprobs"
        )
    return SamplingParams(
        max_tokens=request.max_output_tokens, temperature=request.temperature, top_p=request.top_p, seed=request.seed,
        structured_outputs=_form(request.text), logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
    )  # fmt: skip


def echoed_fields(request: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Return the fields that the reply echoes, as JSON, which is stored as long as the response.

    raises RequestError if they are large; tools have their own bound
    """
    encoded = {name: msgspec.json.encode(getattr(request, name) or default) for name, default in _ECHO_DEFAULTS.items()}
    for name, data in {**encoded, "chat_template_kwargs": msgspec.json.encode(request.chat_template_kwargs)}.items():
        if name != "tools" and len(data) > MAX_ECHO_BYTES:
            message = f"{name} has {len(data)} bytes"
            raise RequestError(message, f"at most {MAX_ECHO_BYTES}", f"shorten {name}", name)
    return {name: msgspec.Raw(data) for name, data in encoded.items()}


def _form(text: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the constraint of `text.format`: a chat's `response_format` with the schema's fields one level higher."""
    text_format = (text or {}).get("format")
    if text_format is None:
        return None
    if not isinstance(text_format, Mapping):
        raise RequestError(f"text.format is of type {type(text_format).__name__}", "an object", "correct text", "text")
    described = {name: value for name, value in text_format.items() if name != "type"}
    return response_format({"type": text_format.get("type"), **({"json_schema": described} if described else {})})


def tools_of_response(request: ResponsesRequest) -> Tools | None:
    """Return the tools; function fields are one level higher than in a chat. raises RequestError naming the field"""
    tools: list[dict[str, object]] = []
    for i, tool in enumerate(request.tools or ()):
        if tool.get("type") != "function":
            raise _wrong_tool(f"tools[{i}].type is {tool.get('type')!r:.60}")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        tools.append({"type": "function", "function": function})
    choice: object = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return tools_of(tools, choice, request.parallel_tool_calls, RESPONSES)


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of the input's items. raises RequestError naming the item"""
    if isinstance(items, str):
        return [Message("user", items)]
    messages: list[Message] = []
    thoughts = ""  # of the assistant's next message
    for i, item in enumerate(items):
        path = f"input[{i}]"
        match item:
            case {"type": "reasoning"}:
                thoughts = _texts(item.get("content") or [], f"{path}.content")
                continue
            case {"type": str(kind)} if kind in CALLS or kind in OUTPUTS:
                _add_call(messages, item, path, thoughts)
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                if role not in _ROLES:
                    raise _wrong(f"{path}.role is {role!r:.60}", ", ".join(_ROLES))
                text = _texts(content, f"{path}.content")
                is_ours = role == "assistant"
                message = Message(role, text, reasoning_content=(thoughts or None) if is_ours else None)  # type: ignore[arg-type]
                message.prefix, message.partial = item.get("prefix") is True, item.get("partial") is True
                messages.append(message)
            case {"type": "item_reference"}:
                raise RequestError(f"{path} is an item_reference", "the item itself", "send the item", "input")
            case _:
                raise _wrong(f"{path} is {item!r:.100}", "a message, a function_call, or a function_call_output")
        thoughts = ""
    if not messages:
        raise _wrong("input has no messages", "at least one")
    return messages


def _add_call(messages: list[Message], item: Mapping[str, Any], path: str, thoughts: str) -> None:
    """Add a tool call or a tool's output. raises RequestError for an incomplete item"""
    call_fields, result = call_of(item), output_of(item)
    if call_fields is None and (result is None or item["type"] in CALLS):
        raise _wrong(f"{path} is {item!r:.100}", "a whole call with its call_id, or the output of one")
    if call_fields is not None:
        call_id, name, arguments = call_fields
        call = ToolCall(CalledFunction(name, arguments), call_id)
        last = messages[-1] if messages else None
        if last is not None and last.role == "assistant":  # the calls of one turn are one message
            last.tool_calls = last.tool_calls or []
            last.tool_calls.append(call)
        else:
            messages.append(Message("assistant", None, tool_calls=[call], reasoning_content=thoughts or None))
    if result is not None:
        messages.append(Message("tool", _texts(result[1], f"{path}.output"), tool_call_id=result[0]))


def _texts(content: object, path: str) -> str:
    """Return a content as one text. raises RequestError for parts that are not text"""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{path} is of type {type(content).__name__}", "a text, or parts of it")
    texts = []
    for i, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise _wrong(f"{path}[{i}] is {part!r:.100}", '{"type": "input_text", "text": ...}')
    return "\n".join(texts)


def _wrong_tool(what: str) -> RequestError:
    return RequestError(what, RESPONSES.tool, "correct tools", "tools")


def _wrong(what: str, expected: str) -> RequestError:
    return RequestError(what, expected, "correct input; images, files and sound are not read", "input")
