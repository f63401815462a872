"""Filling the sentence forms, reading them back, and checking what was read against facts.

`parse(answer)` is None unless every sentence of the answer is one of the generator's forms; `agrees(answer, facts)`
says whether all that the answer claims is among the facts. A form may leave slots of its relation out ("The ball is
red." does not say whose), so a claim agrees with every fact that contains it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tools.tiny.forms import ANSWERED, TOLD
from tools.tiny.lexicon import SLOTS

_SLOT = re.compile(r"\{(\w+)\}")
_AN = re.compile(r"\b([Aa])(?= [aeiou])")
_WAS_AN = re.compile(r"\b([Aa])n(?= [aeiouAEIOU])")


@dataclass(frozen=True, slots=True)
class Claim:
    """A relation and some of its slots: kind(who=Pip, kind=fox)."""

    relation: str
    slots: tuple[tuple[str, str], ...]  # sorted by slot name

    def __getitem__(self, slot: str) -> str:
        return dict(self.slots)[slot]

    def __str__(self) -> str:
        return f"{self.relation}({', '.join(f'{name}={value}' for name, value in self.slots)})"


def claim(relation: str, **slots: str) -> Claim:
    return Claim(relation, tuple(sorted(slots.items())))


def vocabulary(slot: str) -> tuple[str, ...]:
    """The words that may stand in a slot; `who_2` is filled like `who`."""
    return SLOTS[slot] if slot in SLOTS else SLOTS[slot.rpartition("_")[0]]


def fill(template: str, slots: Mapping[str, str]) -> str:
    """A template with its slots filled, "a" or "an" chosen, the first letter made a capital."""
    text = _AN.sub(r"\1n", _SLOT.sub(lambda found: slots[found[1]], template))
    return text[0].upper() + text[1:]


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """The template as a regular expression with one group per slot."""
    parts = _SLOT.split(template)
    for i in range(1, len(parts), 2):
        words = sorted(set(vocabulary(parts[i])), key=len, reverse=True)
        parts[i] = f"(?P<{parts[i]}>{'|'.join(map(re.escape, words))})"
    for i in range(0, len(parts), 2):
        parts[i] = re.escape(parts[i])
    return re.compile("".join(parts), re.IGNORECASE)


@cache
def _spelling(slot: str) -> dict[str, str]:
    return {word.lower(): word for word in vocabulary(slot)}


def _read(sentence: str, forms: Mapping[str, tuple[str, ...]]) -> frozenset[Claim]:
    """Every claim that the sentence can be read as; empty when it is no form."""
    plain = _WAS_AN.sub(r"\1", sentence)
    found: set[Claim] = set()
    for relation, templates in forms.items():
        for template in templates:
            match = _pattern(template).fullmatch(plain)
            if match:
                found.add(claim(relation, **{k: _spelling(k)[v.lower()] for k, v in match.groupdict().items()}))
    return frozenset(found)


def sentences(text: str) -> list[str]:
    return re.findall(r"\S[^.?!]*[.?!]", text)


def parse(answer: str) -> list[frozenset[Claim]] | None:
    """The claims of each sentence of an answer (its possible readings), or None when it is outside the grammar.

    An answer is one or more answer forms; the first may begin with "Yes, " or "No, ".
    """
    text = re.sub(r"^(Yes|No), ", "", answer.strip())
    parts = sentences(text)
    if not parts or " ".join(parts) != text:
        return None
    readings = [_read(part, ANSWERED) for part in parts]
    return readings if all(readings) else None


def parse_story(story: str) -> list[frozenset[Claim]] | None:
    """The same for a story, whose sentences are the told forms."""
    parts = sentences(story.strip())
    if not parts or " ".join(parts) != story.strip():
        return None
    readings = [_read(part, TOLD) for part in parts]
    return readings if all(readings) else None


def holds(part: Claim, facts: Iterable[Claim]) -> bool:
    """Whether some fact says at least what `part` says."""
    return any(part.relation == fact.relation and set(part.slots) <= set(fact.slots) for fact in facts)


def agrees(answer: str, facts: Iterable[Claim]) -> bool:
    """Whether the answer is in the grammar and every sentence of it is true by the facts."""
    readings = parse(answer)
    known = list(facts)
    return readings is not None and all(any(holds(c, known) for c in reading) for reading in readings)
