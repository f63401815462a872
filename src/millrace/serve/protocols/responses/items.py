"""Items of a conversation's history: which are rendered, and which are left out, as those of OpenAI's hosted tools.

Clients replay answers of other servers, including calls of tools that are not available now. Calls with a type of their
own become function calls.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import RequestError
from millrace.serve.http.unknown_fields import MAX_DIFFERENT, closest_name, header_name

# Types of calls, with the field of the arguments; the name is in the item, or given by the type.
CALLS: Mapping[str, str] = {
    "function_call": "arguments", "mcp_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action",
    "shell_call": "action", "apply_patch_call": "operation",
}  # fmt: skip
_OWN_NAMES: Mapping[str, str] = {
    "local_shell_call": "local_shell", "shell_call": "shell", "apply_patch_call": "apply_patch",
}  # fmt: skip
OUTPUTS = frozenset(f"{kind}_output" for kind in CALLS if kind != "mcp_call")  # which has its output within
RENDERED = frozenset({"message", "reasoning", "item_reference", *CALLS, *OUTPUTS})
_LEFT_OUT = frozenset(
    [
        *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "tool_search_call"),
        *("computer_call", "computer_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_output", "compaction"),
    ]
)
_MEDIA = "input_"  # parts of a message, which would change the answer


def renderable_items(items: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the items that can be rendered, and the types of the others as reported to the client.

    The output of a call that is left out is left out, too. raises RequestError for a type that was probably meant to be
    a known one, or for too many different ones
    """
    renderable, calls, kinds = list[dict[str, Any]](), set[object](), set[str]()
    for i, item in enumerate(items):
        kind = item.get("type")
        if not isinstance(kind, str) or kind.startswith(_MEDIA):  # a message, or what `messages_of` refuses
            renderable.append(item)
        elif kind not in RENDERED:
            if kind not in kinds and kind not in _LEFT_OUT and (meant := closest_name(kind, RENDERED)) is not None:
                message = f'input[{i}].type is "{kind}"'
                raise RequestError(message, f'did you mean "{meant}"?', "correct input", "input")
            kinds.add(kind)
            if len(kinds) > MAX_DIFFERENT:
                message = f"input has more than {MAX_DIFFERENT} different unknown types"
                raise RequestError(message, f"at most {MAX_DIFFERENT}", "leave them out", "input")
            calls.update(name for name in (item.get("call_id"), item.get("id")) if isinstance(name, str))
        elif kind in OUTPUTS and isinstance(item.get("call_id"), str) and item["call_id"] in calls:
            kinds.add(kind)
        else:
            renderable.append(item)
    return renderable, [header_name(f"input.{kind}") for kind in kinds]


def call_of(item: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return a call's id, tool name and arguments as JSON; None for an item that is no complete call."""
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in CALLS:
        return None
    name, arguments = _OWN_NAMES.get(kind) or item.get("name"), item.get(CALLS[kind])
    call_id = _id_of(item)
    if not isinstance(name, str) or call_id is None:
        return None
    if kind in _OWN_NAMES:
        return (call_id, name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
    if not isinstance(arguments, str):
        return None
    return (
        call_id,
        name,
        json.dumps({"input": arguments}, ensure_ascii=False) if kind == "custom_tool_call" else arguments,
    )


def output_of(item: Mapping[str, Any]) -> tuple[str, object] | None:
    """Return a call's id and its output, a text or parts; None for an item that is no complete output."""
    kind, call_id = item.get("type"), _id_of(item)
    if kind == "mcp_call":
        output = item.get("output") or item.get("error")
    elif isinstance(kind, str) and kind in OUTPUTS:
        output = item.get("output")
        if output is None and kind == "apply_patch_call_output":
            output = item.get("status")
    else:
        return None
    if call_id is None or output is None:
        return None
    if kind in ("function_call_output", "custom_tool_call_output") or isinstance(output, str):
        return call_id, output
    return call_id, json.dumps(output, ensure_ascii=False)


def _id_of(item: Mapping[str, Any]) -> str | None:
    """Return the call id; `local_shell_call_output` and `mcp_call` have it as their `id`."""
    own: Sequence[object] = (item.get("call_id"), item.get("id"))
    if item.get("type") in ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"):
        own = own[:1]
    return next((name for name in own if isinstance(name, str)), None)
