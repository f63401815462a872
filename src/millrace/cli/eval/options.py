"""Options of `millrace eval`: measures a model's answers on local questions and texts."""

from pathlib import Path
from typing import Any

import click

from millrace.cli.options import GroupedCommand, json_option, settings_options
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.evaluate.sizes import FILE, MAX_SHOTS, SHORTEST
from millrace.runtime.settings import RunSettings

EPILOG = """\b
Examples:
  millrace eval SmolLM2.gguf --task mmlu --data mmlu/ --limit 20
  millrace eval MODEL --task mmlu --data mmlu/ --precision w8a8 --against results-of-bf16.jsonl
  millrace eval MODEL --task wikitext --data wiki.test.raw --definition lm-eval
  millrace eval MODEL --task kl --data wiki.test.raw --precision w4a8
  millrace eval MODEL --task my-questions.jsonl"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("model")
@click.option("--task", default="mmlu", show_default=True, metavar=f"mmlu|wikitext|kl|{FILE}",
              help="mmlu, wikitext (perplexity), kl (divergence from another model), "
                   "or a file of questions.")  # fmt: skip
@click.option(
    "--data", type=click.Path(path_type=Path), help="MMLU's folder, with dev/ and test/; otherwise a text file."
)
@click.option("--definition", metavar="NAME",
              help="Definition of MMLU (lm-eval, original) or of perplexity (gptq, llama-perplexity, lm-eval); "
                   "default: the first. Results of different definitions are not comparable.")  # fmt: skip
@click.option("--shots", type=click.IntRange(0, MAX_SHOTS), help="Examples before each question of MMLU; default: 5.")
@click.option("--subject", multiple=True, metavar="NAME", help="Subject of MMLU; may be repeated.")
@click.option("--window", type=click.IntRange(SHORTEST), metavar="N",
              help="Tokens per window of a text; default: the definition's, or the context.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="N",
              help="Only the first N questions of each subject, windows or documents.")  # fmt: skip
@click.option("--against", metavar="MODEL|FILE",
              help="Model to compare with, or (for questions) its results file. For kl the reference; default: "
                   "the checkpoint in its own float type.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="File of results; default: next to the cached engines.")
@settings_options(BuildSettings, RunSettings)
@json_option
@click.pass_obj
def command(env: Env, /, model: str, task: str, as_json: bool, **options: Any) -> None:
    """Measure a model's answers.

    Results are saved as they are computed: an interrupted run resumes, and a finished one is shown again.
    """
    from millrace.cli.eval.run import run  # imported when it runs: --help needs none of it

    run(env, model=model, task=task, as_json=as_json, **options)
