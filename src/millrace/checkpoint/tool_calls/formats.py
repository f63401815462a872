"""The families' formats of tool calls, as data for all who need them: the prompt, the reader of answers, the grammar.

Sources: the chat templates of the models themselves, and what their makers publish beside them: Meta's prompt formats
for Llama 3.1 to 3.3; Nous' Hermes function calling, which Qwen 2.5 and 3 took over; `mistral-common`; the model cards
of DeepSeek V3, R1 and V3.1.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A call as text: before + name + middle + arguments + after; around all of them prologue and epilogue."""

    prologue: str = ""
    before: str = ""
    middle: str
    after: str = ""
    joiner: str = ""
    epilogue: str = ""

    def calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Each a name and the JSON text of its arguments, as a model would have written them."""
        each = (f"{self.before}{quoted(name)}{self.middle}{arguments}{self.after}" for name, arguments in calls)
        return self.prologue + self.joiner.join(each) + self.epilogue


def quoted(name: str) -> str:
    """As between quotation marks."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one family writes calls.

    opens: with one of these, calls begin, wherever in the answer; between: what may stand around single ones, beside
        white space
    header: a name before its arguments; None: calls are objects with both. mixed: they may be either
    bare: without anything in front: an object at the beginning of the answer that names a tool
    short_ids: its templates take ids of nine letters and digits only; text_arguments: and arguments as JSON text
    native: the model's template writes calls and their results; else the prompt tells of them in words
    tells: it tells the model of its tools, too; else the prompt does. single: it takes one call a message
    """

    name: str
    written: Written
    opens: tuple[str, ...]
    between: tuple[str, ...] = ()
    header: re.Pattern[str] | None = None
    mixed: bool = False
    bare: bool = False
    short_ids: bool = False
    text_arguments: bool = False
    native: bool = True
    tells: bool = True
    single: bool = False


_TAGGED = Written(
    before='<tool_call>\n{"name": "', middle='", "arguments": ', after="}\n</tool_call>", joiner="\n"
)  # fmt: skip
HERMES = ToolFormat(name="hermes", written=_TAGGED, opens=("<tool_call>",), between=("</tool_call>",))
# For models whose template knows no tools: `prompt.py` tells them, in Hermes' words, which are short and unlike prose.
GENERIC = ToolFormat(
    name="generic", written=_TAGGED, opens=("<tool_call>",), between=("</tool_call>",), native=False, tells=False
)  # fmt: skip
LLAMA = ToolFormat(
    name="llama3",
    written=Written(before='{"name": "', middle='", "parameters": ', after="}", joiner="; "),
    opens=("<|python_tag|>",), between=(";", ","), bare=True,
)  # fmt: skip
# Possessive: what has been matched is not tried shorter, which would take as many steps as the square of white space.
_MISTRAL_HEADER = re.compile(r"(?P<name>[\w.:/-]++)\s*+(?:\[CALL_ID\]\w*+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_MISTRAL_AROUND = ("[", ",", "]", "[/TOOL_CALLS]")
MISTRAL = ToolFormat(
    name="mistral",
    written=Written(
        prologue="[TOOL_CALLS] [", before='{"name": "', middle='", "arguments": ', after="}", joiner=", ", epilogue="]"
    ),
    opens=("[TOOL_CALLS]",), between=_MISTRAL_AROUND, header=_MISTRAL_HEADER, mixed=True, short_ids=True,
)  # fmt: skip
MISTRAL_NEMO = replace(MISTRAL, written=replace(MISTRAL.written, prologue="[TOOL_CALLS]["))  # without the space
MISTRAL_ARGS = ToolFormat(
    name="mistral", written=Written(before="[TOOL_CALLS]", middle="[ARGS]"),
    opens=("[TOOL_CALLS]",), between=_MISTRAL_AROUND, header=_MISTRAL_HEADER, mixed=True, short_ids=True,
)  # fmt: skip
_CALLS, _ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_HEADER = re.compile(
    rf"(?:function{_SEP})?(?P<name>[^\s{{<｜]++)\s*+(?:{_SEP})?\s*+(?:```json\s*+)?(?=\{{)"
)  # fmt: skip
_DEEPSEEK_AROUND = (_CALL, _END, _ENDS, "```")
DEEPSEEK = ToolFormat(
    name="deepseek_v3",
    written=Written(
        prologue=_CALLS, before=f"{_CALL}function{_SEP}", middle="\n```json\n", after=f"\n```{_END}", joiner="\n",
        epilogue=_ENDS,
    ),
    opens=(_CALLS,), between=_DEEPSEEK_AROUND, header=_DEEPSEEK_HEADER, text_arguments=True,
)  # fmt: skip
DEEPSEEK_PLAIN = ToolFormat(
    name="deepseek_v31", written=Written(prologue=_CALLS, before=_CALL, middle=_SEP, after=_END, epilogue=_ENDS),
    opens=(_CALLS,), between=_DEEPSEEK_AROUND, header=_DEEPSEEK_HEADER, text_arguments=True,
)  # fmt: skip
# A template may count calls for other reasons than to refuse several: it does where it raises in the same branch.
_ONE_CALL = re.compile(
    r"tool_calls\s*\|\s*length\s*[!=]=\s*1\b(?:(?!\bend(?:if|for)\b).){0,400}?\braise_exception\b", re.S
)


def tool_format(template: str) -> ToolFormat:
    """Of the model that has this chat template, by the marks that it writes into the history of a conversation."""
    found = _by_marks(template)
    # DeepSeek V3's and R1's write calls and results, and say nothing of what may be called.
    tells = found.native and re.search(r"\btools\b", template) is not None
    single = found.native and _ONE_CALL.search(template) is not None  # Llama 3.1's to 3.3's refuse several
    return found if (tells, single) == (found.tells, found.single) else replace(found, tells=tells, single=single)


def _by_marks(template: str) -> ToolFormat:
    if not re.search(r"\btools?\b", template):
        return GENERIC
    if _CALLS in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_PLAIN
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return MISTRAL_ARGS
        return MISTRAL_NEMO if "[TOOL_CALLS][" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template:  # with it, calls are XML: Qwen3-Coder's
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA
    return GENERIC


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What stands around a model's thoughts, which go before its answer; gap: between both, or less of it."""

    begin: str = "<think>"
    end: str = "</think>"
    gap: str = "\n\n"


def reasoning(template: str) -> Reasoning | None:
    """None for a model that does not think aloud, or whose marks are others."""
    known = Reasoning()
    return known if known.end in template else None
