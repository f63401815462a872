"""Tools of a conversation: parsing, checks, and the constraint on an answer that must call one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.checkpoint.tool_calls.formats import ToolFormat
from millrace.checkpoint.tool_calls.grammar import calls_grammar, free_grammar
from millrace.errors import RequestError, nearest
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.request.tool_specs import MAX_TOOLS, OPENAI, ToolShape, checked_functions
from millrace.runtime.structured_output.grammar import in_one_layout
from millrace.serve.http.errors import not_yet
from millrace.serve.http.unknown_fields import closest_name, header_name, ignored_names

MAX_CALLS = 16  # of one answer: a small model might never stop calling
FUNCTION = ("name", "description", "parameters", "strict")  # fields of a function


RESPONSES = ToolShape(
    '{"type": "function", "name": ..., "description": ..., "parameters": {...}}',
    '"none", "auto", "required" or {"type": "function", "name": ...}',
)  # fmt: skip
ANTHROPIC = ToolShape(
    '{"name": ..., "description": ..., "input_schema": {...}}',
    '{"type": "auto" | "any" | "none"} or {"type": "tool", "name": ...}', parameters="input_schema",
    longest=128,
)  # fmt: skip
_ELSEWHERE = {"$ref", "anyOf", "oneOf", "allOf"}  # where a schema may name properties instead of in `properties`


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of one conversation.

    specs: as clients write them, and chat templates read them
    must: one of them is called at least; only: this one; parallel: an answer may have several calls
    """

    specs: Sequence[Mapping[str, object]]
    schemas: Mapping[str, Mapping[str, object]]  # of the arguments, by the tool's name
    strict: bool = False  # calls that the model makes by itself keep to the schemas
    must: bool = False
    only: str | None = None
    parallel: bool = True

    def max_calls(self, tool_format: ToolFormat) -> int:
        """Return how many calls an answer may have: at most as many as the chat template renders."""
        return MAX_CALLS if self.parallel and self.only is None and not tool_format.single else 1

    def constraint(
        self,
        tool_format: ToolFormat,
        special: Callable[[str], int | None],
        text_constraint: StructuredOutputsParams | None,
    ) -> StructuredOutputsParams | None:
        """Return the answer's constraint, or None. text_constraint: that of a text answer

        raises RequestError if both cannot be combined
        """
        schemas = {self.only: self.schemas[self.only]} if self.only else self.schemas
        arguments = {name: in_one_layout(schema) for name, schema in schemas.items()}
        if self.must:
            if text_constraint is not None:
                raise RequestError(
                    f"tool_choice asks for a call, and {text_constraint.field_name} for another form", "one of them",
                    f'leave {text_constraint.field_name} out, or set tool_choice to "auto"', "tool_choice",
                )  # fmt: skip
            return StructuredOutputsParams(
                grammar=calls_grammar(tool_format, arguments, special, max_calls=self.max_calls(tool_format)),
                field_name="tools",
            )
        if text_constraint is not None:
            if text_constraint.kind not in ("json", "json_object"):
                raise RequestError(
                    f"{text_constraint.field_name} stands beside tools", "a JSON schema beside tools",
                    "leave one of them out", text_constraint.field_name,
                )  # fmt: skip
            schema = in_one_layout(text_constraint.schema())
            text = calls_grammar(tool_format, arguments, special, max_calls=self.max_calls(tool_format), or_json=schema)
            return StructuredOutputsParams(grammar=text, field_name=text_constraint.field_name)
        if not self.strict:
            return None
        return StructuredOutputsParams(
            grammar=free_grammar(tool_format, arguments, special, max_calls=self.max_calls(tool_format)),
            field_name="tools",
        )


def tools_of(
    tools: Sequence[Mapping[str, object]] | None, choice: object, parallel: bool | None, shape: ToolShape = OPENAI
) -> Tools | None:
    """Return the tools of OpenAI's three fields; None if nothing may be called. raises RequestError naming the field

    shape: the shape of tools in the client's protocol
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice is set, but there are no tools", "both", "send tools", "tool_choice")
        return None
    functions = checked_functions(tools, shape)
    schemas = {str(function["name"]): _schema(function.get("parameters")) for function in functions}
    must, only = _chosen(choice, schemas, shape)
    if choice == "none":
        return None
    strict = any(function.get("strict") for function in functions)
    if must or strict:  # the others are for the model to read
        for name, schema in schemas.items():
            _check_schema(name, schema)
    return Tools(
        specs=tools, schemas=schemas, strict=strict, must=must, only=only, parallel=parallel is not False
    )  # fmt: skip


def _schema(parameters: object) -> Mapping[str, object]:
    """Return the schema of a call's arguments: always an object, with no other properties unless it allows them.

    A schema that names properties elsewhere (`$ref`, `anyOf`, ...) is not closed, which would exclude all of them.
    """
    schema = parameters if isinstance(parameters, Mapping) else {}
    closed = {} if schema.keys() & _ELSEWHERE else {"properties": {}, "additionalProperties": False}
    return {**closed, **schema, "type": "object"}


def _check_schema(name: str, schema: Mapping[str, object]) -> None:
    """Check the schema of a tool. raises RequestError as for any schema of a structured output"""
    try:
        StructuredOutputsParams(json=schema).text()
    except RequestError as error:
        message = f"the parameters of the tool {name!r}: {error.what.partition(': ')[2]}"
        raise RequestError(message, error.expected, "correct tools", "tools") from None


def _chosen(choice: object, schemas: Mapping[str, object], shape: ToolShape) -> tuple[bool, str | None]:
    """Return whether a tool must be called, and which one, or None."""
    match choice:
        case None | "none" | "auto":
            return False, None
        case "required":
            return True, None
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in schemas:
                raise RequestError(
                    f"tool_choice names {name!r:.80}", nearest(name, schemas), "name one of tools", "tool_choice"
                )
            return True, name
        case {"type": str(kind)} if kind != "function":
            raise not_yet("tool_choice", f"send {shape.choices}", f'tool_choice of the type "{kind[:60]}"')
    raise RequestError(f"tool_choice is {choice!r:.80}", shape.choices, "correct tool_choice", "tool_choice")


def usable_tools(
    tools: list[dict[str, Any]] | None,
    kinds: Collection[object],
    tool_fields: Collection[str],
    function_fields: Collection[str] = (),
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return the tools of these types without fields that change nothing, and the paths of what was left out.

    kinds: types, None for tools that name none; tool_fields: fields of a tool; function_fields: those of its `function`
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
                message, expected = f'tools[{i}].type is "{kind}"', f'did you mean "{meant}"?'
                raise RequestError(message, expected, "correct tools", "tools")
            ignored.append(header_name(f"tools.{kind}"))
            continue
        ignored += ignored_names(tool, tool_fields, f"tools[{i}]", "tools")
        if function_fields and isinstance(function := tool.get("function"), dict):
            ignored += ignored_names(function, function_fields, f"tools[{i}].function", "tools")
        usable.append(tool)
    return usable, ignored


def remove_unknown(value: Mapping[str, Any] | None, known_names: Collection[str], path: str) -> list[str]:
    """Remove unknown names from an object, and return their paths. raises RequestError as `ignored_names`"""
    return ignored_names(value, known_names, path, path.partition(".")[0]) if isinstance(value, dict) else []
