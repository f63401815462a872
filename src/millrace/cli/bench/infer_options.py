"""Options of `millrace bench infer`: tensor models over KServe's protocol, by batch size and load."""

from pathlib import Path
from typing import Any

import click

from millrace.bench.infer.settings import ALIASES, LevelSettings, ModelSettings
from millrace.cli.bench.foreign_flags import ForeignFlags, certify_option, png_option
from millrace.cli.options import json_option, settings_options

EPILOG = """\b
Examples:
  millrace bench infer http://127.0.0.1:8000 --model resnet50 -b 1,8,32 --concurrency 1,2,4,8 -o results/
  millrace bench infer 127.0.0.1:8001 --protocol grpc --model bert --shape input_ids:128 --shape mask:128
  millrace bench infer URL --model M --input-data inputs.json --request-rate 50:200:50 --json"""


class Infer(ForeignFlags):
    """A command that accepts perf_analyzer's flags."""

    aliases = ALIASES


@click.command(cls=Infer, epilog=EPILOG)
@click.argument("url", required=False)
@click.option("--url", "url_given", hidden=True, help="The URL, as perf_analyzer takes it.")
@settings_options(ModelSettings, LevelSettings)
@certify_option
@click.option("-o", "--output", type=Path, metavar="FOLDER", help="Folder for results: an HTML page, JSON, CSV.")
@click.option(
    "--beside",
    "earlier",
    type=Path,
    metavar="FOLDER",
    multiple=True,
    help="Earlier result to draw for comparison, e.g. with another number of instances. May be given several times.",
)
@png_option
@json_option
def command(
    url: str | None,
    url_given: str | None,
    certify_s: float,
    output: Path | None,
    earlier: tuple[Path, ...],
    as_png: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure inferences a second against latency.

    URL is any server of KServe's protocol (Triton, KServe, MLServer, OpenVINO): http://HOST:PORT, or HOST:PORT with
    --protocol grpc. Every batch size is measured at every load. Equivalent flags of perf_analyzer are accepted. Ctrl-C
    ends the measurement and reports the completed levels.
    """
    from millrace.cli.bench.infer import run  # imported when it runs: --help needs none of it

    run(
        url=url,
        url_given=url_given,
        certify_s=certify_s,
        output=output,
        earlier=earlier,
        as_png=as_png,
        as_json=as_json,
        **options,
    )
