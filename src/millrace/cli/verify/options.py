"""Options of `millrace verify`: reproduces an answer from its receipt and compares it token by token."""

from pathlib import Path

import click

from millrace.cli.options import json_option

EPILOG = """\b
Example:
  curl -s localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d @request.json > response.json      # with "receipt": true in request.json
  millrace verify tiny request.json response.json"""


@click.command(epilog=EPILOG)
@click.argument("model")
@click.argument("request_file", type=click.Path(path_type=Path))
@click.argument("response_file", type=click.Path(path_type=Path))
@json_option
def command(model: str, request_file: Path, response_file: Path, as_json: bool) -> None:
    """Reproduce an answer from its receipt, and compare.

    MODEL is the engine that answered: its folder, or its name if it was served without flags that change the build.
    It is served briefly and sent REQUEST_FILE, the body of the request, with the seed from the receipt in
    RESPONSE_FILE. Engine, prompt, all tokens and the rest of the response (text, usage, model name) must be equal,
    whatever else the server computed then. If not, the exit code is 2, with the reason. docs/receipts.md lists possible
    causes.
    """
    from millrace.cli.verify.run import run  # imported when it runs: --help needs none of it

    run(model=model, request_file=request_file, response_file=response_file, as_json=as_json)
