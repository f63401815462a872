"""Runs `millrace generate`, whose options are in `options.py`: `--help` imports nothing else."""

import sys
from typing import Any

import click

from millrace.cli.console import decode_stdin, note, print_json
from millrace.cli.local_generation import chat_ids, stream
from millrace.cli.open_model import opened
from millrace.cli.options import make_settings
from millrace.cli.sampling_flags import SamplingFlags, as_options
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.runtime.settings import RunSettings


def run(
    env: Env, /, model: str, text: str | None, prompt: str | None, chat: bool, n: int, as_json: bool, **options: Any
) -> None:
    """Run `millrace generate`."""
    params = make_settings(SamplingFlags, options).params(n)
    text = _prompt(text, prompt)
    build, run = make_settings(BuildSettings, options), make_settings(RunSettings, options)
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
    """Return the prompt. raises ConfigError if there is none, or two"""
    if (text is None) == (flag is None):
        raise ConfigError(
            "there is no prompt" if text is None else "the prompt is given twice",
            "one prompt: millrace generate MODEL PROMPT, or - to read it from stdin",
            "`millrace generate --help` shows examples",
        )
    prompt = text or flag or ""
    return decode_stdin(sys.stdin.buffer.read()).removesuffix("\n") if prompt == "-" else prompt


def _show(text: str) -> None:
    click.echo(text, nl=False)
