"""Tool definitions of clients: the shape that each protocol uses, and their checks."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from millrace.errors import RequestError

MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOL_BYTES = 256 * 1024  # of all of them as JSON: they stay in memory as long as their answer runs
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


@dataclass(frozen=True, slots=True)
class ToolShape:
    """How a protocol writes a tool and the choice of one, for error messages."""

    tool: str
    choices: str
    function: str = ""  # path of name and description
    parameters: str = "parameters"
    longest: int = 64  # name, in characters


OPENAI = ToolShape(
    '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}',
    '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}', ".function",
)  # fmt: skip
_OF_FUNCTION = {"name": str, "description": str, "parameters": dict, "strict": bool}


def checked_functions(tools: Sequence[Mapping[str, object]], shape: ToolShape = OPENAI) -> list[Mapping[str, object]]:
    """Return the `function` of each tool. raises RequestError (param "tools") for an invalid tool or a repeated name

    shape: of the client's protocol
    """
    if len(tools) > MAX_TOOLS:
        raise _wrong(f"tools has {len(tools)} tools", f"at most {MAX_TOOLS}")
    if (n_bytes := len(msgspec.json.encode(tools))) > MAX_TOOL_BYTES:
        raise _wrong(f"tools takes {n_bytes} bytes of JSON", f"at most {MAX_TOOL_BYTES}")
    functions = [_function(i, tool, shape) for i, tool in enumerate(tools)]
    names: set[object] = set()
    for i, function in enumerate(functions):
        if (name := function["name"]) in names:
            raise _wrong(f"tools[{i}] has the name {name!r} again", "one tool of each name")
        names.add(name)
    return functions


def checked_tools(tools: object) -> Sequence[Mapping[str, object]]:
    """Check tools passed in Python, which no protocol has checked. raises RequestError (param "tools")"""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise _wrong(f"tools is {tools!r:.80}", f"a list of {OPENAI.tool}")
    try:
        json.dumps(list(tools))  # as the template writes them
        checked_functions(tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"tools is not JSON: {error}", f"a list of {OPENAI.tool}") from error
    return tools


def _function(i: int, tool: Mapping[str, object], shape: ToolShape) -> Mapping[str, object]:
    where = f"tools[{i}]{shape.function}"
    kind = tool.get("type")
    if kind != "function":
        raise _wrong(f"tools[{i}].type is {kind!r:.60}", '"function": this server has no tools of its own')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"tools[{i}] has no function", shape.tool)
    for key, expected in _OF_FUNCTION.items():
        value = function.get(key)
        if value is not None and not isinstance(value, expected):
            path = f"{where}.{shape.parameters if key == 'parameters' else key}"
            raise _wrong(f"{path} is of type {type(value).__name__}", shape.tool)
    name = function.get("name")
    if not isinstance(name, str) or len(name) > shape.longest or not _NAME.fullmatch(name):
        what = f"tools[{i}] has no name" if not name else f"{where}.name is {name!r:.80}"
        raise _wrong(what, f"1 to {shape.longest} letters, digits and _ . : / -")
    parameters = function.get("parameters")
    kind = parameters.get("type", "object") if isinstance(parameters, Mapping) else "object"
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise _wrong(f"{where}.{shape.parameters}.type is {kind!r:.60}", '"object": arguments have names')
    return function


def _wrong(what: str, expected: str) -> RequestError:
    return RequestError(what, expected, "correct tools", "tools")
