"""First lessons: short drills of the two skills under everything else, finding a word again and naming its letter.

Reading comprehension by a small network starts with attention heads that find an earlier occurrence and copy what came
after it (arXiv:2209.11895). In stories they form late, because most words of a story are chance; here nearly every
word of the second half of a document can be known from the first. The early training documents are mostly these, the
later ones few.
"""

import random
from collections.abc import Callable
from functools import partial

from tools.tiny import lexicon as lx
from tools.tiny.forms import ANSWERED, ASKED, TOLD
from tools.tiny.grammar import fill, vocabulary
from tools.tiny.items import LETTERS, trained_sums

WORDS = tuple(
    dict.fromkeys(
        [*lx.NAMES, *lx.KINDS, *lx.PLACES, *lx.THINGS, *lx.COLOURS, *lx.FEELINGS, *lx.FOODS, *lx.FRUITS, *lx.HOBBIES]
    )
)
_GROUPS = (lx.NAMES, lx.KINDS, lx.PLACES, lx.THINGS, lx.COLOURS, lx.FEELINGS, lx.FOODS)
_LOOKED_UP = ("kind", "home", "loves", "owns", "lost", "went", "saw", "ate", "felt_first", "felt_last")
SECOND_LESSONS = 38_000  # number of the first document with the second lessons
THIRD_LESSONS = 68_000
FOURTH_LESSONS = 89_000
SPARSE_MARKS = 107_000  # from here on not every option is marked
FIFTH_LESSONS = 142_000  # sums in rows
SPARSE = (0.25, 0.5, 0.75)  # shares of the options that are
_WORDINGS = ("Which letter stands for {}?", "Which letter is {}?", "Find {}.", "The right answer is {}.", "Choose {}.")
Part = tuple[str, bool]  # text, and whether it can be known from what came before


def again(rng: random.Random) -> list[Part]:
    """A list of words, said two or three times in the same order."""
    words = " ".join(rng.sample(WORDS, rng.randint(6, 20)))
    return [("Say it again: " + words + ".", False), *[("\nAgain: " + words + ".", True)] * rng.randint(1, 2)]


def lookups(rng: random.Random) -> list[Part]:
    """Several facts of one relation, then a question about each in another order."""
    relation = rng.choice(_LOOKED_UP)
    text, slot, form = rng.choice([a for a in ASKED[relation] if "{" in a[0] and a[1] != "who"])
    key = "thing" if relation == "owns" else "who"
    count = rng.randint(2, 6)
    names = [s for s in ("who", "kind", "place", "hobby", "thing", "colour", "food", "feeling") if _has(relation, s)]
    columns = {name: rng.sample(vocabulary(name), count) for name in names}
    facts = [{name: column[i] for name, column in columns.items()} for i in range(count)]
    if relation == "owns" and slot == "thing":
        text, slot, form = ASKED[relation][0]
    assert key in columns
    told = rng.choice([t for t in TOLD[relation] if not t.startswith("Once")])
    parts: list[Part] = [(" ".join(fill(told, fact) for fact in facts), False)]
    for fact in rng.sample(facts, count):
        parts += [("\n" + fill(text, fact), False), (" " + fill(ANSWERED[relation][form], fact), True)]
    return parts


def _has(relation: str, slot: str) -> bool:
    return any("{" + slot + "}" in form for form in TOLD[relation])


def letters(rng: random.Random) -> list[Part]:
    """Four words with letters, then the letter of each word, or the word of each letter."""
    words = rng.sample(rng.choice(_GROUPS), 4)
    listed = list(zip(LETTERS, words, strict=True))
    parts: list[Part] = [("\n".join(f"{letter}. {word}" for letter, word in listed), False)]
    for letter, word in rng.sample(listed, 4):
        if rng.random() < 0.75:
            parts += [(f"\n- {word}:", False), (f" {letter}", True)]
        else:
            parts += [(f"\n- {letter}:", False), (f" {word}", True)]
    return parts


def ladder(rng: random.Random) -> list[Part]:
    """The same from easy to hard: the letter right after its word, after a colon, after a question and its options."""
    words = rng.sample(rng.choice(_GROUPS), 4)
    listed = list(zip(LETTERS, words, strict=True))
    options = "\n".join(f"{letter}. {word}" for letter, word in listed)
    rung = rng.random()
    if rung < 0.3:
        letter, word = rng.choice(listed)
        return [(f"Which letter stands for {word}?\n{options}\nAnswer:", False), (f" {letter}", True)]
    parts: list[Part] = [(options, False)]
    for letter, word in rng.sample(listed, 3):
        parts += [(f"\n- {word}" + (":" if rung < 0.6 else ""), False), (f" {letter}", True)]
    return parts


def climb(rng: random.Random) -> list[Part]:
    """From a word's letter to a whole choice: asked after the options, before them, and about a told fact."""
    rung = rng.random()
    if rung < 0.3:
        return ladder(rng)
    if rung > 0.75:
        return small_choice(rng)
    listed = list(zip(LETTERS, rng.sample(rng.choice(_GROUPS), 4), strict=True))
    options = "\n".join(f"{letter}. {word}" for letter, word in listed)
    wording = rng.choice(_WORDINGS)
    if rung < 0.5:
        letter, word = rng.choice(listed)
        return [(f"{wording.format(word)}\n{options}\nAnswer:", False), (f" {letter}", True)]
    parts: list[Part] = [(options, False)]
    for letter, word in rng.sample(listed, 3):
        parts += [(f"\n{wording.format(word)}\nAnswer:", False), (f" {letter}", True)]
    return parts


def small_choice(rng: random.Random) -> list[Part]:
    """One or two told facts and a choice about one of them."""
    relation = rng.choice([r for r in _LOOKED_UP if r != "owns"])
    text, slot, _ = rng.choice([a for a in ASKED[relation] if a[1] != "who"])
    count = rng.randint(1, 2)
    values = rng.sample(vocabulary(slot), 4)
    facts = [{"who": who, slot: value} for who, value in zip(rng.sample(lx.NAMES, count), values, strict=False)]
    told = rng.choice([t for t in TOLD[relation] if not t.startswith("Once")])
    fact = rng.choice(facts)
    rng.shuffle(values)
    options = "\n".join(f"{letter}. {value}" for letter, value in zip(LETTERS, values, strict=True))
    story = " ".join(fill(told, f) for f in facts)
    right = LETTERS[values.index(fact[slot])]
    return [(f"{story}\n\n{fill(text, fact)}\n{options}\nAnswer:", False), (f" {right}", True)]


def marked(rng: random.Random, *, sparse: bool = False) -> list[Part]:
    """A choice whose options are, more often than not, marked "yes" or "no" one by one before the letter is named.

    Four marks teach more than one letter: each option is compared with the text, which is what finding the letter
    takes, and the same comparison then serves where no marks are written. `sparse` leaves some of the marks out.
    """
    if rng.random() < 0.5:
        (asked, _), (answer, _) = small_choice(rng)
    else:
        words = rng.sample(rng.choice(_GROUPS), 4)
        right = rng.randrange(4)
        options = "\n".join(f"{letter}. {word}" for letter, word in zip(LETTERS, words, strict=True))
        asked, answer = f"{rng.choice(_WORDINGS).format(words[right])}\n{options}\nAnswer:", " " + LETTERS[right]
    kept = rng.choice(SPARSE) if sparse else 1.0
    return with_marks(rng, asked, answer, kept) if rng.random() < 0.65 else [(asked, False), (answer, True)]


def with_marks(rng: random.Random, asked: str, answer: str, kept: float) -> list[Part]:
    """The same choice with "yes" or "no" after each option, or after that share of them."""
    parts: list[Part] = []
    text = ""
    for line in asked.split("\n"):
        text += line
        if line[:1] in LETTERS and line[1:3] == ". " and (kept == 1.0 or rng.random() < kept):
            parts += [(text, False), (" yes" if line[0] == answer.strip() else " no", True)]
            text = ""
        text += "\n"
    return [*parts, (text[:-1], False), (answer, True)]


def sums_in_a_row(rng: random.Random) -> list[Part]:
    """Sums or differences whose first number goes up or down by one: what one more changes, and when it carries.

    Held-out sums are stepped over. Sometimes the numbers themselves are counted instead.
    """
    step = rng.choice([1, -1])
    if rng.random() < 0.15:
        first = rng.randint(0, 30) if step > 0 else rng.randint(10, 40)
        return [(f"Count: {first}", False), *[(f" {first + step * i}", True) for i in range(1, 10)]]
    relation, sign, result = rng.choice([("sum", "+", "sum"), ("difference", "-", "difference")])
    moving, fixed = rng.choice([("a", "b"), ("b", "a")])
    number = str(rng.randint(0, 20))
    row = [f for f in trained_sums() if f.relation == relation and f[fixed] == number]
    row.sort(key=lambda f: step * int(f[moving]))
    start = rng.randrange(max(1, len(row) - 5))
    parts: list[Part] = []
    for fact in row[start : start + rng.randint(4, 8)]:
        parts += [(f"{fact['a']} {sign} {fact['b']} =", False), (f" {fact[result]}", True), (".\n", False)]
    return parts


def lesson_share(seed: int) -> float:
    """How many of the documents around number `seed` are lessons."""
    if seed < SECOND_LESSONS:
        return max(0.12, min(0.65, 0.65 - (seed - 10_000) / 20_000 * 0.53))
    if seed < THIRD_LESSONS:
        return max(0.1, min(0.45, 0.45 - (seed - 60_000) / 30_000 * 0.35))
    if seed < FOURTH_LESSONS:
        return 0.45
    if seed >= FIFTH_LESSONS:
        return max(0.15, 0.4 - (seed - FIFTH_LESSONS) / 150_000 * 0.25)
    return max(0.12, min(0.5, 0.5 - (seed - 130_000) / 50_000 * 0.38))


def lesson(rng: random.Random, seed: int) -> list[Part]:
    """A few drills of one sort; letters in earnest only when words are found again."""
    drill: Callable[[random.Random], list[Part]]
    if seed < SECOND_LESSONS:
        drill = rng.choice([again, lookups, lookups, letters])
    elif seed < THIRD_LESSONS:
        drill = rng.choices([ladder, lookups, again], [0.7, 0.2, 0.1])[0]
    elif seed < FOURTH_LESSONS:
        drill = rng.choices([climb, lookups, again], [0.7, 0.25, 0.05])[0]
    else:
        marks: Callable[[random.Random], list[Part]] = partial(marked, sparse=seed >= SPARSE_MARKS)
        if seed < FIFTH_LESSONS:
            drill = rng.choices([marks, climb, lookups, again], [0.6, 0.15, 0.2, 0.05])[0]
        else:
            drill = rng.choices([marks, climb, lookups, sums_in_a_row], [0.2, 0.1, 0.25, 0.45])[0]
    parts: list[Part] = []
    for _ in range(rng.randint(1, 3)):
        parts += [*drill(rng), ("\n\n", False)]
    return parts
