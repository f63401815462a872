"""Options of `millrace build`: compiles a checkpoint into an engine folder, and shows what it needs."""

from pathlib import Path
from typing import Any

import click

from millrace.cli.options import GroupedCommand, json_option, settings_options
from millrace.compile.settings import BuildSettings
from millrace.engine.cuda.device_lookup import CPU
from millrace.tune.settings import TrafficSettings

EPILOG = """\b
Examples:
  millrace build tiny -o tiny.engine --precision w8a8
  millrace build ./llama-3.2-1b -o llama.engine --precision-map map.json --max-context 4096
  millrace build ./llama-3.2-1b-Q4_0.gguf -o llama.engine
  millrace build tiny -o tiny.engine --traffic traffic.jsonl     for requests as `serve --record` saw them

\b
A map of precisions is JSON: the first pattern that matches a module's name decides, "default" the rest.
w8a8:32 has its activations in groups of 32, which divide those of the weights.
  {"default": "w4a8", "lm_head": "bf16", "layers.0.*": "w8a8:32"}"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("model")
@click.option("-o", "--output", type=Path, required=True, metavar="ENGINE", help="The folder to write; must not exist.")
@click.option("--precision-map", type=Path, metavar="FILE", help="Precisions per layer pattern, as JSON; see below.")
@click.option("--device", default=CPU, metavar="NAME", help="cpu, or the GPU that will run it, cuda or "
              "a name such as H100: it must have the precision, and may have its own: tf32, fp16, fp8.")  # fmt: skip
@settings_options(TrafficSettings, BuildSettings)
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, model: str, output: Path, precision_map: Path | None, device: str, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Compile a checkpoint into an engine folder for this machine.

    MODEL is a checkpoint folder, a GGUF file, a hub id or `tiny`. The engine contains all that serving needs.
    Integers of a GGUF are used as stored; requantised matrices are reported.
    """
    from millrace.cli.build.run import run  # imported when it runs: --help needs none of it

    run(ctx, model=model, output=output, precision_map=precision_map, device=device, as_json=as_json, **options)
