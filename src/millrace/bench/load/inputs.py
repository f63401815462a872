"""What is asked: sessions of one turn or several, drawn by a seed. Files and traces: `bench/load/trace_files.py`."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace.bench.load.distribution import Spread
from millrace.bench.load.length_histogram import Histogram
from millrace.bench.load.prompt_text import PromptWords
from millrace.errors import ConfigError
from millrace.tune.trace_formats import MOST_TOKENS

LONG, SHORT = 2048, 128  # tokens, in the four query patterns
_NAMED = {"short": SHORT, "long": LONG}


@dataclass(frozen=True, slots=True)
class Turn:
    """role, text: what the user says; max_tokens: of the answer, None for as many as the model likes"""

    text: str
    max_tokens: int | None = None
    pause_s: float = 0.0  # after the answer before
    history: tuple[tuple[str, str], ...] = ()  # (role, content) that goes before, where a file gives it
    n_input: int | None = None  # tokens that the prompt was to have


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation. at_s: of a trace, seconds after its start; label: of its pattern"""

    turns: tuple[Turn, ...]
    at_s: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """Input and output length in tokens, and how often it is drawn among others. pairs: drawn together, in place"""

    isl: Spread
    osl: Spread | None = None
    label: str = ""
    weight: float = 1.0
    pairs: Histogram | None = None

    def draw(self, rng: random.Random) -> tuple[int, int | None]:
        """Input and output tokens."""
        if self.pairs is not None:
            return self.pairs.draw(rng)
        n_input = max(1, round(min(self.isl.draw(rng), MOST_TOKENS)))
        return n_input, None if self.osl is None else max(1, round(min(self.osl.draw(rng), MOST_TOKENS)))

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """`short/long`, `128/2048`, `short/long:3` (of weight 3). raises ConfigError"""
        lengths, _, weight = text.partition(":")
        try:
            isl, osl = (float(_NAMED.get(part, part)) for part in lengths.split("/"))
            share = float(weight or 1)
        except ValueError:
            isl = osl = share = 0.0
        if not (1 <= isl <= MOST_TOKENS and 1 <= osl <= MOST_TOKENS and 0 < share <= 1e9):
            raise ConfigError(
                f'--pattern is "{text}"', "INPUT/OUTPUT or INPUT/OUTPUT:WEIGHT, of short, long or tokens",
                "short/long, or 1000/200:3",
            )  # fmt: skip
        return cls(Spread(isl), Spread(osl), lengths, share)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """So many different beginnings, of so many tokens, that prompts share."""

    n: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """Turns of a session, and the pause before each but the first, in ms."""

    turns: Spread = Spread(1)  # noqa: RUF009 (frozen)
    pause_ms: Spread = Spread(0)  # noqa: RUF009


def synthetic(
    shapes: Sequence[Shape],
    words: PromptWords,
    seed: int,
    prefixes: Prefixes | None = None,
    talk: ConversationShape | None = None,
) -> Iterator[Session]:
    """Sessions without end. The text of number i depends on seed and i alone, so it is the same at every load."""
    talk, prefixes, number = talk or ConversationShape(), prefixes or Prefixes(), 0
    beginnings = [
        words.text(prefixes.tokens, random.Random(f"{seed}/prefix/{i}"), fresh=False) + " " for i in range(prefixes.n)
    ]
    while True:
        rng = random.Random(f"{seed}/{number}")
        shape = rng.choices(shapes, [s.weight for s in shapes])[0]
        begins = rng.choice(beginnings) if beginnings else ""
        turns = []
        for i in range(max(1, round(talk.turns.draw(rng)))):
            n_input, n_output = shape.draw(rng)
            rest = n_input - (prefixes.tokens if i == 0 and begins else 0)
            text = (begins if i == 0 else "") + words.text(rest, rng, fresh=i == 0)
            turns.append(Turn(text, n_output, talk.pause_ms.draw(rng) / 1e3 if i else 0.0, (), n_input))
        yield Session(tuple(turns), None, shape.label)
        number += 1
