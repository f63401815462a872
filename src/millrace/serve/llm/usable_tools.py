"""Which of a request's tools can be used: functions. Others are left out, and named in `x-millrace-ignored`."""

from collections.abc import Collection, Mapping
from typing import Any

from millrace.errors import RequestError
from millrace.runtime.request.tool_specs import MAX_TOOLS
from millrace.serve.http.unknown_fields import closest_name, header_name, ignored_names

FUNCTION = ("name", "description", "parameters", "strict")


def usable_tools(
    tools: list[dict[str, Any]] | None,
    kinds: Collection[object],
    tool_fields: Collection[str],
    function_fields: Collection[str] = (),
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return the tools of these types, without fields that change nothing; and what was left out, by its path.

    kinds: None for tools that name no type; known: fields of a tool; within: of its `function`
    raises RequestError for a type or a field that was probably meant to be a known one
    """
    if not tools or len(tools) > MAX_TOOLS:  # which is refused elsewhere
        return tools, []
    usable, ignored = list[dict[str, Any]](), list[str]()
    names = [kind for kind in kinds if isinstance(kind, str)]
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and kind not in kinds:
            if (meant := closest_name(kind, names)) is not None:
                what, expected = f'tools[{i}].type is "{kind}"', f'did you mean "{meant}"?'
                raise RequestError(what, expected, "correct tools", "tools")
            ignored.append(header_name(f"tools.{kind}"))
            continue
        ignored += ignored_names(tool, tool_fields, f"tools[{i}]", "tools")
        if function_fields and isinstance(function := tool.get("function"), dict):
            ignored += ignored_names(function, function_fields, f"tools[{i}].function", "tools")
        usable.append(tool)
    return usable, ignored


def remove_unknown(value: Mapping[str, Any] | None, known_names: Collection[str], where: str) -> list[str]:
    """Remove from an object what is not known, and return it by its path. raises RequestError as `ignored_names`"""
    return ignored_names(value, known_names, where, where.partition(".")[0]) if isinstance(value, dict) else []
