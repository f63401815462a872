"""Options of `millrace size`: from a business question to the systems to buy."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from millrace.cli.options import json_option, settings_options
from millrace.cli.size import fit_options, verify_options
from millrace.errors import ConfigError
from millrace.size.question.settings import GROUPS

EPILOG = """\b
Examples:
  millrace size --model llama-3-8b --isl 2000 --osl 200 --rate 70 --ttft-ms 500 --hardware H100
  millrace size --model llama-3-70b --preset rag --users 100000 --hours 8 --reading read --ttft-ms 1000
  millrace size --model llama-3-8b --input "3500 words" --output "500 words" --calls 30M/year --burst 7 --ttft-ms 500
  millrace size --model llama-3-8b --isl 2000 --osl 200 --systems 4 --ttft-ms 500
  millrace size --measured runs.csv --isl 2000 --osl 200 --rate 70 --ttft-ms 500 --of p95
  millrace size --answers question.yaml --report page.html
  millrace size                                      asks the questions one by one
  millrace size fit --help                           fits the model to your own benchmarks"""


class _GroupedHelpCommand(click.Group):
    """A group whose help lists flags by settings class."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        for group in GROUPS:
            with formatter.section(str(group.__doc__).partition(".")[0]):
                formatter.write_dl([records.pop(f.name) for f in fields(group)])
        with formatter.section("Input and output"):
            formatter.write_dl(list(records.values()))
        self.format_commands(ctx, formatter)


def _is_set(ctx: click.Context, name: str) -> bool:
    """Whether the flag is on the command line."""
    return ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE


@click.group(cls=_GroupedHelpCommand, invoke_without_command=True, epilog=EPILOG)
@settings_options(*GROUPS)
@click.option(
    "--answers",
    type=Path,
    multiple=True,
    metavar="FILE",
    help="YAML file of these settings; flags override it. Several files: models that share systems.",
)
@click.option("--report", type=Path, metavar="FILE", help="Write an HTML page with all results and plots.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, answers: tuple[Path, ...], report: Path | None, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Plan how many systems serve a load, with reasons.

    Six inputs: the model; input tokens; output tokens; requests per second at the peak; latency limits; the hardware.
    Every figure comes with its source and its uncertainty.
    """
    flags = {name: value for name, value in options.items() if _is_set(ctx, name)}
    if ctx.invoked_subcommand is not None:
        if answers or report or as_json or flags:
            raise ConfigError(f"answers before `{ctx.invoked_subcommand}`", "its own flags behind it", "move them")
        return
    from millrace.cli.size.run import run  # imported when it runs: --help needs none of it

    run(ctx, answers=answers, report=report, as_json=as_json, **flags)


command.add_command(fit_options.command, "fit")
command.add_command(verify_options.command, "verify")
