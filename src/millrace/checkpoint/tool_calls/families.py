"""Formats of tool calls by model family, as data for the prompt, the answer parser and the grammar.

Sources: the models' chat templates and their publishers' documentation: Meta's prompt formats for Llama 3.1 to 3.3;
Nous' Hermes function calling, which Qwen 2.5 and 3 adopted; `mistral-common`; the model cards of DeepSeek V3, R1 and
V3.1; MeetKai's for Functionary 3.1, which adopted Llama 3.1's custom format.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """A call is before + name + middle + arguments + after; prologue and epilogue enclose all calls."""

    prologue: str = ""
    before: str = ""
    middle: str
    after: str = ""
    joiner: str = ""
    epilogue: str = ""

    def calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as the model's output. calls: name and JSON text of the arguments of each"""
        each = (f"{self.before}{quoted(name)}{self.middle}{arguments}{self.after}" for name, arguments in calls)
        return self.prologue + self.joiner.join(each) + self.epilogue


def quoted(name: str) -> str:
    """Escape a name for use between quotation marks."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The format of calls of one family.

    opens: marks that begin calls, anywhere in the answer
    between: separators allowed around single calls, in addition to white space
    header: matches a name that precedes its arguments; None: a call is a JSON object with both
    mixed: with a header, calls may also be such objects
    bare: a call may have no mark: an object at the beginning of the answer that names a tool
    short_ids: the template accepts ids of nine letters and digits only
    text_arguments: the template expects arguments as JSON text
    native: the model's template renders calls and results; otherwise they go into the prompt as text
    describes_tools: the model's template describes the tools; otherwise the prompt does
    single: the template accepts one call per message
    """

    name: str
    syntax: CallSyntax
    opens: tuple[str, ...]
    between: tuple[str, ...] = ()
    header: re.Pattern[str] | None = None
    mixed: bool = False
    bare: bool = False
    short_ids: bool = False
    text_arguments: bool = False
    native: bool = True
    describes_tools: bool = True
    single: bool = False


_TAGGED = CallSyntax(
    before='<tool_call>\n{"name": "', middle='", "arguments": ', after="}\n</tool_call>", joiner="\n"
)  # fmt: skip
HERMES = ToolFormat(name="hermes", syntax=_TAGGED, opens=("<tool_call>",), between=("</tool_call>",))
# For templates without tool support: `prompt.py` describes tools with Hermes' marks, which are short and unlike prose.
GENERIC = ToolFormat(
    name="generic", syntax=_TAGGED, opens=("<tool_call>",), between=("</tool_call>",), native=False,
    describes_tools=False
)  # fmt: skip
LLAMA = ToolFormat(
    name="llama3",
    syntax=CallSyntax(before='{"name": "', middle='", "parameters": ', after="}", joiner="; "),
    opens=("<|python_tag|>",), between=(";", ","), bare=True,
)  # fmt: skip
# Possessive quantifiers: backtracking would take quadratic time in the length of white space.
_MISTRAL_HEADER = re.compile(r"(?P<name>[\w.:/-]++)\s*+(?:\[CALL_ID\]\w*+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_MISTRAL_AROUND = ("[", ",", "]", "[/TOOL_CALLS]")
MISTRAL = ToolFormat(
    name="mistral",
    syntax=CallSyntax(
        prologue="[TOOL_CALLS] [", before='{"name": "', middle='", "arguments": ', after="}", joiner=", ", epilogue="]"
    ),
    opens=("[TOOL_CALLS]",), between=_MISTRAL_AROUND, header=_MISTRAL_HEADER, mixed=True, short_ids=True,
)  # fmt: skip
MISTRAL_NEMO = replace(MISTRAL, syntax=replace(MISTRAL.syntax, prologue="[TOOL_CALLS]["))  # without the space
MISTRAL_ARGS = ToolFormat(
    name="mistral", syntax=CallSyntax(before="[TOOL_CALLS]", middle="[ARGS]"),
    opens=("[TOOL_CALLS]",), between=_MISTRAL_AROUND, header=_MISTRAL_HEADER, mixed=True, short_ids=True,
)  # fmt: skip
MISTRAL_BARE = replace(MISTRAL_ARGS, syntax=CallSyntax(before="[TOOL_CALLS]", middle=""))  # some files of v11
_CALLS, _ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_HEADER = re.compile(
    rf"(?:function{_SEP})?(?P<name>[^\s{{<｜]++)\s*+(?:{_SEP})?\s*+(?:```json\s*+)?(?=\{{)"
)  # fmt: skip
_DEEPSEEK_AROUND = (_CALL, _END, _ENDS, "```")
DEEPSEEK = ToolFormat(
    name="deepseek_v3",
    syntax=CallSyntax(
        prologue=_CALLS, before=f"{_CALL}function{_SEP}", middle="\n```json\n", after=f"\n```{_END}", joiner="\n",
        epilogue=_ENDS,
    ),
    opens=(_CALLS,), between=_DEEPSEEK_AROUND, header=_DEEPSEEK_HEADER, text_arguments=True,
)  # fmt: skip
DEEPSEEK_PLAIN = ToolFormat(
    name="deepseek_v31", syntax=CallSyntax(prologue=_CALLS, before=_CALL, middle=_SEP, after=_END, epilogue=_ENDS),
    opens=(_CALLS,), between=_DEEPSEEK_AROUND, header=_DEEPSEEK_HEADER, text_arguments=True,
)  # fmt: skip
# Functionary 3.1 and Llama 3.1's custom format.
FUNCTION_TAG = ToolFormat(
    name="functionary",
    syntax=CallSyntax(before="<function=", middle=">", after="</function>"),
    opens=("<function=",), between=("</function>",), header=re.compile(r"(?P<name>[\w.:/-]++)>\s*+(?=\{)"),
)  # fmt: skip
LLAMA_ARGUMENTS = replace(LLAMA, name="json", syntax=replace(LLAMA.syntax, middle='", "arguments": '))
# In the order in which a rendered call is matched against them.
NATIVE = (
    HERMES, LLAMA, LLAMA_ARGUMENTS, MISTRAL, MISTRAL_NEMO, MISTRAL_ARGS, MISTRAL_BARE, DEEPSEEK, DEEPSEEK_PLAIN,
    FUNCTION_TAG,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around a model's reasoning, which precedes its answer. gap: maximum white space between both"""

    begin: str = "<think>"
    end: str = "</think>"
    gap: str = "\n\n"
