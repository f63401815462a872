"""Tasks of questions: MMLU, or a file of questions. A model answers those that its results lack."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol

from millrace.compile.settings import Progress
from millrace.evaluate import generation, multiple_choice
from millrace.evaluate.generation import GeneratedAnswer, Generates, Render, asks, judges
from millrace.evaluate.mmlu import ORIGINAL, Mmlu
from millrace.evaluate.questions import Questions
from millrace.evaluate.resumable_results import (
    ChosenAnswer,
    J,
    Results,
    ResultsInputs,
    ResumableResults,
    check_whole,
)
from millrace.runtime.open_engine import RunningModel


class _GroupedQuestions(Protocol):
    """MMLU, or multiple-choice questions from a file."""

    def groups(self, tokenizer: Any, room: int) -> Sequence[multiple_choice.Group]: ...


@dataclass(frozen=True, slots=True)
class QuestionTask(Generic[J]):
    """A task of `n` questions. digest: of the questions and how they are asked; kind: type of an answer

    answer_missing: answers the questions that the results lack
    truncated: what a prompt that is longer than the context loses, for users
    """

    name: str
    digest: str
    n: int
    kind: type[J]
    answer_missing: Callable[[RunningModel, ResumableResults[J], Progress], None]
    truncated: str = "their beginning"

    def inputs(self, model: RunningModel) -> ResultsInputs:
        return ResultsInputs.from_model(model, self.name, self.digest)

    def run(self, model: RunningModel, path: Path, progress: Progress) -> Results[J]:
        """Answer all questions, reusing the answers in `path`. raises ConfigError for a file of other results"""
        inputs = self.inputs(model)
        with closing(ResumableResults(path, inputs, self.kind)) as results:
            self.answer_missing(model, results, progress)
        answered = Results(inputs, results.records)
        check_whole(answered, self.n)
        return answered


def mmlu_task(mmlu: Mmlu) -> QuestionTask[ChosenAnswer]:
    """Create the task of MMLU. raises ConfigError if there are too few examples for its shots"""
    mmlu.check_examples()
    truncated = "examples" if mmlu.definition == ORIGINAL else "their beginning"
    return QuestionTask(mmlu.name, mmlu.digest, mmlu.n, ChosenAnswer, partial(_choose, mmlu), truncated)


def choice_task(questions: Questions) -> QuestionTask[ChosenAnswer]:
    """Create the task of multiple-choice questions from a file."""
    name = f"{questions.name}, multiple choice"
    return QuestionTask(name, questions.digest, len(questions.lines), ChosenAnswer, partial(_choose, questions))


def generation_task(
    questions: Questions,
    generates: Callable[[RunningModel], Generates],
    render: Callable[[RunningModel], Render],
) -> QuestionTask[GeneratedAnswer]:
    """Create the task of questions from a file that are answered with generated text. raises ConfigError"""

    def answer(model: RunningModel, results: ResumableResults[GeneratedAnswer], progress: Progress) -> None:
        room = model.executor.limits.context_tokens
        tasks = asks(questions, judged, model.tokenizer, render(model), room)
        generation.answer(generates(model), tasks, len(questions.lines), results, progress)

    judged, name = judges(questions), f"{questions.name}, generated"
    return QuestionTask(name, questions.digest, len(questions.lines), GeneratedAnswer, answer)


def _choose(
    questions: _GroupedQuestions, model: RunningModel, results: ResumableResults[ChosenAnswer], progress: Progress
) -> None:
    groups = questions.groups(model.tokenizer, model.executor.limits.context_tokens)
    multiple_choice.answer(model.native, groups, results, progress)
