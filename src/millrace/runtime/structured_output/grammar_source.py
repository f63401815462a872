"""Structured output as llguidance's Lark, checked and compiled: the compiling process's work on one request."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output.grammar_bounds import (
    MAX_GBNF_RULES,
    check_lark,
    check_properties,
    check_rules,
    check_schema,
    with_schemas,
)
from millrace.runtime.structured_output.grammar_termination import check_terminates
from millrace.runtime.structured_output.json_schema import simplify
from millrace.runtime.structured_output.json_schema_numbers import Schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The layout of json.dumps: one space after commas and colons. Unrestricted white space could go on until max_tokens.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# For forced text, llguidance would allow only the token with which the tokenizer spells it. It would call the tokenizer
# for each mask, under the interpreter's lock, and with text, which cannot express half a character.
NO_FORCING = '%llguidance {"no_forcing": true}'
DEAD_END = "NoExtensionBias"  # no token may follow, and the answer is not complete
LIMITED = "a grammar that can be enforced within the limits"
NOTHING_FOLLOWS = "no token of the vocabulary can go on with it"
MAX_MESSAGE = 200  # of each part of llguidance's message
# Of a rule's attributes. llguidance leaves it to the sampler without an error, but a row has one temperature.
_TEMPERATURE = re.compile(
    r"""^[ \t]*+[?!]?[\w.-]++[ \t]*+\[\s*+
    (?:(?!temperature\b)[a-z_]++(?:\s*+=\s*+(?:"[^"\n]*+"|[^,\]"\n]++))?\s*+,\s*+)*+
    temperature\s*+=""",
    re.MULTILINE | re.VERBOSE,
)
_OUR_PLACE = re.compile(r"^at 1\(8\): ")  # after `start: `, which we have added


def compiled(
    params: StructuredOutputsParams, text: str, vocabulary: "LLTokenizer", limits: "LLParserLimits"
) -> tuple[str, "LLMatcher"]:
    """Return the Lark grammar of a request and its compiled matcher. raises RequestError"""
    from llguidance import LLMatcher

    source = lark_source(params, text)
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    warnings = matcher.get_grammar_warnings() if not matcher.is_error() else []
    if warnings:  # about attributes that llguidance would ignore
        raise params.refused(f"its {params.kind} cannot be enforced: {warnings[0]}", "a schema without that")
    if stop_reason := stopped_because(matcher):
        raise params.refused(f"its {params.kind} cannot be enforced: {stop_reason}", LIMITED)
    check_terminates(params, text, source)
    return source, matcher


def stopped_because(matcher: "LLMatcher") -> str:
    """Return why an answer cannot continue; "" if it can, or is complete."""
    if not matcher.is_stopped():
        return ""
    error = matcher.get_error()
    return NOTHING_FOLLOWS if error.startswith(DEAD_END) else shortened(error)


def lark_source(params: StructuredOutputsParams, text: str) -> str:
    """Return the request's grammar as llguidance's Lark. raises RequestError"""
    from llguidance import grammar_from, regex_to_lark

    try:
        match params.kind:
            case "regex":
                lark = f"start: /{regex_to_lark(text)}/"
            case "choice":
                lark = grammar_from("choice", text)
            case "grammar":
                lark = _grammar(params, text)
            case _:
                schema = _finite(params, text)
                simplify(schema, params.refused)
                check_schema(schema, params.refused)
                lark = f"start: %json {json.dumps(in_one_layout(schema))}"
    except ValueError as error:
        raise params.refused(
            f"its {params.kind} cannot be read: {shortened(str(error))}", "what its syntax allows"
        ) from None
    return f"{lark}\n{NO_FORCING}\n"


def _grammar(params: StructuredOutputsParams, text: str) -> str:
    from llguidance import grammar_from

    if _TEMPERATURE.search(text):
        what = "its grammar has a rule with a temperature, which is not supported"
        raise params.refused(what, "rules without", "send the request's own temperature")
    check_rules(text.count("::="), params.refused, MAX_GBNF_RULES)
    lark = grammar_from("grammar", text)
    check_lark(lark, params.refused)
    n_properties = 0

    def rewrite(schema: Schema) -> Schema:
        nonlocal n_properties
        simplify(schema, params.refused)
        n_properties += check_schema(schema, params.refused)
        check_properties(n_properties, params.refused)
        return schema

    return with_schemas(lark, rewrite)


def _finite(params: StructuredOutputsParams, text: str) -> Schema:
    def refuse(name: str) -> Any:
        raise params.refused(f"its json has the number {name}", "a JSON schema")

    schema: Schema = json.loads(text, parse_constant=refuse)
    return schema


def in_one_layout(schema: Mapping[str, object]) -> dict[str, object]:
    """Return a schema whose JSON has one layout. (llguidance's `lenient` would ignore keywords.)"""
    options = schema.get("x-guidance")
    return {**schema, "x-guidance": {**LAYOUT, **(options if isinstance(options, dict) else {}), "lenient": False}}


def shortened(message: str) -> str:
    """Return llguidance's message in one line, without the generated grammar that follows it.

    For a regular expression the first line quotes it, and the reason comes later.
    """
    lines = _OUR_PLACE.sub("", message.strip()).splitlines() or [""]
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return " ".join(part for part in (_bounded(lines[0]), _bounded(reason.removeprefix("error: "))) if part)


def _bounded(line: str) -> str:
    """Return the beginning and the end of a line: the error may come after a long quoted text."""
    half = MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"
