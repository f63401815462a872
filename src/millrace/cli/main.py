"""`millrace COMMAND ...`: finds the command, and turns every mistake into one clear message and an exit code.

Exit codes: 0 done, 1 nobody reads the result on (`| head -1`), 2 a mistake (what was wrong, what was expected, how to
fix it; on stderr), 130 ended by Ctrl-C.
"""

import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from millrace import __version__
from millrace.cli.flag_aliases import check_short, hint, translate_flag, value_of
from millrace.env import is_plain_terminal, read_env
from millrace.errors import ConfigError, MachineError, MillraceError, nearest

MISTAKE, INTERRUPTED = 2, 130
# Command -> the first sentence of its help, so that `millrace --help` imports none of them. Each is the module of this
# package that has its name, imported when the command runs.
COMMANDS = {
    "serve": "Serve MODEL to clients of OpenAI, Anthropic and Ollama.",
    "chat": "Chat with MODEL in this terminal.",
    "generate": "Continue a text, or answer a message, in this process.",
    "build": "Compile a checkpoint into an engine folder for this machine.",
    "inspect": "Show what an engine is made of.",
    "tune": "Time the kernels of a built engine on this machine.",
    "demo": "Build, serve, ask and measure the bundled model `tiny`.",
    "bench": "Measure latency and throughput of a server.",
    "lint": "Explain a Triton model repository before it is served.",
    "doctor": "Examine this machine, or show what runs a model.",
    "verify": "Reproduce an answer from its receipt, and compare.",
    "eval": "Measure a model's answers.",
    "compress": "Compress a checkpoint and measure the accuracy loss.",
    "convert": "Rewrite PyTorch weights (.bin, .pt) as safetensors.",
    "size": "Plan how many systems serve a load, with reasons.",
    "list": "List the engines in the cache.",
    "pull": "Download a checkpoint from the hub.",
    "rm": "Remove engines from the cache.",
}


# Commands of other programs, and what does that here.
_OTHER_COMMANDS = {
    "run": '"millrace chat MODEL", or "millrace generate MODEL PROMPT"', "complete": '"generate"',
    **dict.fromkeys(("start", "server", "up", "trtllm-serve", "api-server"), '"serve"'),
    **dict.fromkeys(("stop", "kill", "down"), "Ctrl-C, or SIGTERM for its process: so `millrace serve` ends in order"),
    **dict.fromkeys(("ls", "ps", "models"), '"list", for the engines that are built'),
    **dict.fromkeys(("show", "info"), '"inspect"'), **dict.fromkeys(("download", "fetch", "get"), '"pull"'),
    **dict.fromkeys(("remove", "delete", "rmi"), '"rm"'),
    **dict.fromkeys(("cp", "copy", "push"), "cp -r or rsync: an engine is a folder, which `millrace list` names"),
    **dict.fromkeys(("compile", "create", "trtllm-build", "refit"), '"build"'),
    **dict.fromkeys(("quantize", "quantise", "quant", "prune"), '"compress", or "build --precision"'),
    **dict.fromkeys(("benchmark", "profile", "perf", "throughput", "latency", "trtllm-bench"), '"bench"'),
    **dict.fromkeys(("perf-analyzer", "perf_analyzer"), '"bench infer"'),
    **dict.fromkeys(("genai-perf", "aiperf"), '"bench"'), "compare": '"bench compare"',
    **dict.fromkeys(("analyze", "sweep"), '"bench sweep"'),
    **dict.fromkeys(("collect-env", "env", "check"), '"doctor"'),
    **dict.fromkeys(("evaluate", "perplexity", "lm-eval", "trtllm-eval"), '"eval"'),
    **dict.fromkeys(("run-batch", "batch"), '"serve", and a client, or LLM(...).generate(prompts) in Python'),
    **dict.fromkeys(("login", "signin", "signout", "logout"), "HF_TOKEN in the environment, for models with a licence"),
    **dict.fromkeys(("embed", "embedding"), '"serve", and /v1/embeddings, or LLM(...).embed(texts) in Python'),
}  # fmt: skip


class Commands(click.Group):
    """The table above as a click group."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"millrace.cli.{cmd_name}.options").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            meant = _OTHER_COMMANDS.get(name.lower())
            expected = f"did you mean {meant}?" if meant else nearest(name, COMMANDS)
            raise ConfigError(f'there is no command "{name}"', expected, "`millrace --help` lists them")
        resolved, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            parts = command.commands if isinstance(command, click.Group) else getattr(command, "parts", {})
            part = parts.get(rest[0]) if rest else None
            path = resolved if part is None else f"{resolved} {rest[0]}"
            check_short(part or command, click.Context(part or command, ctx, path), rest[1:] if part else rest)
        return resolved, command, rest


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=Commands, invoke_without_command=True, context_settings=HELP)
@click.version_option(__version__, message="millrace %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """From a checkpoint to a chat endpoint in one command.

    MODEL is a checkpoint folder, a GGUF file, an engine folder, a hub id (org/name or org/name@revision), a name that
    `millrace list` shows, or the bundled `tiny`.

    \b
    millrace demo               the whole journey in a minute
    millrace serve MODEL        an OpenAI-compatible endpoint on http://127.0.0.1:8000/v1
    millrace chat tiny          a chat in this terminal
    """
    ctx.obj = read_env()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line; gives the exit code. Prints every MillraceError."""
    words = list(arguments)
    if words[:1] == ["help"]:  # `millrace help serve` is what people type first
        words = [*words[1:], "--help"]
    color = False if is_plain_terminal() else None  # None: where the output is a terminal
    try:
        _check_text(words)
        code = cli.main(translate_flag(words), prog_name="millrace", standalone_mode=False, color=color)
        return code if isinstance(code, int) else 0
    except MillraceError as error:
        return _mistake(error, color)
    except click.UsageError as error:
        return _mistake(_as_error(error, words), color)
    except click.ClickException as error:
        return _mistake(ConfigError(error.format_message(), "a readable file", "check the path"), color)
    except OSError as error:  # a full disk, a folder that may not be written: nobody below could say it better
        full = MachineError(f"{error}", "files that can be read and written", "make room, or check the rights")
        return _mistake(full, color)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that are neither UTF-8 nor file names. raises ConfigError"""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            if os.path.exists(argument):  # noqa: PTH110 - Path's raises for a text that is too long for a name
                continue
            byte, at = os.fsencode(argument[error.start])[0], len(os.fsencode(argument[: error.start]))
            raise ConfigError(
                f"argument {number} is not UTF-8: byte 0x{byte:02x} at {at}", "UTF-8 text, or the name of a file",
                "convert it: $(printf %s TEXT | iconv -f latin1 -t utf8); or give a text on stdin: -p -",
            ) from None  # fmt: skip


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows "?" instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def _mistake(error: MillraceError, color: bool | None) -> int:
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True, color=color)
    return MISTAKE


def _as_error(error: click.UsageError, arguments: Sequence[str]) -> ConfigError:
    """Return what click says of a wrong command line, in our three parts."""
    path = error.ctx.command_path if error.ctx else "millrace"
    see_help = f"`{path} --help` shows what it takes"
    if isinstance(error, click.NoSuchOption) and error.ctx:
        option_names = [o for p in error.ctx.command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
        expected, fix = hint(error.option_name, value_of(error.option_name, arguments), option_names)
        return ConfigError(f"there is no option {error.option_name}", expected, fix or see_help)
    usage = error.ctx.get_usage().removeprefix("Usage: ") if error.ctx else "millrace COMMAND"
    return ConfigError(error.format_message().rstrip("."), usage, see_help)
