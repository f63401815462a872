"""`millrace chat`: a conversation in the terminal; also reads questions from a pipe."""

from typing import Any

import click

from millrace.cli.options import GroupedCommand, json_option, settings_options
from millrace.cli.sampling_flags import SamplingFlags
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.runtime.settings import RunSettings

EPILOG = """\b
Examples:
  millrace chat tiny
  millrace chat ./llama-3.2-1b --system "Answer in one sentence." --temperature 0
  echo "Tell me a story." | millrace chat tiny"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("model")
@click.option("--system", metavar="TEXT", help="The system message.")
@settings_options(SamplingFlags, BuildSettings, RunSettings)
@json_option
@click.pass_obj
def command(env: Env, /, model: str, system: str | None, as_json: bool, **options: Any) -> None:
    """Chat with MODEL in this terminal.

    /help lists the commands; Ctrl-C stops an answer, twice leaves. What is pasted is one message. From a pipe every
    line is one message; --json prints every answer as one line of JSON.
    """
    from millrace.cli.chat.run import run  # imported when it runs: --help needs none of it

    run(env, model=model, system=system, as_json=as_json, **options)
