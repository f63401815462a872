"""Runs `millrace eval`, whose options are in `options.py`: `--help` imports nothing else."""

from pathlib import Path
from typing import Any

from millrace.cli.eval.questions import evaluate_file, evaluate_mmlu
from millrace.cli.eval.request import EvalOptions
from millrace.cli.eval.texts import agreement_with, perplexity_of
from millrace.cli.options import make_settings
from millrace.compile.settings import BuildSettings
from millrace.engine.cuda.device_lookup import CPU
from millrace.env import Env
from millrace.errors import ConfigError, nearest
from millrace.evaluate import mmlu, perplexity
from millrace.evaluate.sizes import FILE
from millrace.runtime.settings import RunSettings
from millrace.settings import flag_of

_DEFINITIONS = {"mmlu": mmlu.DEFINITIONS, "wikitext": perplexity.DEFINITIONS}
# Task -> options that it takes, beside those of every command that runs a model.
_TAKES = {
    "mmlu": ("data", "definition", "shots", "subject", "limit", "against", "out"),
    "wikitext": ("data", "definition", "window", "limit", "out"),
    "kl": ("data", "window", "limit", "against", "out"),
    FILE: ("limit", "against", "out"),
}
_TASKS = {"mmlu": evaluate_mmlu, "wikitext": perplexity_of, "kl": agreement_with, FILE: evaluate_file}


def run(env: Env, /, model: str, task: str, as_json: bool, **options: Any) -> None:
    """Run `millrace eval`."""
    kind = FILE if Path(task).suffix == ".jsonl" else task
    if kind not in _TASKS:
        raise ConfigError(f"--task is {task!r:.80}", nearest(task, _TASKS), "correct --task")
    task_options = _task_options(kind, options)
    build, run = make_settings(BuildSettings, options), make_settings(RunSettings, options)
    if run.device != CPU:
        message = f"--device is {run.device}, and --task {kind} reads logits as the CPU's executor keeps them"
        raise ConfigError(message, "the CPU", "leave --device out")
    _TASKS[kind](EvalOptions(model=model, task=task, build=build, run=run, env=env, as_json=as_json, **task_options))


def _task_options(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task. raises ConfigError for one that it does not take, or lacks"""
    takes = _TAKES[kind]
    given_options = {name: options[name] for name in sorted({name for names in _TAKES.values() for name in names})}
    for name, value in given_options.items():
        if value not in (None, ()) and name not in takes:
            raise ConfigError(
                f"{flag_of(name)} is given, and --task {kind} does not take it",
                "of a task's options " + ", ".join(map(flag_of, takes)), "leave it out, or choose another --task",
            )  # fmt: skip
    if "data" in takes and given_options["data"] is None:
        missing = "MMLU's folder" if kind == "mmlu" else "a text file"
        raise ConfigError(f"--task {kind} has no --data", missing, "name it: nothing is downloaded")
    definitions = _DEFINITIONS.get(kind, ())
    if given_options["definition"] is None and definitions:
        given_options["definition"] = definitions[0]
    elif definitions and given_options["definition"] not in definitions:
        expected = nearest(given_options["definition"], definitions)
        raise ConfigError(f"--definition is {given_options['definition']!r:.80}", expected, f"choose one of {kind}'s")
    return given_options
