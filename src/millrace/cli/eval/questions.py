"""`millrace eval --task mmlu` and `--task FILE.jsonl`: answers questions, and compares two models on them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol

from millrace.api.offline_generate import incoming
from millrace.cli.console import Progress, heading, pairs, print_json, progress, table
from millrace.cli.eval.request import EvalOptions, about, about_to_dict
from millrace.cli.local_generation import chat_ids
from millrace.cli.open_model import opened
from millrace.compile.settings import BuildSettings
from millrace.errors import MachineError
from millrace.evaluate import generation, multiple_choice
from millrace.evaluate.generation import GeneratedAnswer, Generates, GenerationTask, Judge, asks, judges
from millrace.evaluate.mmlu import ORIGINAL, Mmlu, read_subjects
from millrace.evaluate.paired_comparison import Paired, Verdict, wilson
from millrace.evaluate.questions import Questions, read_questions
from millrace.evaluate.resumable_results import (
    PER_BYTE,
    RIGHT,
    ChosenAnswer,
    J,
    Results,
    ResumableResults,
    check_same,
    check_whole,
    read,
    results_path,
)
from millrace.evaluate.sizes import MAX_SHOTS
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import RunningModel
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class _Task(Generic[J]):
    """A task. n: number of questions; answer: runs the missing ones; lost: what truncation of a long prompt drops"""

    name: str
    digest: str
    n: int
    kind: type[J]
    answer: Callable[[RunningModel, ResumableResults[J], Progress], None]
    lost: str = "their beginning"


class _Grouped(Protocol):
    """MMLU, or questions from a file."""

    def groups(self, tokenizer: Any, room: int) -> Sequence[multiple_choice.Group]: ...


def of_mmlu(options: EvalOptions) -> None:
    _evaluate(options, _mmlu(options))


def answers_to_mmlu(options: EvalOptions) -> Results[ChosenAnswer]:
    """Run MMLU without output, reusing earlier answers."""
    return _results(options, _mmlu(options), options.model, options.build, options.out)


def _mmlu(options: EvalOptions) -> _Task[ChosenAnswer]:
    assert options.data is not None, "the command has looked"
    shots = MAX_SHOTS if options.shots is None else options.shots
    mmlu = Mmlu(read_subjects(options.data, options.subject, options.limit), options.definition, shots)
    mmlu.check_examples()
    lost = "examples" if mmlu.definition == ORIGINAL else "their beginning"
    return _Task(mmlu.name, mmlu.digest, mmlu.n, ChosenAnswer, partial(_choose, mmlu), lost)


def of_a_file(options: EvalOptions) -> None:
    questions = read_questions(Path(options.task), options.limit)
    n = len(questions.lines)
    if questions.is_choice:
        name = f"{questions.name}, multiple choice"
        _evaluate(options, _Task(name, questions.digest, n, ChosenAnswer, partial(_choose, questions)))
    else:
        name, judged = f"{questions.name}, generated", judges(questions)
        _evaluate(options, _Task(name, questions.digest, n, GeneratedAnswer, partial(_generate, questions, judged)))


def _choose(
    questions: _Grouped, model: RunningModel, results: ResumableResults[ChosenAnswer], report: Progress
) -> None:
    groups = questions.groups(model.tokenizer, model.executor.limits.context_tokens)
    multiple_choice.answer(model.native, groups, results, report)


def _generate(
    questions: Questions,
    judged: Sequence[Judge],
    model: RunningModel,
    results: ResumableResults[GeneratedAnswer],
    report: Progress,
) -> None:
    room = model.executor.limits.context_tokens
    tasks = asks(questions, judged, model.tokenizer, partial(chat_ids, model), room)
    generation.answer(_greedily(model.loop(model.for_throughput())), tasks, len(questions.lines), results, report)


def _greedily(loop: EngineLoop) -> Generates:
    """Return a function that generates greedily. raises MachineError if an answer fails"""

    def generates(tasks: Sequence[GenerationTask]) -> Generator[tuple[int, str], None, None]:
        params = [
            SamplingParams(
                temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, max_tokens=one.max_tokens, stop=one.stop
            )
            for one in tasks
        ]
        prompts = [{"prompt_token_ids": one.ids} for one in tasks]
        with closing(incoming(loop, prompts, params)) as arrived:
            for i, output, _ in arrived:
                if output.finished:
                    (choice,) = output.outputs
                    if choice.finish_reason == FinishReason.ERROR:
                        what = f"an answer failed: {choice.error}"
                        raise MachineError(what, "a finite answer", "try another --precision")
                    yield i, choice.text

    return generates


def _evaluate(options: EvalOptions, task: _Task[J]) -> None:
    other, theirs = None, BuildSettings()
    if options.against is not None and Path(options.against).suffix == ".jsonl":
        other = read(Path(options.against), task.kind)
        check_same(other, task.name, task.digest, task.n)  # now: answers may take hours
    elif options.against is not None:
        theirs = options.build_of_other(options.against)  # now, too: there may be no such model
    mine = _results(options, task, options.model, options.build, options.out)
    if options.against is not None and other is None:
        other = _results(options, task, options.against, theirs, None)
    compared = results_path(mine, other) if other else {}
    if options.as_json:
        print_json({**_results_to_dict(mine), **({"against": _comparison_to_dict(other, compared)} if other else {})})
        return
    _show(mine, task.lost)
    if other:
        _show_compared(other, compared)


def _results(options: EvalOptions, task: _Task[J], model: str, build: BuildSettings, out: Path | None) -> Results[J]:
    """Answer all questions, reusing earlier answers."""
    quiet = options.as_json
    with (
        opened(model, build, options.run, options.env, quiet=quiet, one_table=True) as opened_model,
        progress(quiet) as report,
    ):
        mine = about(opened_model, task.name, task.digest)
        with closing(ResumableResults(options.kept_at(mine, out), mine, task.kind)) as results:
            task.answer(opened_model, results, report)
    answered = Results(mine, results.records)
    check_whole(answered, task.n)
    return answered


def _show(mine: Results[J], lost: str) -> None:
    groups = _by_group(mine)
    if len(groups) > 1:
        rows = [(name, str(len(some)), *_share(_n_right(some), len(some))) for name, some in groups.items()]
        table(("subject", "questions", "right", "95 %"), rows)
    heading(f"{mine.about.model}: {mine.about.task}")
    n, cut = len(mine.records), _n_cut(mine)
    rights = [
        (name, f"{right:,} of {n:,}: " + " ".join(_share(right, n))) for name, right in _rights(mine).items()
    ]  # fmt: skip
    cuts = [("cut", f"{cut:,} prompts did not fit the context, and lost {lost}")] if cut else []
    given_up = _n_gave_up(mine)
    ups = [("given up", f"{given_up:,} answers, which a regular expression takes too much on, count as wrong")]
    pairs([("precision", mine.about.precision), *rights, *cuts, *(ups if given_up else [])])


def _show_compared(other: Results[J], compared: Mapping[str, Paired]) -> None:
    right = " and ".join(f"{n:,} {name}" for name, n in _rights(other).items())
    rows = [("against", f"{other.about.model} ({other.about.precision}): {right}")]
    for name, one in compared.items():
        low, high = (f"{end:+.2%}" for end in one.interval)
        of = "" if name == RIGHT else " per byte"
        text = f"{one.difference:+.2%} ({low} to {high}), p {one.p_value:.2g} (McNemar)"
        flips = f"{one.gained:,} became right, {one.lost:,} wrong; {one.changed:,} chose otherwise"
        rows += [(f"difference{of}", text), (f"flips{of}", flips)]
    pairs(rows)


def _by_group(mine: Results[J]) -> dict[str, list[J]]:
    groups: dict[str, list[J]] = {}
    for (group, _), one in mine.records.items():
        groups.setdefault(group, []).append(one)
    return dict(sorted(groups.items()))


def _verdicts(some: Sequence[J], measure: str = RIGHT) -> list[Verdict]:
    return [one.verdicts[measure] for one in some]


def _n_right(some: Sequence[J], measure: str = RIGHT) -> int:
    return sum(verdict.right for verdict in _verdicts(some, measure))


def _rights(mine: Results[J]) -> dict[str, int]:
    """Count the correct answers by measure."""
    some = list(mine.records.values())
    return {measure: _n_right(some, measure) for measure in some[0].verdicts}


def _n_cut(mine: Results[J]) -> int:
    return sum(one.cut for one in mine.records.values())


def _n_gave_up(mine: Results[J]) -> int:
    return sum(one.gave_up for one in mine.records.values())


def _share(right: int, n: int) -> tuple[str, str]:
    low, high = wilson(right, n)
    return f"{right / n:.2%}", f"({low:.1%} to {high:.1%})"


def _results_to_dict(mine: Results[J]) -> dict[str, Any]:
    n, rights = len(mine.records), _rights(mine)
    counted = {
        name: {"right": right, "share": right / n, "interval": wilson(right, n)} for name, right in rights.items()
    }
    return {
        **about_to_dict(mine.about), "questions": n, **counted[RIGHT],
        **({"per_byte": counted[PER_BYTE]} if PER_BYTE in counted else {}), "cut": _n_cut(mine),
        "gave_up": _n_gave_up(mine),
        "subjects": {
            name: {"questions": len(some), "right": _n_right(some)} for name, some in _by_group(mine).items()
        },
    }  # fmt: skip


def _comparison_to_dict(other: Results[J], compared: Mapping[str, Paired]) -> dict[str, Any]:
    counted = {
        name: {
            "difference": one.difference, "interval": one.interval, "p_value": one.p_value, "gained": one.gained,
            "lost": one.lost, "changed": one.changed,
        }
        for name, one in compared.items()
    }  # fmt: skip
    return {
        "model": other.about.model, "precision": other.about.precision, **counted[RIGHT],
        **({"per_byte": counted[PER_BYTE]} if PER_BYTE in counted else {}),
    }  # fmt: skip
