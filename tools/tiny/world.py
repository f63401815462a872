"""The little world as training documents and as held-out items: each a pure function of an integer seed.

A document is a list of pieces of text with the weight of each in the loss. Held out is decided by a hash of what an
item says (`items.is_held_out`): a story by its facts, a sum by its numbers, a choice about a lasting fact by the fact
and its options. Training documents skip what is held out, and the held-out items skip the rest.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.tiny import talk
from tools.tiny.grammar import Claim
from tools.tiny.items import (
    LETTERS,
    Choice,
    Question,
    ask,
    ask_some,
    ask_unsaid,
    check,
    is_held_out,
    lasting_facts,
    offer,
    sum_key,
    sums,
)
from tools.tiny.lessons import FOURTH_LESSONS, SPARSE, SPARSE_MARKS, lesson, lesson_share, with_marks
from tools.tiny.lexicon import KINDS, NAMES, PLACES, THINGS
from tools.tiny.stories import Story, Wish, make_story

BOS, EOS, SYSTEM, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
HEADERS = (
    "The following are multiple choice questions (with answers) about small stories.",
    "The following are multiple choice questions (with answers) about the little world.",
    "The following are multiple choice questions (with answers).",
)
# loss weights: given text, told stories, answers, letters; most of a text is chance, all of a letter can be known
TEXT, TOLD, SAID, LETTER = 0.1, 0.3, 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that begins at a word boundary, and its weight in the loss."""

    text: str
    weight: float


Document = list[Piece]


def trained_story(rng: random.Random, wish: Wish | None = None) -> Story:
    """The first story that is not held out."""
    while is_held_out((story := make_story(rng, wish)).key):
        pass
    return story


def _sum_question(rng: random.Random, held_out: bool) -> Question:
    """Half of the sums have both numbers up to 10, which is where people start."""
    facts = sums()
    while True:
        fact = rng.choice(facts)
        easy = int(fact["a"]) <= 10 and int(fact["b"]) <= 10
        if is_held_out(sum_key(fact)) == held_out and (easy or rng.random() < 0.5):
            question = ask(rng, fact, facts)
            assert question is not None, fact
            return question


def _lasting_question(rng: random.Random) -> Question:
    facts = lasting_facts()
    relation = rng.choice(sorted({f.relation for f in facts}))  # small groups of facts get their share
    some = [f for f in facts if f.relation == relation]
    while True:
        question = ask(rng, rng.choice(some), facts)
        if question is not None:
            return question


def _turn(said: str, answer: str, weight: float = SAID) -> Document:
    return [Piece(USER, TEXT), Piece(said, TEXT), Piece(END + ASSISTANT, TEXT), Piece(answer + END, weight)]


_BESIDE = ("{s}\n{q}", "{s}\n\n{q}", "{s} {q}", "Read this story: {s}\n{q}", "Story: {s}\nQuestion: {q}")


def _story_and(rng: random.Random, story: Story, question: str) -> str:
    return rng.choice(_BESIDE).format(s=story.text, q=question)


def _exchanges(rng: random.Random, story: Story, count: int) -> list[tuple[str, str]]:
    """Questions about the story with their answers, some of them yes or no, some by letter."""
    pairs = []
    for question in ask_some(rng, story.facts, count):
        style = rng.random()
        checked = check(rng, story.facts) if style < 0.15 else None
        unsaid = ask_unsaid(rng, story.facts) if 0.15 < style < 0.2 else None
        if unsaid:
            pairs.append(unsaid)
        elif checked:
            pairs.append(checked)
        elif style > 0.75 and question.fact.relation != "why":
            choice = offer(rng, question, story.facts)
            with_text = rng.random() < 0.5
            prompt = choice.prompt.removesuffix("\nAnswer:") if with_text else choice.prompt
            pairs.append((prompt, f"{question.answer} The answer is {choice.letter}." if with_text else choice.letter))
        else:
            pairs.append((question.text, question.answer))
    return pairs


def _told_story(rng: random.Random) -> Document:
    """The user wishes for a story, gets it, and asks about it."""
    said, wish = talk.story_request(rng)
    story = trained_story(rng, wish)
    document = _turn(said, story.text, TOLD)
    for question, answer in _exchanges(rng, story, rng.randint(1, 5)):
        document += _turn(question, answer)
    return document


def _given_story(rng: random.Random) -> Document:
    """The user brings the story and asks about it, several times."""
    story = trained_story(rng)
    document: Document = []
    for question, answer in _exchanges(rng, story, rng.randint(3, 9)):
        document += _turn(question if document else _story_and(rng, story, question), answer)
    return document


def _knowledge(rng: random.Random) -> Document:
    """Lasting facts, sums and small talk, one after the other."""
    document: Document = []
    for _ in range(rng.randint(3, 8)):
        kind = rng.random()
        if kind < 0.25:
            document += _turn(*talk.small_talk(rng))
            continue
        question = _sum_question(rng, held_out=False) if kind < 0.65 else _lasting_question(rng)
        document += _turn(question.text, question.answer)
    return document


def _letter_drill(rng: random.Random) -> tuple[str, str]:
    """Four words and the letter of one of them: the skill under every choice."""
    words = rng.sample(rng.choice([KINDS, NAMES, PLACES, THINGS]), 4)
    right = rng.randrange(4)
    lines = [f"Which letter stands for {words[right]}?", *(f"{a}. {w}" for a, w in zip(LETTERS, words, strict=True))]
    return "\n".join([*lines, "Answer:"]), LETTERS[right]


def trained_choice(rng: random.Random) -> Choice:
    """A choice without a story that is not held out: a lasting fact or a sum."""
    while True:
        if rng.random() < 0.5:
            return offer(rng, _sum_question(rng, held_out=False), ())
        choice = offer(rng, _lasting_question(rng), ())
        if not is_held_out(choice.key):
            return choice


def _choosable(story: Story) -> tuple[Claim, ...]:
    """A reason is asked for in words only: "Why was Pip sad?" has no four options of one kind."""
    return tuple(f for f in story.facts if f.relation != "why")


def _exam(rng: random.Random, marked_share: float = 0.0, *, sparse: bool = False) -> Document:
    """Plain text as in MMLU: a story with several choices about it, or choices that need none."""
    document = [Piece(rng.choice(HEADERS) + "\n\n", TEXT)] if rng.random() < 0.4 else []
    if rng.random() < 0.75:
        story = trained_story(rng)
        document.append(Piece(story.text + "\n\n", TEXT))
        choices = [offer(rng, q, story.facts) for q in ask_some(rng, _choosable(story), rng.randint(4, 9))]
        blocks = [(c.prompt, c.letter) for c in choices]
    else:
        blocks = [(c.prompt, c.letter) for c in (trained_choice(rng) for _ in range(rng.randint(4, 9)))]
    marks = marked_share > 0 and rng.random() < marked_share
    for prompt, letter in blocks:
        if rng.random() < 0.12:
            prompt, letter = _letter_drill(rng)
        kept = rng.choice(SPARSE) if sparse else 1.0
        if marks:
            document += [
                Piece(text, SAID if known else TEXT) for text, known in with_marks(rng, prompt, " " + letter, kept)
            ]
        else:
            document += [Piece(prompt, TEXT), Piece(" " + letter, LETTER)]
        document.append(Piece("\n\n", TEXT))
    return document


_CHAT: tuple[tuple[Callable[[random.Random], Document], float], ...] = (
    (_given_story, 0.5),
    (_told_story, 0.3),
    (_knowledge, 0.2),
)


def document(seed: int, episodes: int = 1) -> Document:
    """Training document number `seed`; one with more episodes is a longer conversation or exam."""
    rng = random.Random(f"train {seed}")
    parts: Document = [Piece(BOS, 0.0)]
    if rng.random() < lesson_share(seed):
        parts += [
            Piece(text, LETTER if text.strip() in LETTERS and known else SAID if known else TEXT)
            for text, known in lesson(rng, seed)
        ]
        return [*parts, Piece(EOS, TEXT)]
    if rng.random() < 0.42:
        for _ in range(episodes):
            parts += _exam(rng, 0.4 if seed >= FOURTH_LESSONS else 0.0, sparse=seed >= SPARSE_MARKS)
        return [*parts, Piece(EOS, TEXT)]
    if rng.random() < 0.3:
        parts.append(Piece(SYSTEM + rng.choice(talk.SYSTEM) + END, 0.0))
    if rng.random() < 0.08:
        parts += _turn(*talk.small_talk(rng))
    for _ in range(episodes):
        tellers, weights = zip(*_CHAT, strict=True)
        parts += rng.choices(tellers, weights)[0](rng)
    return [*parts, Piece(EOS, TEXT)]


@dataclass(frozen=True, slots=True)
class Exam:
    """One held-out choice with its story, if it has one."""

    category: str  # story, fact, sum
    context: str
    choice: Choice

    @property
    def prompt(self) -> str:
        return (self.context + "\n\n" if self.context else "") + self.choice.prompt


def held_out_story(seed: int) -> Story:
    rng = random.Random(f"held-out story {seed}")
    while not is_held_out((story := make_story(rng)).key):
        pass
    return story


def held_out_exam(seed: int) -> Exam:
    """Held-out choice number `seed`: six in ten about a story, the rest about facts and sums."""
    rng = random.Random(f"held-out exam {seed}")
    kind = rng.random()
    if kind < 0.6:
        story = held_out_story(seed)
        questions: list[Question] = []
        while not questions:
            questions = ask_some(rng, _choosable(story), 1)
        return Exam("story", story.text, offer(rng, questions[0], story.facts))
    if kind < 0.8:
        return Exam("sum", "", offer(rng, _sum_question(rng, held_out=True), ()))
    while not is_held_out((choice := offer(rng, _lasting_question(rng), ())).key):
        pass
    return Exam("fact", "", choice)


def held_out_sum(seed: int) -> Question:
    """Held-out sum number `seed`, as a question."""
    return _sum_question(random.Random(f"held-out sum {seed}"), held_out=True)


def held_out_question(seed: int) -> tuple[Story, Question]:
    """A question about a held-out story, to be answered in a sentence."""
    story = held_out_story(seed)
    rng = random.Random(f"held-out question {seed}")
    questions: list[Question] = []
    while not questions:
        questions = ask_some(rng, story.facts, 1)
    return story, questions[0]


def documents(start: int, episodes: int = 1) -> Iterator[Document]:
    """Training documents from number `start` on, without end."""
    seed = start
    while True:
        yield document(seed, episodes)
        seed += 1
