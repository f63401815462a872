"""Options of `millrace doctor`: examines this machine, or reports which implementation runs a model."""

import click

from millrace.cli.options import json_option
from millrace.env import Env
from millrace.machine.isa_flags import NEEDED

EPILOG = """\b
Examples:
  millrace doctor
  millrace doctor --isa avx2 --json
  millrace doctor Qwen/Qwen3-0.6B      whether a model runs natively, and what it lacks for that
  millrace doctor --device cuda        rates and precisions of the GPU here
  millrace doctor --device L40S        precisions of a GPU"""


@click.command(epilog=EPILOG)
@click.argument("model", required=False)
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Number of threads to measure with.")
@click.option("--isa", metavar="|".join((*NEEDED, "scalar")), help="Measure with this instruction set.")
@click.option("--device", metavar="NAME", help="Examine a GPU instead: cuda, cuda:1, or a known name such "
              "as H100. Shows its precisions and, if it is present, its measured rates.")  # fmt: skip
@json_option
@click.pass_obj
def command(
    env: Env, model: str | None, threads: int | None, isa: str | None, device: str | None, as_json: bool
) -> None:
    """Examine this machine, or show what runs a model.

    Shows processor, caches, memory and huge pages, then measures for a few seconds. The measured rates are the roofline
    that every benchmark is compared with. They are saved, and /metrics of a server then shows the least time of a step
    next to the measured one. Run it on an idle machine.

    With MODEL nothing is measured and no weight is read: it reports whether the model runs natively, what it lacks for
    that, and whether it runs through transformers.
    """
    from millrace.cli.doctor.run import run  # imported when it runs: --help needs none of it

    run(env=env, model=model, threads=threads, isa=isa, device=device, as_json=as_json)
