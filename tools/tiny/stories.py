"""Stories: a plot makes a list of facts, and each fact is told in one sentence.

A story is its facts in the order of telling, plus what follows from them without being told (how many apples are
left, who has what after a swap). Its key is made of the facts alone, so two tellings of one story have one key.
"""

import random
from dataclasses import dataclass

from tools.tiny import lexicon as lx
from tools.tiny.forms import TOLD
from tools.tiny.grammar import Claim, claim, fill


@dataclass(frozen=True, slots=True)
class Story:
    """What happens (`told`, in order), what follows from it, and one telling of it."""

    told: tuple[Claim, ...]
    implied: tuple[Claim, ...]
    text: str

    @property
    def facts(self) -> tuple[Claim, ...]:
        return self.told + self.implied

    @property
    def key(self) -> str:
        return "story " + " ".join(sorted(map(str, self.facts)))


@dataclass(frozen=True, slots=True)
class Wish:
    """What a story was asked to be about; None is left to chance."""

    hero_kind: str | None = None
    pal_kind: str | None = None
    hero: str | None = None
    thing: str | None = None


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part: the hero and the friend, two different names and kinds."""

    hero: str
    pal: str
    hero_kind: str
    pal_kind: str


Plot = tuple[list[Claim], list[Claim]]  # told, implied


def _lost(rng: random.Random, cast: Cast, thing: str) -> Plot:
    feeling = rng.choice(lx.FEELINGS_BAD)
    finder = rng.choice([cast.pal, cast.pal, cast.hero])
    told = [
        claim("owns", who=cast.hero, colour=rng.choice(lx.COLOURS), thing=thing),
        claim("lost", who=cast.hero, thing=thing),
        claim("felt_first", who=cast.hero, feeling=feeling),
        claim("found", who=finder, thing=thing, spot=rng.choice(lx.SPOTS)),
    ]
    if finder == cast.pal and rng.random() < 0.6:
        told.append(claim("gave", who=cast.hero, pal=cast.pal, food=rng.choice(lx.FOODS)))
    return told, [claim("why", who=cast.hero, feeling=feeling, thing=thing)]


def _gift(rng: random.Random, cast: Cast, thing: str) -> Plot:
    told = [
        claim("owns", who=cast.hero, colour=rng.choice(lx.COLOURS), thing=thing),
        claim("felt_first", who=cast.pal, feeling=rng.choice(lx.FEELINGS_BAD)),
        claim("gift", who=cast.hero, pal=cast.pal, thing=thing),
    ]
    return told, [claim("holds", who=cast.pal, thing=thing)]


def _share(rng: random.Random, cast: Cast, thing: str) -> Plot:
    given, left, fruit = rng.randint(2, 6), rng.randint(2, 6), rng.choice(lx.FRUITS)
    told = [
        claim("had", who=cast.hero, n=lx.NUMBERS[given + left], fruit=fruit),
        claim("shared", who=cast.hero, pal=cast.pal, n=lx.NUMBERS[given], fruit=fruit),
    ]
    return told, [claim("left", who=cast.hero, n=lx.NUMBERS[left], fruit=fruit)]


def _trip(rng: random.Random, cast: Cast, thing: str) -> Plot:
    seen = rng.choice([k for k in lx.KINDS if k not in (cast.hero_kind, cast.pal_kind)])
    told = [
        claim("went", who=cast.hero, place=rng.choice(lx.PLACES)),
        claim("saw", who=cast.hero, kind=seen),
        claim("felt_first", who=cast.hero, feeling=rng.choice(lx.FEELINGS)),
        claim("ate", who=rng.choice([cast.hero, cast.pal]), food=rng.choice(lx.FOODS)),
    ]
    if rng.random() < 0.5:
        told.insert(0, claim("owns", who=cast.hero, colour=rng.choice(lx.COLOURS), thing=thing))
    return told, []


def _swap(rng: random.Random, cast: Cast, thing: str) -> Plot:
    other = rng.choice([t for t in lx.THINGS if t != thing])
    colour, other_colour = rng.sample(lx.COLOURS, 2)
    told = [
        claim("owns", who=cast.hero, colour=colour, thing=thing),
        claim("owns", who=cast.pal, colour=other_colour, thing=other),
        claim("swapped", who=cast.hero, pal=cast.pal, thing=thing, thing_2=other),
    ]
    return told, [claim("holds", who=cast.hero, thing=other), claim("holds", who=cast.pal, thing=thing)]


PLOTS = (_lost, _gift, _share, _trip, _swap)


def _opening(rng: random.Random, cast: Cast) -> list[Claim]:
    """Who they are; the friend may be left to the plot's first mention by name."""
    opening = [claim("kind", who=cast.hero, kind=cast.hero_kind)]
    home, pal_home = rng.sample(lx.PLACES, 2)
    if rng.random() < 0.75:
        opening.append(claim("home", who=cast.hero, place=home))
    if rng.random() < 0.4:
        opening.append(claim("loves", who=cast.hero, hobby=rng.choice(lx.HOBBIES)))
    opening.append(claim("pal", who=cast.hero, pal=cast.pal))
    if rng.random() < 0.8:
        opening.append(claim("kind", who=cast.pal, kind=cast.pal_kind))
    if rng.random() < 0.25:
        opening.append(claim("home", who=cast.pal, place=pal_home))
    if rng.random() < 0.35:
        opening.append(claim("weather", weather=rng.choice(lx.WEATHERS)))
    return opening


def make_story(rng: random.Random, wish: Wish | None = None) -> Story:
    """One story; what `wish` names is in it."""
    wish = wish or Wish()
    hero = wish.hero or rng.choice(lx.NAMES)
    hero_kind = wish.hero_kind or rng.choice([k for k in lx.KINDS if k != wish.pal_kind])
    pal_kind = wish.pal_kind or rng.choice([k for k in lx.KINDS if k != hero_kind])
    cast = Cast(hero, rng.choice([n for n in lx.NAMES if n != hero]), hero_kind, pal_kind)
    plots = [_lost, _gift, _swap] if wish.thing else PLOTS
    told, implied = rng.choice(plots)(rng, cast, wish.thing or rng.choice(lx.THINGS))
    opening = _opening(rng, cast)
    if wish.pal_kind and all(c.slots != (("kind", pal_kind), ("who", cast.pal)) for c in opening):
        opening.append(claim("kind", who=cast.pal, kind=pal_kind))
    told = opening + told
    implied.append(claim("pal", who=cast.pal, pal=cast.hero))  # friendship goes both ways
    if rng.random() < 0.8:
        told.append(claim("felt_last", who=rng.choice([cast.hero, cast.pal]), feeling=rng.choice(lx.FEELINGS_GOOD)))
    return Story(tuple(told), tuple(implied), tell(rng, told))


def tell(rng: random.Random, told: list[Claim]) -> str:
    """Each fact in one of its told forms; "Once ..." only opens."""
    lines = []
    for i, fact in enumerate(told):
        forms = [f for f in TOLD[fact.relation] if i == 0 or not f.startswith("Once")]
        lines.append(fill(rng.choice(forms), dict(fact.slots)))
    return " ".join(lines)
