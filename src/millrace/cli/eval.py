"""`millrace eval`: how right a model's answers are, on questions that lie on this disk."""

from pathlib import Path
from typing import Any

import click

from millrace.cli.models import opened
from millrace.cli.options import json_option, made, settings_options
from millrace.cli.screen import heading, pairs, print_json, progress, table
from millrace.compile.settings import BuildSettings
from millrace.env import Env, read_env
from millrace.errors import ConfigError
from millrace.evaluate import mmlu
from millrace.evaluate.choice import Group, Posed, answer, digest
from millrace.evaluate.kept import About, Chosen, Kept, read
from millrace.evaluate.paired import Paired, paired, wilson
from millrace.runtime.open import Opened, RunSettings

EPILOG = """\b
Examples:
  millrace eval SmolLM2.gguf --task mmlu --data mmlu/ --limit 20
  millrace eval MODEL --task mmlu --data mmlu/ --precision w8a8 --against results-of-bf16.jsonl"""
TASKS = ("mmlu",)


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("--task", default="mmlu", show_default=True, type=click.Choice(TASKS), help="What is asked.")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder that has dev/ and test/.")
@click.option("--definition", default=mmlu.LM_EVAL, show_default=True, type=click.Choice(mmlu.DEFINITIONS),
              help="Whose MMLU: they differ in spaces, in BOS, and in what is left out of long prompts.")  # fmt: skip
@click.option("--shots", type=click.IntRange(0, mmlu.MAX_SHOTS), default=5, show_default=True,
              help="Examples before each question.")  # fmt: skip
@click.option("--subject", "subjects", multiple=True, metavar="NAME", help="Only this one; may be said several times.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N questions of each subject.")
@click.option("--against", metavar="MODEL|FILE", help="Another model, or its results: compared question by question.")
@click.option("--out", type=click.Path(path_type=Path), help="File of results; default: beside the cached engines.")
@settings_options(BuildSettings, RunSettings)
@json_option
def command(model: str, task: str, out: Path | None, against: str | None, as_json: bool, **given: Any) -> None:
    """Measure a model's answers.

    What was answered is kept as it comes: a run that was ended goes on where it was, and one that is done is shown
    again.
    """
    build, run, env = made(BuildSettings, given), made(RunSettings, given), read_env()
    asked = {name: given[name] for name in ("data", "definition", "shots", "subjects", "limit")}
    mine = _results(model, build, run, env, asked, out, as_json)
    other = None
    if against is not None:
        file = Path(against)
        other = (
            read(file)[:2]
            if file.is_file() and file.suffix == ".jsonl"
            else _results(against, BuildSettings(), run, env, asked, None, as_json)
        )
    _show(mine, other, as_json)


Results = tuple[About, dict[str, Chosen]]


def _results(
    model: str, build: BuildSettings, run: RunSettings, env: Env, asked: dict[str, Any], out: Path | None, quiet: bool
) -> Results:
    """All questions, those that were answered before among them."""
    subjects = [s.first(asked["limit"]) for s in mmlu.read_subjects(asked["data"], asked["subjects"])]
    with opened(model, build, run, env, quiet=quiet) as found, progress(quiet) as report:
        about = _about(found, subjects, asked)
        path = out or env.cache / "eval" / f"{digest([about.engine, about.task, about.data])}.jsonl"
        kept = Kept(path, about)
        try:
            answer(found.executor, [_group(s, found, asked) for s in subjects], kept, report)
        finally:
            kept.close()
    return about, kept.chosen


def _about(found: Opened, subjects: list[mmlu.Subject], asked: dict[str, Any]) -> About:
    m = found.engine.manifest
    task = f"mmlu, {asked['definition']}, {asked['shots']} shots"
    precision = ", ".join(f"{name} {p}" for name, p in m.precision.items())
    return About(found.name, m.identity, precision, task, digest(subjects))


def _group(subject: mmlu.Subject, found: Opened, asked: dict[str, Any]) -> Group:
    room = min(found.executor.limits.max_context, found.executor.limits.n_pages * found.executor.limits.page_tokens)

    def posed() -> list[Posed]:
        each = mmlu.asked(subject, found.tokenizer, asked["definition"], asked["shots"], room)
        return [
            Posed(f"{subject.name}/{i}", one, item.answer, cut)
            for i, ((one, cut), item) in enumerate(zip(each, subject.test, strict=True))
        ]

    return Group(subject.name, len(subject.test), posed)


def _show(mine: Results, other: Results | None, as_json: bool) -> None:
    about, chosen = mine
    compared = _paired(mine, other) if other else None
    by_subject = _by_subject(chosen)
    n, right, cut = len(chosen), sum(c.right for c in chosen.values()), sum(c.cut for c in chosen.values())
    if as_json:
        print_json(_told(about, by_subject, n, right, cut, other, compared))
        return
    table(("subject", "questions", "right", "95 %"), [
        (name, str(len(some)), *_share(sum(c.right for c in some), len(some))) for name, some in by_subject.items()
    ])  # fmt: skip
    heading(f"{about.model}: {about.task}")
    rows = [("precision", about.precision), ("right", f"{right:,} of {n:,}: " + " ".join(_share(right, n)))]
    rows += [("cut", f"{cut:,} prompts did not fit the context, and lost their beginning")] if cut else []
    if other and compared:
        low, high = compared.interval
        rows += [
            ("against", f"{other[0].model} ({other[0].precision}): {sum(c.right for c in other[1].values()):,} right"),
            (
                "difference",
                f"{compared.difference:+.2%} ({low:+.2%} to {high:+.2%}), McNemar's p {compared.p_value:.2g}",
            ),
            (
                "flips",
                f"{compared.gained:,} became right, {compared.lost:,} wrong; {compared.changed:,} chose otherwise",
            ),
        ]
    pairs(rows)


def _paired(mine: Results, other: Results) -> Paired:
    """raises ConfigError where they did not answer the same"""
    (about, ours), (of, theirs) = mine, other
    if (about.task, about.data) != (of.task, of.data) or ours.keys() != theirs.keys():
        raise ConfigError(
            f"the results of {of.model} are of other questions: {of.task}, {len(theirs):,} answered",
            f"{about.task}, {len(ours):,} answered", "evaluate both in the same way",
        )  # fmt: skip
    ids = list(ours)
    return paired([ours[i].chosen for i in ids], [theirs[i].chosen for i in ids], [ours[i].answer for i in ids])


def _by_subject(chosen: dict[str, Chosen]) -> dict[str, list[Chosen]]:
    found: dict[str, list[Chosen]] = {}
    for one in chosen.values():
        found.setdefault(one.id.rpartition("/")[0], []).append(one)
    return dict(sorted(found.items()))


def _share(right: int, n: int) -> tuple[str, str]:
    low, high = wilson(right, n)
    return f"{right / n:.2%}", f"({low:.1%} to {high:.1%})"


def _told(
    about: About, by_subject: dict[str, list[Chosen]], n: int, right: int, cut: int, other: Results | None,
    compared: Paired | None,
) -> dict[str, Any]:  # fmt: skip
    told: dict[str, Any] = {
        "model": about.model, "engine": about.engine, "precision": about.precision, "task": about.task,
        "data": about.data, "questions": n, "right": right, "share": right / n, "interval": wilson(right, n),
        "cut": cut,
        "subjects": {
            name: {"questions": len(some), "right": sum(c.right for c in some)} for name, some in by_subject.items()
        },
    }  # fmt: skip
    if other and compared:
        told["against"] = {
            "model": other[0].model, "precision": other[0].precision, "difference": compared.difference,
            "interval": compared.interval, "p_value": compared.p_value, "gained": compared.gained,
            "lost": compared.lost, "changed": compared.changed,
        }  # fmt: skip
    return told
