"""Questions with their answers, and multiple choice in MMLU's format, about stories, lasting facts and sums."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

from tools.tiny import lexicon as lx
from tools.tiny.forms import ANSWERED, ASKED, CHECKED
from tools.tiny.grammar import Claim, claim, fill, holds, vocabulary

LETTERS = "ABCD"
UNSAID = ANSWERED["unsaid"][0]
HELD_OUT_SHARE = 10  # one key in ten is never trained on


def is_held_out(key: str) -> bool:
    """Decided by a hash of what an item says, so no seed and no wording can carry it over to training."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer as a sentence, and the fact behind it with the slot that is asked for."""

    text: str
    answer: str
    fact: Claim
    slot: str

    @property
    def value(self) -> str:
        return self.fact[self.slot]


@dataclass(frozen=True, slots=True)
class Choice:
    """A question with four options, one of them right."""

    question: Question
    options: tuple[str, str, str, str]
    right: int

    @property
    def letter(self) -> str:
        return LETTERS[self.right]

    @property
    def key(self) -> str:
        return f"choice {self.question.fact} {self.question.slot} {sorted(self.options)}"

    @property
    def prompt(self) -> str:
        """MMLU's block up to and including "Answer:"."""
        lines = [self.question.text, *(f"{letter}. {o}" for letter, o in zip(LETTERS, self.options, strict=True))]
        return "\n".join([*lines, "Answer:"])


@cache
def lasting_facts() -> tuple[Claim, ...]:
    """What is true in every story: sounds, colours, opposites, days."""
    return (
        *(claim("sound", animal=k, sound=v) for k, v in lx.SOUNDS.items()),
        *(claim("baby", animal=k, baby=v) for k, v in lx.BABIES.items()),
        *(claim("legs", animal=k, legs=v) for k, v in lx.LEGS.items()),
        *(claim("tint", stuff=k, colour=v) for k, v in lx.NATURAL_COLOURS.items()),
        *(claim("opposite", word=k, opposite=v) for k, v in lx.OPPOSITES.items()),
        *(claim("opposite", word=v, opposite=k) for k, v in lx.OPPOSITES.items()),
        *(claim("next_day", day=d, next_day=lx.DAYS[(i + 1) % 7]) for i, d in enumerate(lx.DAYS)),
        *(claim("next_month", month=m, next_month=lx.MONTHS[(i + 1) % 12]) for i, m in enumerate(lx.MONTHS)),
        *(claim("group", member=k, group=v) for k, v in lx.GROUPS.items()),
        *(claim("use", tool=k, use=v) for k, v in lx.USES.items()),
    )


@cache
def sums() -> tuple[Claim, ...]:
    """a + b and a - b for numbers up to 20; no result is below zero."""
    pairs = [(a, b) for a in range(21) for b in range(21)]
    return (
        *(claim("sum", a=str(a), b=str(b), sum=str(a + b)) for a, b in pairs),
        *(claim("difference", a=str(a), b=str(b), difference=str(a - b)) for a, b in pairs if a >= b),
    )


def sum_key(fact: Claim) -> str:
    """What decides whether a sum is held out: its numbers, in no wording."""
    return f"arithmetic {fact}"


@cache
def trained_sums() -> tuple[Claim, ...]:
    return tuple(f for f in sums() if not is_held_out(sum_key(f)))


@cache
def _by_relation(facts: tuple[Claim, ...]) -> dict[str, list[Claim]]:
    table: dict[str, list[Claim]] = {}
    for fact in facts:
        table.setdefault(fact.relation, []).append(fact)
    return table


def ask(rng: random.Random, fact: Claim, facts: tuple[Claim, ...]) -> Question | None:
    """A question about `fact` in one of its wordings; None when `facts` leave the answer open."""
    text, slot, form = rng.choice(ASKED[fact.relation])
    given = {(k, v) for k, v in fact.slots if "{" + k + "}" in text}
    answers = {f[slot] for f in _by_relation(facts)[fact.relation] if given <= set(f.slots)}
    if len(answers) != 1:
        return None
    slots = dict(fact.slots)
    return Question(fill(text, slots), fill(ANSWERED[fact.relation][form], slots), fact, slot)


def ask_some(rng: random.Random, facts: tuple[Claim, ...], count: int) -> list[Question]:
    """Up to `count` questions about different facts, in random order."""
    askable = [f for f in facts if f.relation in ASKED]
    asked = (ask(rng, fact, facts) for fact in rng.sample(askable, min(count, len(askable))))
    return [q for q in asked if q is not None]


def check(rng: random.Random, facts: tuple[Claim, ...]) -> tuple[str, str] | None:
    """A yes-or-no question and its answer, or None when no fact can be asked so."""
    askable = [f for f in facts if f.relation in CHECKED]
    if not askable:
        return None
    fact = rng.choice(askable)
    text, slot, form = CHECKED[fact.relation]
    said, wrong = dict(fact.slots), rng.random() < 0.5
    answer = fill(ANSWERED[fact.relation][form], said)
    if not wrong:
        return fill(text, said), "Yes, " + answer
    said[slot] = rng.choice([w for w in vocabulary(slot) if w != said[slot]])
    if holds(claim(fact.relation, **said), facts):
        return None
    return fill(text, said), "No, " + answer


def ask_unsaid(rng: random.Random, facts: tuple[Claim, ...]) -> tuple[str, str] | None:
    """A question about someone in the story that the story leaves open, and the answer that says so."""
    present = {f.relation for f in facts}
    who = rng.choice([value for f in facts for slot, value in f.slots if slot == "who"])
    absent = [r for r in ("home", "loves", "lost", "went", "saw", "ate") if r not in present]
    if not absent:
        return None
    return fill(rng.choice([t for t, _, _ in ASKED[rng.choice(absent)] if "{who}" in t]), {"who": who}), UNSAID


def _numbers_near(rng: random.Random, value: int) -> list[str]:
    near = [value + d for d in (-10, -3, -2, -1, 1, 2, 3, 10) if 0 <= value + d <= 40]
    return [str(n) for n in rng.sample(near, 3)]


def offer(rng: random.Random, question: Question, facts: Sequence[Claim]) -> Choice:
    """Four options of one kind in random order; most wrong ones are taken from the same story where it has them."""
    if question.slot in ("sum", "difference"):
        wrong = _numbers_near(rng, int(question.value))
    else:
        words = set(vocabulary(question.slot)) - {question.value}
        present = sorted(words & {value for fact in facts for _, value in fact.slots})
        near = rng.sample(present, min(len(present), rng.randint(1, 2)))
        wrong = near + rng.sample(sorted(words - set(near)), 3 - len(near))
    options = [question.value, *wrong]
    rng.shuffle(options)
    a, b, c, d = options
    return Choice(question, (a, b, c, d), options.index(question.value))
