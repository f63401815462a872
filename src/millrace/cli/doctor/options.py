"""`millrace doctor`: this machine, its measured limits and what holds it back; or which implementation runs a model."""

import click

from millrace.cli.options import json_option
from millrace.env import Env
from millrace.machine.isa_flags import NEEDED

EPILOG = """\b
Examples:
  millrace doctor
  millrace doctor --isa avx2 --json
  millrace doctor Qwen/Qwen3-0.6B      whether a model runs natively, and what it lacks for that
  millrace doctor --device cuda        what the GPU here reaches, and which precisions it has
  millrace doctor --device L40S        which precisions a GPU has"""


@click.command(epilog=EPILOG)
@click.argument("model", required=False)
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Measure with so many threads.")
@click.option("--isa", metavar="|".join((*NEEDED, "scalar")), help="Measure with this instruction set.")
@click.option("--device", metavar="NAME", help="Instead of this machine a GPU: cuda, cuda:1, or one that `millrace "
              "size` knows, such as H100. Says which precisions it has, and of one that is here what it "
              "reaches.")  # fmt: skip
@json_option
@click.pass_obj
def command(
    env: Env, model: str | None, threads: int | None, isa: str | None, device: str | None, as_json: bool
) -> None:
    """Examine this machine, or say what runs a model.

    Processor, caches, memory and huge pages; then a few seconds of measurements. The measured rates are the
    roofline that every benchmark is compared with; they are kept, and a server's /metrics then has the least time of a
    step beside what it takes. Run it on an idle machine.

    With MODEL nothing is measured, and no weight is read: it says whether the model runs natively, what it lacks for
    that, and whether it runs through transformers.
    """
    from millrace.cli.doctor.run import run  # imported when it runs: --help needs none of it

    run(env=env, model=model, threads=threads, isa=isa, device=device, as_json=as_json)
