"""Grammars of answers that call tools, in llguidance's Lark."""

import json
import re
from collections.abc import Callable, Mapping

from millrace.checkpoint.tool_calls.families import ToolFormat, quoted

Special = Callable[[str], int | None]  # returns the id of a text that is a single special token
_MARK = re.compile(r"<[|｜][^<>|｜]+[|｜]>|\[[A-Z_]+\]")


Schemas = Mapping[str, Mapping[str, object]]


def calls_grammar(
    tool_format: ToolFormat,
    tools: Schemas,
    special: Special,
    *,
    max_calls: int,
    or_json: Mapping[str, object] | None = None,
) -> str:
    """Return the grammar of answers that are calls.

    tools: name -> schema of the arguments; max_calls: maximum number of calls; or_json: schema of JSON allowed instead
    """
    start = ["start: calls"] if or_json is None else ["start: calls | answer", f"answer: %json {json.dumps(or_json)}"]
    return "\n".join([*start, *_calls(tool_format, tools, special, max_calls, "")])


def free_grammar(tool_format: ToolFormat, tools: Schemas, special: Special, *, max_calls: int) -> str:
    """Return the grammar of answers that are text and may contain calls: what begins like a call must be one."""
    opening = tool_format.syntax.prologue + tool_format.syntax.before
    trigger = next((text for text in tool_format.opens if opening.startswith(text)), "")
    if not trigger:
        rules = ["start: calls | TEXT", r"TEXT: /(\s*[^\s{](.|\n)*)?/"]
    elif special(trigger) is not None:
        rules = [f"start: TEXT ({_terms(trigger, special)} calls TEXT)?", r"TEXT: /(.|\n)*/"]
    else:
        head = f"head[lazy]: TEXT {json.dumps(trigger)}"
        rules = ["start: TEXT | head calls TEXT", head, r"TEXT: /(.|\n)*/"]
    return "\n".join([*rules, *_calls(tool_format, tools, special, max_calls, trigger)])


def _calls(tool_format: ToolFormat, tools: Schemas, special: Special, max_calls: int, text_rule: str) -> list[str]:
    """Return the rule `calls` and its dependencies, except `said`, with which the first call begins."""
    w = tool_format.syntax
    first = _terms((w.prologue + w.before).removeprefix(text_rule), special)
    further = f"({_terms(w.joiner + w.before, special)} one){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    each = [
        f"call_{i}: {_terms(quoted(name) + w.middle, special)} %json {json.dumps(schema)} {_terms(w.after, special)}"
        for i, (name, schema) in enumerate(tools.items())
    ]
    one = "one: " + " | ".join(f"call_{i}" for i in range(len(tools)))
    return [f"calls: {first} one {further} {_terms(w.epilogue, special)}", one, *each]


def _terms(text: str, special: Special) -> str:
    """Return a text in Lark: special tokens by id, everything else in quotation marks."""
    terms, at = [], 0
    for mark in _MARK.finditer(text):
        token = special(mark[0])
        if token is not None:
            terms += [text[at : mark.start()], token]
            at = mark.end()
    terms.append(text[at:])
    return " ".join(f"<[{t}]>" if isinstance(t, int) else json.dumps(t) for t in terms if t != "")
