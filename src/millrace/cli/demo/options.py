"""`millrace demo`: the whole journey with the bundled model, in about a minute: build, serve, ask, load, report."""

import click

from millrace.cli.options import json_option

EPILOG = """\b
Examples:
  millrace demo
  millrace demo --json > report.json"""


@click.command(epilog=EPILOG)
@json_option
def command(as_json: bool) -> None:
    """Build, serve, ask and measure the bundled model `tiny`.

    It ends with a report. Everything happens in a temporary folder and on 127.0.0.1; nothing is left behind.
    """
    from millrace.cli.demo.run import run  # imported when it runs: --help needs none of it

    run(as_json=as_json)
