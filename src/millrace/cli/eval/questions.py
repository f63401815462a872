"""`millrace eval --task mmlu` and `--task FILE.jsonl`: answers questions, and compares two models on them."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from millrace.api.offline_generate import incoming
from millrace.cli.console import heading, pairs, print_json, progress, table
from millrace.cli.eval.request import EvalOptions
from millrace.cli.local_generation import chat_ids
from millrace.cli.open_model import opened
from millrace.compile.settings import BuildSettings
from millrace.errors import MachineError
from millrace.evaluate.generation import Generates, GenerationTask
from millrace.evaluate.mmlu import Mmlu, read_subjects
from millrace.evaluate.paired_comparison import Paired, wilson
from millrace.evaluate.question_summary import (
    by_group,
    comparison_summary,
    n_cut,
    n_gave_up,
    n_right,
    n_right_by_measure,
    results_summary,
)
from millrace.evaluate.question_task import QuestionTask, choice_task, generation_task, mmlu_task
from millrace.evaluate.questions import read_questions
from millrace.evaluate.resumable_results import (
    RIGHT,
    ChosenAnswer,
    J,
    Results,
    check_same,
    compare_results,
    read,
)
from millrace.evaluate.sizes import MAX_SHOTS
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import RunningModel
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams


def evaluate_mmlu(options: EvalOptions) -> None:
    _evaluate(options, _mmlu_task(options))


def evaluate_file(options: EvalOptions) -> None:
    questions = read_questions(Path(options.task), options.limit)
    if questions.is_choice:
        _evaluate(options, choice_task(questions))
    else:
        _evaluate(options, generation_task(questions, _greedy, lambda model: partial(chat_ids, model)))


def generate_greedily(loop: EngineLoop, tasks: Sequence[GenerationTask]) -> Generator[tuple[int, str], None, None]:
    """Yield (index of a task, its text) as answers finish. raises MachineError if an answer fails"""
    params = [
        SamplingParams(
            temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, max_tokens=task.max_tokens, stop=task.stop
        )
        for task in tasks
    ]
    prompts = [{"prompt_token_ids": task.ids} for task in tasks]
    with closing(incoming(loop, prompts, params)) as outputs:
        for i, output, _ in outputs:
            if output.finished:
                (choice,) = output.outputs
                if choice.finish_reason == FinishReason.ERROR:
                    problem = f"an answer failed: {choice.error}"
                    raise MachineError(problem, "a finite answer", "try another --precision")
                yield i, choice.text


def _greedy(model: RunningModel) -> Generates:
    return partial(generate_greedily, model.loop(model.for_throughput()))


def mmlu_results(options: EvalOptions) -> Results[ChosenAnswer]:
    """Run MMLU without output, reusing earlier answers."""
    return _results(options, _mmlu_task(options), options.model, options.build, options.out)


def _mmlu_task(options: EvalOptions) -> QuestionTask[ChosenAnswer]:
    assert options.data is not None, "validated by the command"
    shots = MAX_SHOTS if options.shots is None else options.shots
    return mmlu_task(Mmlu(read_subjects(options.data, options.subject, options.limit), options.definition, shots))


def _evaluate(options: EvalOptions, task: QuestionTask[J]) -> None:
    other, other_build = None, BuildSettings()
    if options.against is not None and Path(options.against).suffix == ".jsonl":
        other = read(Path(options.against), task.kind)
        check_same(other, task.name, task.digest, task.n)  # before the answers, which may take hours
    elif options.against is not None:
        other_build = options.build_of_other(options.against)  # also before: there may be no such model
    results = _results(options, task, options.model, options.build, options.out)
    if options.against is not None and other is None:
        other = _results(options, task, options.against, other_build, None)
    comparison = compare_results(results, other) if other else {}
    if options.as_json:
        against = {"against": comparison_summary(other, comparison)} if other else {}
        print_json({**results_summary(results), **against})
        return
    _show(results, task.truncated)
    if other:
        _show_comparison(other, comparison)


def _results(
    options: EvalOptions, task: QuestionTask[J], model: str, build: BuildSettings, out: Path | None
) -> Results[J]:
    """Answer all questions, reusing earlier answers."""
    quiet = options.as_json
    with (
        opened(model, build, options.run, options.env, quiet=quiet, one_table=True) as opened_model,
        progress(quiet) as report,
    ):
        return task.run(opened_model, options.results_file(task.inputs(opened_model), out), report)


def _show(results: Results[J], truncated: str) -> None:
    groups = by_group(results)
    if len(groups) > 1:
        rows = [(name, str(len(answers)), *_share(n_right(answers), len(answers))) for name, answers in groups.items()]
        table(("subject", "questions", "right", "95 %"), rows)
    heading(f"{results.about.model}: {results.about.task}")
    n, cut, gave_up = len(results.records), n_cut(results), n_gave_up(results)
    pairs([
        ("precision", results.about.precision),
        *((name, f"{right:,} of {n:,}: " + " ".join(_share(right, n)))
          for name, right in n_right_by_measure(results).items()),
        *([("cut", f"{cut:,} prompts did not fit the context, and lost {truncated}")] if cut else []),
        *([("given up", f"{gave_up:,} answers, which a regular expression takes too much on, count as wrong")]
          if gave_up else []),
    ])  # fmt: skip


def _show_comparison(other: Results[J], comparison: Mapping[str, Paired]) -> None:
    right = " and ".join(f"{n:,} {name}" for name, n in n_right_by_measure(other).items())
    rows = [("against", f"{other.about.model} ({other.about.precision}): {right}")]
    for name, paired in comparison.items():
        low, high = (f"{end:+.2%}" for end in paired.interval)
        unit = "" if name == RIGHT else " per byte"
        text = f"{paired.difference:+.2%} ({low} to {high}), p {paired.p_value:.2g} (McNemar)"
        flips = f"{paired.gained:,} became right, {paired.lost:,} wrong; {paired.changed:,} chose otherwise"
        rows += [(f"difference{unit}", text), (f"flips{unit}", flips)]
    pairs(rows)


def _share(right: int, n: int) -> tuple[str, str]:
    low, high = wilson(right, n)
    return f"{right / n:.2%}", f"({low:.1%} to {high:.1%})"
