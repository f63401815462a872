"""A model answers multiple-choice questions: the choice that is likeliest, from one reading of each question."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from millrace.evaluate.divergence import Runs
from millrace.evaluate.kept import Chosen, Kept
from millrace.evaluate.likelihood import Asked, likelihoods

Progress = Callable[[str, int, int], None]  # what is being done, questions done, questions in all


@dataclass(frozen=True, slots=True)
class Posed:
    """One question as tokens; answer: the number of the right ending; cut: something of it had to be left out"""

    id: str
    asked: Asked
    answer: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Questions that begin alike, which is computed once for each run over them."""

    name: str
    n: int
    posed: Callable[[], Iterable[Posed]]  # made when their turn has come: tokens of all would take memory


def digest(parts: Iterable[object]) -> str:
    """Of what decides the questions."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(repr(part).encode() + b"\0")
    return found.hexdigest()


def answer(executor: Runs, groups: Sequence[Group], kept: Kept, progress: Progress) -> None:
    """Those that `kept` has not.

    raises RequestError for a question that the engine cannot read
    """
    done, total = 0, sum(group.n for group in groups)
    for group in groups:
        progress(group.name, done, total)
        posed = [one for one in group.posed() if one.id not in kept.chosen] if _is_open(group, kept) else []
        done += group.n - len(posed)
        for i, each in likelihoods(executor, [one.asked for one in posed]):
            logprobs = [round(one.logprob, 6) for one in each]
            kept.add(Chosen(posed[i].id, posed[i].answer, _best(logprobs), logprobs, posed[i].cut))
            done += 1
            progress(group.name, done, total)


def _is_open(group: Group, kept: Kept) -> bool:
    return any(f"{group.name}/{i}" not in kept.chosen for i in range(group.n))


def _best(logprobs: Sequence[float]) -> int:
    """The first of the likeliest, as numpy.argmax has it."""
    return max(range(len(logprobs)), key=lambda i: (logprobs[i], -i))
