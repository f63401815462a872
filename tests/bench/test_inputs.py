"""Synthetic sessions: lengths, mixes, shared beginnings, turns; all of it by a seed."""

import random
from itertools import islice

import numpy as np
import pytest

from millrace.bench.load.distribution import Spread
from millrace.bench.load.inputs import ConversationShape, LengthPattern, Prefixes, Session, synthetic
from millrace.bench.load.prompt_text import WORDS, PromptWords
from millrace.errors import ConfigError

PLAIN = LengthPattern(Spread.normal(100, 20), Spread(30))


def drawn(
    n: int, *shapes: LengthPattern, seed: int = 1, words: PromptWords | None = None, **more: object
) -> list[Session]:
    return list(islice(synthetic(shapes or (PLAIN,), words or PromptWords(), seed, **more), n))  # type: ignore[arg-type]


def test_lengths_are_as_asked() -> None:
    turns = [s.turns[0] for s in drawn(2000)]
    n_words = np.array([len(t.text.split()) for t in turns])
    assert [t.n_input for t in turns] == n_words.tolist() and {t.max_tokens for t in turns} == {30}
    assert n_words.mean() == pytest.approx(100, abs=2) and n_words.std() == pytest.approx(20, rel=0.06)


def test_number_and_seed_say_the_text() -> None:
    assert drawn(5) == drawn(9)[:5] and drawn(5) != drawn(5, seed=2)
    assert len({s.turns[0].text for s in drawn(50)}) == 50


def test_a_mix_is_drawn_by_weight_and_told_apart() -> None:
    sessions = drawn(2000, LengthPattern.parse("short/long:3"), LengthPattern.parse("1000/7"))
    by_label = {s.label: s.turns[0] for s in sessions}
    assert {label: (t.n_input, t.max_tokens) for label, t in by_label.items()} == {
        "short/long": (128, 2048), "1000/7": (1000, 7),
    }  # fmt: skip
    assert sum(s.label == "short/long" for s in sessions) == pytest.approx(1500, abs=80)


@pytest.mark.parametrize("text", ["", "short", "short/longer", "1/2/3", "0/5", "5/0", "1/1:0", "1/1:x", "nan/1"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(ConfigError):
        LengthPattern.parse(text)


def test_prompts_share_so_many_beginnings() -> None:
    texts = [s.turns[0].text.split() for s in drawn(200, prefixes=Prefixes(3, 40))]
    begins = {tuple(t[:40]) for t in texts}
    assert len(begins) == 3 and len({tuple(t[:41]) for t in texts}) > 40
    assert np.mean([len(t) for t in texts]) == pytest.approx(100, abs=5), "the beginning is of the prompt's length"


def test_turns_and_pauses() -> None:
    sessions = drawn(500, talk=ConversationShape(Spread.normal(4, 1), Spread(250)))
    assert np.mean([len(s.turns) for s in sessions]) == pytest.approx(4, abs=0.2)
    assert min(len(s.turns) for s in sessions) >= 1
    assert all(s.turns[0].pause_s == 0 and {t.pause_s for t in s.turns[1:]} <= {0.25} for s in sessions)


def test_words_are_fitted_to_what_the_server_tells() -> None:
    """A server that makes 1.5 tokens of a word, and 12 of its template."""
    words = PromptWords.fit((32, 60), (160, 252))
    assert words == PromptWords(1.5, 12)
    assert len(words.text(312, random.Random(1)).split()) == 200
    assert len(words.text(300, random.Random(1), fresh=False).split()) == 200
    assert len(words.text(1, random.Random(1)).split()) == 1
    assert PromptWords.fit((32, 0), (160, 0)) == PromptWords(), "a server that tells nothing"


def test_words_are_words() -> None:
    assert len(WORDS) == len(set(WORDS)) > 200 and all(w.isalpha() and w.islower() for w in WORDS)
