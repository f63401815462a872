"""Multiple-choice questions, answered with the likeliest choice."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from millrace.compile.settings import Progress
from millrace.evaluate.divergence import StepRunner, not_finite
from millrace.evaluate.likelihood import LikelihoodQuestion, likelihoods
from millrace.evaluate.resumable_results import ChosenAnswer, ResumableResults

_AT_ONCE = 2048  # questions tokenized at a time: no subject of MMLU has more, so its prefix is computed once


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question of a group; answer: the index of the right ending; cut: whether the prompt was truncated

    n_bytes: of each choice, if choices are texts of different lengths; id: set by the user
    """

    number: int
    question: LikelihoodQuestion
    answer: int
    cut: bool = False
    n_bytes: Sequence[int] = ()
    id: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """`n` questions with a common prefix, which is computed once."""

    name: str
    n: int
    posed: Callable[[], Iterable[PreparedQuestion]]  # created when needed, to save memory


def digest(what: object) -> str:
    """Return a digest of the values that determine the questions, from their repr."""
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def cut_at_the_left(question: LikelihoodQuestion, room: int) -> tuple[LikelihoodQuestion, bool]:
    """Like lm-eval, keep only the end of a prompt that does not fit together with its longest ending."""
    most = room - max(map(len, question.endings)) + 1
    return (
        (question, False)
        if len(question.context) <= most
        else (LikelihoodQuestion(question.context[-most:], question.endings), True)
    )


def answer(
    executor: StepRunner, groups: Sequence[Group], results: ResumableResults[ChosenAnswer], progress: Progress
) -> None:
    """Answer the questions that the results lack.

    raises RequestError if the engine cannot process a question, MachineError if values are not finite
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


def _chosen(group: str, question: PreparedQuestion, logprobs: list[float]) -> ChosenAnswer:
    if not all(map(math.isfinite, logprobs)):  # no choice is the likeliest, and JSON cannot represent it
        raise not_finite()
    per_byte = _best([p / n for p, n in zip(logprobs, question.n_bytes, strict=True)]) if question.n_bytes else None
    return ChosenAnswer(
        group, question.number, question.answer, _best(logprobs), logprobs, question.cut, per_byte, question.id
    )


def _best(logprobs: Sequence[float]) -> int:
    """Return the first of the likeliest, like numpy.argmax."""
    return max(range(len(logprobs)), key=lambda i: (logprobs[i], -i))
