"""`millrace generate`: the answer to stdout as it comes, what it took to stderr."""

import sys
from typing import Any

import click

from millrace.cli.models import opened
from millrace.cli.options import GroupedCommand, json_option, made, settings_options
from millrace.cli.sampling import SamplingFlags, as_options
from millrace.cli.screen import decoded, note, print_json
from millrace.cli.stream import chat_ids, stream
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.errors import ConfigError
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
    env: Env, /, model: str, text: str | None, prompt: str | None, chat: bool, n: int, as_json: bool, **given: Any
) -> None:
    """Continue a text, or answer a message, in this process. PROMPT - reads it from stdin.

    The text streams to stdout; stderr closes with the time for prompt and answer, and the seed that gives it again.
    """
    params = made(SamplingFlags, given).params(n)
    text = _prompt(text, prompt)
    build, run = made(BuildSettings, given), made(RunSettings, given)
    with opened(model, build, run, env, sequences=n, quiet=as_json) as model_opened:
        loop = model_opened.loop()
        ids = chat_ids(model_opened, [{"role": "user", "content": text}]) if chat else loop.tokenizer.encode(text)
        with as_options():
            answered = stream(loop, ids, params, None if as_json or n > 1 else _show)
    if as_json:
        print_json({"model": model_opened.name, "prompt": text, **answered.as_dict()})
    elif n > 1:
        for i, choice in enumerate(answered.texts):
            click.echo(click.style(f"--- {i + 1}", bold=True) + f"\n{choice}")
    else:
        click.echo()
    answered.raise_error()
    if not as_json:
        note(click.style(answered.summary(), dim=True))


def _prompt(text: str | None, flag: str | None) -> str:
    """raises ConfigError where there is none, or two"""
    if (text is None) == (flag is None):
        raise ConfigError(
            "there is no prompt" if text is None else "the prompt is given twice",
            "one prompt: millrace generate MODEL PROMPT, or - to read it from stdin",
            "`millrace generate --help` shows examples",
        )
    given = text or flag or ""
    return decoded(sys.stdin.buffer.read()).removesuffix("\n") if given == "-" else given


def _show(text: str) -> None:
    click.echo(text, nl=False)
