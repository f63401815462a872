"""`millrace verify`: an answer with a receipt, given once more, and compared token by token."""

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
    """Give an answer with a receipt once more, and compare.

    MODEL is the engine that answered: its folder, or its name where it was served without flags that change the build.
    It is served for a moment and sent REQUEST_FILE, the body that was asked, with the seed of the receipt in
    RESPONSE_FILE. Engine, prompt, every token, and what the response says of them (text, usage, the model's name) must
    be the same, whatever ran beside it then. The exit code is 2, with the reason, where one is not. docs/receipts.md
    says when that can be.
    """
    from millrace.cli.verify.run import run  # imported when it runs: --help needs none of it

    run(model=model, request_file=request_file, response_file=response_file, as_json=as_json)
