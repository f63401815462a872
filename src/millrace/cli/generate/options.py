"""`millrace generate`: the answer to stdout as it comes, what it took to stderr."""

from typing import Any

import click

from millrace.cli.options import GroupedCommand, json_option, settings_options
from millrace.cli.sampling_flags import SamplingFlags
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.runtime.settings import RunSettings

EPILOG = """\b
Examples:
  millrace generate tiny "Once upon a time" --max-tokens 64
  echo "Tell me a story." | millrace generate tiny --chat - --seed 7"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("model")
@click.argument("text", required=False, metavar="[PROMPT]")
@click.option("-p", "--prompt", metavar="TEXT", help="The same as PROMPT, for texts that begin with a dash.")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template, as a user's message.")
@click.option("-n", "n", type=int, default=1, show_default=True, help="Answers to the same prompt.")
@settings_options(SamplingFlags, BuildSettings, RunSettings)
@json_option
@click.pass_obj
def command(
    env: Env, /, model: str, text: str | None, prompt: str | None, chat: bool, n: int, as_json: bool, **options: Any
) -> None:
    """Continue a text, or answer a message, in this process. PROMPT - reads it from stdin.

    The text streams to stdout; stderr closes with the time for prompt and answer, and the seed that gives it again.
    """
    from millrace.cli.generate.run import run  # imported when it runs: --help needs none of it

    run(env, model=model, text=text, prompt=prompt, chat=chat, n=n, as_json=as_json, **options)
