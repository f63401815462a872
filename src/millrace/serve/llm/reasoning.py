"""Switching of reasoning: the request fields that enable or disable it, and the variables of chat templates.

Clients use `enable_thinking`, Ollama's `think`, Anthropic's `thinking`, OpenRouter's `reasoning` or OpenAI's
`reasoning_effort`; chat templates read `enable_thinking` or `thinking`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from millrace.checkpoint.tool_calls.formats import reasoning
from millrace.errors import RequestError

VARIABLES = ("enable_thinking", "thinking")
_TAGS, _TEXTS = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL), re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_OFF, _ON = ("none", "off", "disabled", "false"), ("enabled", "adaptive", "auto", "on", "true")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether a request enables or disables reasoning. name: the client's field"""

    enabled: bool
    name: str


def reasoning_switch(name: str, value: object) -> bool | None:
    """Return whether a client's field enables or disables reasoning; None if it does neither.

    Efforts other than "none" do neither: the chat template decides.
    """
    match name, value:
        case (("enable_thinking" | "think" | "thinking" | "reasoning"), bool(enabled)):
            return enabled
        case "think", str(level):
            return level.casefold() not in _OFF
        case "thinking", {"type": str(kind)} if kind in (*_OFF, *_ON):
            return kind not in _OFF
        case "reasoning", {"enabled": bool(enabled)}:
            return enabled
        case "reasoning", {"effort": "none"}:
            return False
        case "reasoning_effort", "none":
            return False
    return None


# The fields, for the structs of endpoints that render a chat template.
EnableThinking = Annotated[bool | None, Meta(description="false: disable reasoning; the chat template's variable")]
Think = Annotated[Any, Meta(description="false: disable reasoning; Ollama's name")]
ThinkingType = Annotated[Any, Meta(description='{"type": "disabled"}: disable reasoning; Anthropic\'s name')]
ReasoningOptions = Annotated[Any, Meta(description='{"effort": "none"} or {"enabled": false}: disable reasoning')]
Effort = Annotated[Any, Meta(description='"none": disable reasoning; other values are ignored')]
FIELDS = ("enable_thinking", "think", "thinking", "reasoning", "reasoning_effort")


def undecided_fields(request: object) -> list[str]:
    """Return the reasoning fields of a request that neither enable nor disable reasoning."""
    values = {name: getattr(request, name) for name in FIELDS}
    return [name for name, value in values.items() if value is not None and reasoning_switch(name, value) is None]


def thinking_of(request: object) -> Thinking | None:
    """Return the reasoning switch of a request. raises RequestError if its fields contradict each other"""
    switches = {
        name: enabled for name in FIELDS if (enabled := reasoning_switch(name, getattr(request, name))) is not None
    }
    if len(set(switches.values())) > 1:
        first, second = (next(name for name, enabled in switches.items() if enabled is one) for one in (True, False))
        raise RequestError(
            f"{first} enables reasoning, and {second} disables it", "one of them", f"leave {second} out", second
        )
    return next((Thinking(enabled, name) for name, enabled in switches.items()), None)


class ThinkingSwitch:
    """The variables by which one chat template switches reasoning."""

    def __init__(self, source: str) -> None:
        code = " ".join(_TEXTS.sub("", tag) for tag in _TAGS.findall(source))
        names = (name for name in VARIABLES if re.search(rf"(?<![\w.]){name}\b", code))
        self._variables, self._thinks = tuple(names), reasoning(source) is not None

    @property
    def changes_nothing(self) -> bool:
        """Return whether the model has no reasoning and its template no variable for it."""
        return not (self._variables or self._thinks)

    def variables(self, thinking: Thinking | None) -> Mapping[str, object]:
        """Return the template's variables. raises RequestError if reasoning is disabled but cannot be turned off"""
        if thinking is not None and not thinking.enabled and self._thinks and not self._variables:
            raise RequestError(
                f"{thinking.name} disables reasoning, but this model always reasons: its chat template has no "
                "variable for it",
                f"a request without {thinking.name}", "leave it out: reasoning is separate from the answer",
                thinking.name,
            )  # fmt: skip
        return {} if thinking is None else dict.fromkeys(self._variables, thinking.enabled)
