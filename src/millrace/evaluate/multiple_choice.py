"""A model answers multiple-choice questions: the choice that is likeliest, from one reading of each question."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from millrace.compile.settings import Progress
from millrace.evaluate.divergence import Runs, not_finite
from millrace.evaluate.likelihood import LikelihoodQuestion, likelihoods
from millrace.evaluate.resumable_results import ChosenAnswer, ResumableResults

_AT_ONCE = 2048  # questions that are tokens in memory: no subject of MMLU has more, and each begins once


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """One question of a group; answer: the number of the right ending; cut: something of it had to be left out

    n_bytes: of each choice, where choices are texts of different lengths; id: the user's own
    """

    number: int
    question: LikelihoodQuestion
    answer: int
    cut: bool = False
    n_bytes: Sequence[int] = ()
    id: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """`n` questions that begin alike, which is computed once."""

    name: str
    n: int
    posed: Callable[[], Iterable[PreparedQuestion]]  # made when their turn has come: tokens of all would take memory


def digest(what: object) -> str:
    """Of what decides the questions, by how it is written out."""
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def cut_at_the_left(one: LikelihoodQuestion, room: int) -> tuple[LikelihoodQuestion, bool]:
    """As lm-eval has it: of a prompt that does not fit with its longest ending, only the end is read."""
    most = room - max(map(len, one.endings)) + 1
    return (one, False) if len(one.context) <= most else (LikelihoodQuestion(one.context[-most:], one.endings), True)


def answer(
    executor: Runs, groups: Sequence[Group], results: ResumableResults[ChosenAnswer], progress: Progress
) -> None:
    """Those that `kept` has not.

    raises RequestError for a question that the engine cannot read, MachineError for what is not finite
    """
    done, total = 0, sum(group.n for group in groups)
    for group in groups:
        progress(group.name, done, total)
        answered = {number for number in range(group.n) if (group.name, number) in results.records}
        done += len(answered)
        left = (one for one in group.posed() if one.number not in answered) if len(answered) < group.n else iter(())
        while posed := list(islice(left, _AT_ONCE)):
            for i, each in likelihoods(executor, [one.question for one in posed]):
                results.add(_chosen(group.name, posed[i], [round(result.logprob, 6) for result in each]))
                done += 1
                progress(group.name, done, total)


def _chosen(group: str, one: PreparedQuestion, logprobs: list[float]) -> ChosenAnswer:
    if not all(map(math.isfinite, logprobs)):  # nothing is likeliest, and JSON cannot say it
        raise not_finite()
    per_byte = _best([p / n for p, n in zip(logprobs, one.n_bytes, strict=True)]) if one.n_bytes else None
    return ChosenAnswer(group, one.number, one.answer, _best(logprobs), logprobs, one.cut, per_byte, one.id)


def _best(logprobs: Sequence[float]) -> int:
    """The first of the likeliest, as numpy.argmax has it."""
    return max(range(len(logprobs)), key=lambda i: (logprobs[i], -i))
