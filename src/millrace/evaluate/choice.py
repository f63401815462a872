"""A model answers multiple-choice questions: the choice that is likeliest, from one reading of each question."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from millrace.compile.settings import Progress
from millrace.evaluate.divergence import Runs
from millrace.evaluate.kept import Chosen, Kept
from millrace.evaluate.likelihood import Question, likelihoods


@dataclass(frozen=True, slots=True)
class Posed:
    """One question of a group; answer: the number of the right ending; cut: something of it had to be left out"""

    number: int
    question: Question
    answer: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """`n` questions that begin alike, which is computed once."""

    name: str
    n: int
    posed: Callable[[], Iterable[Posed]]  # made when their turn has come: tokens of all would take memory


def digest(what: object) -> str:
    """Of what decides the questions, by how it is written out."""
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def answer(executor: Runs, groups: Sequence[Group], kept: Kept, progress: Progress) -> None:
    """Those that `kept` has not.

    raises RequestError for a question that the engine cannot read
    """
    done, total = 0, sum(group.n for group in groups)
    for group in groups:
        progress(group.name, done, total)
        known = {number for number in range(group.n) if (group.name, number) in kept.chosen}
        done += len(known)
        posed = [one for one in group.posed() if one.number not in known] if len(known) < group.n else []
        for i, each in likelihoods(executor, [one.question for one in posed]):
            logprobs, one = [round(found.logprob, 6) for found in each], posed[i]
            kept.add(Chosen(group.name, one.number, one.answer, _best(logprobs), logprobs, one.cut))
            done += 1
            progress(group.name, done, total)


def _best(logprobs: Sequence[float]) -> int:
    """The first of the likeliest, as numpy.argmax has it."""
    return max(range(len(logprobs)), key=lambda i: (logprobs[i], -i))
