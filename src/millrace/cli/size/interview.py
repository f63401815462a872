"""Interactive questions of `millrace size`, each with help, a default and immediate validation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from millrace.cli.console import note
from millrace.errors import ConfigError, MillraceError
from millrace.size.load.load_forecast import parse_calls
from millrace.size.load.token_lengths import parse_length
from millrace.size.performance.hardware import THIS, named_hardware
from millrace.size.performance.models import find_model
from millrace.size.performance.operating_points import ALL
from millrace.size.question.question import SizingQuestion
from millrace.size.question.settings import LENGTHS

Answers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Question:
    """A question. read: converts an answer to settings, raises MillraceError"""

    text: str
    help: str
    default: str
    read: Callable[[str], Answers]


def _model(text: str) -> Answers:
    find_model(text)
    return {"model": text}


def _length(name: str) -> Callable[[str], Answers]:
    def read(text: str) -> Answers:
        if name == "input" and text in LENGTHS:
            return {"preset": text}
        parse_length(text, name, 0.75)
        return {name: text}

    return read


def _load(text: str) -> Answers:
    words = text.split()
    if len(words) == 2 and words[1] in ("users", "user"):
        return {"users": _number(words[0])}
    if "/" in text or " a " in text or " per " in text:
        parse_calls(text)
        return {"calls": text}
    return {"rate": _number(text)}


def _limit(text: str) -> Answers:
    if text == "none":
        return {"mode": "offline"}
    name, _, ms = text.partition(" ")
    if name == "first":
        return {"ttft_ms": _number(ms.removesuffix("ms"))}
    if name == "last":
        return {"mode": "sequential", "e2e_ms": _number(ms.removesuffix("ms"))}
    raise ConfigError(f'a limit "{text:.60}"', "first 500, last 5000, or none", "name the token, and milliseconds")


def _hardware(text: str) -> Answers:
    names = [name.strip() for name in text.split(",")]
    return {"hardware": [n if n.casefold() in (THIS, ALL) else named_hardware(n).device.name for n in names]}


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise ConfigError(f'"{text:.60}" is no number', "such as 31 or 0.5", "write one") from None


QUESTIONS = (
    _Question("Which model?", "a preset, or the path of a config.json", "llama-3-8b", _model),
    _Question("How long is a prompt?", f"with its unit: 3500 words, 900 tokens; or {', '.join(LENGTHS)}", "rag",
              _length("input")),
    _Question("How long is an answer?", "with its unit: 500 tokens, 375 words", "500 tokens", _length("output")),
    _Question("How many requests come?", "a second at the peak: 31; or 10000 users; or 30M/year", "10", _load),
    _Question("What may users wait for?", "ms until the first token or the last: first 500, last 5000; or none",
              "first 500", _limit),
    _Question("On which hardware?", "one or several: H100, L40S; this machine: this; all", "H100", _hardware),
)  # fmt: skip


def ask() -> Answers:
    """Ask all questions; invalid answers are asked again. Ctrl-C and Ctrl-D abort."""
    answers: Answers = {}
    for question in QUESTIONS:
        note(click.style(f"  {question.help}", dim=True))
        while True:
            text = click.prompt(question.text, default=question.default, err=True).strip()
            try:
                settings = question.read(text)
                SizingQuestion.from_answers(
                    settings
                )  # a number that no setting takes is told here, not after the last question
                answers |= settings
                break
            except MillraceError as error:
                note(str(error))
    return answers
