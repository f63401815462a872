"""`millrace serve`: MODEL behind the protocols of language models, tensor models behind KServe's, until SIGTERM."""

from typing import Any

import click

from millrace.cli.config_file import config_option
from millrace.cli.options import GroupedCommand, json_option, settings_options
from millrace.cli.serve.flags import ListenFlags, ProfileFlags, QueueFlags, ServeFlags
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.runtime.settings import RunSettings
from millrace.serve.protocols.kserve.restricted_apis import RestrictionFlags

EPILOG = """\b
Examples:
  millrace serve tiny
  millrace serve ./llama-3.2-1b --precision w4a8 --port 9000 --api-key-file keys.txt
  millrace serve --model-repository ./models --grpc-port 8001
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Tell me a story."}], "stream": true}'"""


@config_option
@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("model", required=False)
@settings_options(
    ListenFlags,
    ServeFlags,
    QueueFlags,
    ProfileFlags,
    RepositoryFlags,
    RestrictionFlags,
    OperationFlags,
    BuildSettings,
    RunSettings,
)
@json_option
@click.pass_obj
def command(env: Env, /, model: str | None, as_json: bool, **options: Any) -> None:
    """Serve MODEL to clients of OpenAI, Anthropic and Ollama.

    With --model-repository, a folder of tensor models to clients of KServe (Triton), with or without MODEL. MODEL is
    built first where needed. Ends with SIGTERM or Ctrl-C after the running requests are answered; a second
    signal ends it at once. With --json, one line on stdout says when and where it is ready.
    """
    from millrace.cli.serve.run import run  # what serves takes half a second to import

    run(env, model, as_json, options)
