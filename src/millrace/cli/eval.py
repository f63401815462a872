"""`millrace eval`: how right a model's answers are, on questions that lie on this disk."""

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from millrace.cli.models import opened
from millrace.cli.options import json_option, made, settings_options
from millrace.cli.screen import heading, pairs, print_json, progress, table
from millrace.compile.settings import BuildSettings
from millrace.env import read_env
from millrace.evaluate.choice import answer, digest
from millrace.evaluate.kept import About, Chosen, Kept, Results, read
from millrace.evaluate.mmlu import DEFINITIONS, LM_EVAL, MAX_SHOTS, ORIGINAL, Mmlu, read_subjects
from millrace.evaluate.paired import Paired, wilson
from millrace.runtime.open import RunSettings

EPILOG = """\b
Examples:
  millrace eval SmolLM2.gguf --task mmlu --data mmlu/ --limit 20
  millrace eval MODEL --task mmlu --data mmlu/ --precision w8a8 --against results-of-bf16.jsonl"""


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("--task", default="mmlu", show_default=True, type=click.Choice(["mmlu"]), help="What is asked.")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder that has dev/ and test/.")
@click.option("--definition", default=LM_EVAL, show_default=True, type=click.Choice(DEFINITIONS),
              help="Whose MMLU: they differ in spaces, in BOS, and in what is left out of long prompts.")  # fmt: skip
@click.option("--shots", type=click.IntRange(0, MAX_SHOTS), default=5, show_default=True,
              help="Examples before each question.")  # fmt: skip
@click.option("--subject", "subjects", multiple=True, metavar="NAME", help="Only this one; may be said several times.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N questions of each subject.")
@click.option("--against", metavar="MODEL|FILE", help="Another model, or its results: compared question by question.")
@click.option("--out", type=click.Path(path_type=Path), help="File of results; default: beside the cached engines.")
@settings_options(BuildSettings, RunSettings)
@json_option
def command(
    model: str, data: Path, subjects: tuple[str, ...], limit: int | None, against: str | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Measure a model's answers.

    What was answered is kept as it comes: a run that was ended goes on where it was, and one that is done is shown
    again.
    """
    task = Mmlu(read_subjects(data, subjects, limit), given["definition"], given["shots"])
    build, run = made(BuildSettings, given), made(RunSettings, given)
    mine, other = _results(model, build, run, task, given["out"], as_json), None
    if against is not None:
        is_file = Path(against).suffix == ".jsonl"
        other = read(Path(against)) if is_file else _results(against, BuildSettings(), run, task, None, as_json)
    compared = mine.beside(other) if other else None
    if as_json:
        print_json({**_told(mine), **({"against": _compared(other, compared)} if other and compared else {})})
        return
    _show(mine, task)
    if other and compared:
        _show_compared(other, compared)


def _results(
    model: str, build: BuildSettings, run: RunSettings, task: Mmlu, out: Path | None, quiet: bool
) -> Results:  # fmt: skip
    """All questions, those that were answered before among them."""
    env = read_env()
    with opened(model, build, run, env, quiet=quiet) as found, progress(quiet) as report:
        m = found.engine.manifest
        precision = ", ".join(f"{name} {p}" for name, p in m.precision.items())
        about = About(found.name, m.identity, precision, task.name, task.digest)
        path = out or env.cache / "eval" / f"{digest((about.engine, about.task, about.data))}.jsonl"
        with closing(Kept(path, about)) as kept:
            answer(found.executor, task.groups(found.tokenizer, found.executor.limits.context_tokens), kept, report)
    return Results(about, kept.chosen)


def _show(mine: Results, task: Mmlu) -> None:
    rows = [
        (name, str(len(some)), *_share(sum(one.right for one in some), len(some)))
        for name, some in _by_group(mine).items()
    ]
    table(("subject", "questions", "right", "95 %"), rows)
    heading(f"{mine.about.model}: {mine.about.task}")
    n, cut = len(mine.chosen), _n_cut(mine)
    lost = "examples" if task.definition == ORIGINAL else "their beginning"
    told = [
        ("precision", mine.about.precision),
        ("right", f"{mine.n_right:,} of {n:,}: " + " ".join(_share(mine.n_right, n))),
    ]
    pairs([*told, *([("cut", f"{cut:,} prompts did not fit the context, and lost {lost}")] if cut else [])])


def _show_compared(other: Results, compared: Paired) -> None:
    low, high = (f"{end:+.2%}" for end in compared.interval)
    n_gained, n_lost, n_changed = (f"{n:,}" for n in (compared.gained, compared.lost, compared.changed))
    pairs(
        [
            ("against", f"{other.about.model} ({other.about.precision}): {other.n_right:,} right"),
            (
                "difference",
                f"{compared.difference:+.2%} ({low} to {high}), p {compared.p_value:.2g} (McNemar)",
            ),
            (
                "flips",
                f"{n_gained} became right, {n_lost} wrong; {n_changed} chose otherwise",
            ),
        ]
    )


def _by_group(mine: Results) -> dict[str, list[Chosen]]:
    found: dict[str, list[Chosen]] = {}
    for one in mine.chosen.values():
        found.setdefault(one.group, []).append(one)
    return dict(sorted(found.items()))


def _n_cut(mine: Results) -> int:
    return sum(one.cut for one in mine.chosen.values())


def _share(right: int, n: int) -> tuple[str, str]:
    low, high = wilson(right, n)
    return f"{right / n:.2%}", f"({low:.1%} to {high:.1%})"


def _told(mine: Results) -> dict[str, Any]:
    about, n, right = mine.about, len(mine.chosen), mine.n_right
    return {
        "model": about.model, "engine": about.engine, "precision": about.precision, "task": about.task,
        "data": about.data, "questions": n, "right": right, "share": right / n, "interval": wilson(right, n),
        "cut": _n_cut(mine),
        "subjects": {
            name: {"questions": len(some), "right": sum(one.right for one in some)}
            for name, some in _by_group(mine).items()
        },
    }  # fmt: skip


def _compared(other: Results, compared: Paired) -> dict[str, Any]:
    return {
        "model": other.about.model, "precision": other.about.precision, "difference": compared.difference,
        "interval": compared.interval, "p_value": compared.p_value, "gained": compared.gained, "lost": compared.lost,
        "changed": compared.changed,
    }  # fmt: skip
