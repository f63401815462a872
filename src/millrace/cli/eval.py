"""`millrace eval`: how right a model's answers are, on questions and texts that lie on this disk."""

from pathlib import Path
from typing import Any

import click

from millrace.cli.eval_asked import Asked
from millrace.cli.eval_questions import of_a_file, of_mmlu
from millrace.cli.eval_texts import agreement_with, perplexity_of
from millrace.cli.options import GroupedCommand, json_option, made, settings_options
from millrace.compile.settings import BuildSettings
from millrace.engine.cuda.found import CPU
from millrace.env import Env
from millrace.errors import ConfigError, nearest
from millrace.evaluate import mmlu, perplexity
from millrace.evaluate.mmlu import MAX_SHOTS
from millrace.evaluate.perplexity import SHORTEST
from millrace.runtime.settings import RunSettings
from millrace.settings import flag_of

EPILOG = """\b
Examples:
  millrace eval SmolLM2.gguf --task mmlu --data mmlu/ --limit 20
  millrace eval MODEL --task mmlu --data mmlu/ --precision w8a8 --against results-of-bf16.jsonl
  millrace eval MODEL --task wikitext --data wiki.test.raw --definition lm-eval
  millrace eval MODEL --task kl --data wiki.test.raw --precision w4a8
  millrace eval MODEL --task my-questions.jsonl"""

FILE = "FILE.jsonl"
_DEFINITIONS = {"mmlu": mmlu.DEFINITIONS, "wikitext": perplexity.DEFINITIONS}
# Task -> options that it takes, beside those of every command that runs a model.
_TAKES = {
    "mmlu": ("data", "definition", "shots", "subject", "limit", "against", "out"),
    "wikitext": ("data", "definition", "window", "limit", "out"),
    "kl": ("data", "window", "limit", "against", "out"),
    FILE: ("limit", "against", "out"),
}
_TASKS = {"mmlu": of_mmlu, "wikitext": perplexity_of, "kl": agreement_with, FILE: of_a_file}


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("model")
@click.option("--task", default="mmlu", show_default=True, metavar=f"mmlu|wikitext|kl|{FILE}",
              help="MMLU, perplexity, how far from another model, or questions of your own.")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path), help="MMLU's folder, with dev/ and test/; else a text file.")
@click.option("--definition", metavar="NAME",
              help="Whose MMLU (lm-eval, original), or perplexity (gptq, llama-perplexity, lm-eval); "
                   "default: the first. Their figures are not comparable.")  # fmt: skip
@click.option("--shots", type=click.IntRange(0, MAX_SHOTS), help="Examples before each question of MMLU; default: 5.")
@click.option("--subject", multiple=True, metavar="NAME", help="Only this one of MMLU; may be said several times.")
@click.option("--window", type=click.IntRange(SHORTEST), metavar="N",
              help="Tokens of a text that are read at once; default: the definition's, or the context.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="N",
              help="Only the first N questions of each subject, windows or documents.")  # fmt: skip
@click.option("--against", metavar="MODEL|FILE",
              help="Another model, or of questions its results: compared one by one. Of kl the reference; "
                   "default: the same checkpoint in its own float type.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="File of results; default: beside the cached engines.")
@settings_options(BuildSettings, RunSettings)
@json_option
@click.pass_obj
def command(env: Env, /, model: str, task: str, as_json: bool, **given: Any) -> None:
    """Measure a model's answers.

    What was answered is kept as it comes: a run that was ended goes on where it was, and one that is done is shown
    again.
    """
    kind = FILE if Path(task).suffix == ".jsonl" else task
    if kind not in _TASKS:
        raise ConfigError(f"--task is {task!r:.80}", nearest(task, _TASKS), "correct --task")
    taken = _taken(kind, given)
    build, run = made(BuildSettings, given), made(RunSettings, given)
    if run.device != CPU:
        what = f"--device is {run.device}, and --task {kind} reads logits as the CPU's executor keeps them"
        raise ConfigError(what, "the CPU", "leave --device out")
    _TASKS[kind](Asked(model=model, task=task, build=build, run=run, env=env, as_json=as_json, **taken))


def _taken(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of tasks. raises ConfigError for one that this task does not take, or lacks"""
    takes = _TAKES[kind]
    named = {name: given[name] for name in sorted({name for names in _TAKES.values() for name in names})}
    for name, value in named.items():
        if value not in (None, ()) and name not in takes:
            raise ConfigError(
                f"{flag_of(name)} is given, and --task {kind} does not take it",
                "of a task's options " + ", ".join(map(flag_of, takes)), "leave it out, or choose another --task",
            )  # fmt: skip
    if "data" in takes and named["data"] is None:
        what = "MMLU's folder" if kind == "mmlu" else "a text file"
        raise ConfigError(f"--task {kind} has no --data", what, "name it: nothing is downloaded")
    known = _DEFINITIONS.get(kind, ())
    if named["definition"] is None and known:
        named["definition"] = known[0]
    elif known and named["definition"] not in known:
        expected = nearest(named["definition"], known)
        raise ConfigError(f"--definition is {named['definition']!r:.80}", expected, f"choose one of {kind}'s")
    return named
