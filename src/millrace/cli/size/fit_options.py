"""Options of `millrace size fit`: fits the serving overhead to benchmarks of the user's server."""

from pathlib import Path
from typing import Any

import click

from millrace.cli.options import json_option

EPILOG = """\b
Examples:
  millrace size fit results/c*/ --model llama-3-8b --hardware H100 --precision fp8 -o ours.json
  millrace size --stack ours.json --model llama-3-8b --isl 2000 --osl 200 --rate 70 --ttft-ms 500
  millrace size fit results/c*/ --model llama-3-8b --hardware H100 --precision fp8 --table runs.csv
  millrace size --measured runs.csv --isl 2000 --osl 200 --rate 70 --ttft-ms 500"""


@click.command(epilog=EPILOG)
@click.argument("results", nargs=-1, required=True, type=Path)
@click.option("--model", required=True, help="A preset, or the path of a config.json.")
@click.option("--hardware", required=True, metavar="NAME", help="The device of the benchmarks.")
@click.option(
    "--precision", required=True, metavar="NAME", help="Precision of weights and matmuls: fp16, bf16, fp8, ..."
)
@click.option("--tp", type=click.IntRange(1, 64), default=1, show_default=True, help="Devices of the instance.")
@click.option("-o", "--output", type=Path, metavar="FILE", help="File for the fitted stack, for --stack.")
@click.option(
    "--table", "runs", type=Path, metavar="FILE", help="File for the measurements as a table, for --measured."
)
@click.option("--leave-one-out", is_flag=True, help="Also predict each run by a fit to the others; needs five runs.")
@json_option
def command(
    results: tuple[Path, ...], output: Path | None, runs: Path | None, leave_one_out: bool, as_json: bool, **ran: Any
) -> None:  # fmt: skip
    """Fit the serving overhead to your own benchmarks.

    RESULTS are folders of `millrace bench -o`, or JSON of GenAI-Perf, AIPerf or `vllm bench serve`, each of one
    instance and one load; several concurrencies give the best fit. Results beyond what the device can do are refused.
    Each run is simulated with the fitted stack and compared with the measurement.
    """
    from millrace.cli.size.fit import run  # imported when it runs: --help needs none of it

    run(results=results, output=output, runs=runs, leave_one_out=leave_one_out, as_json=as_json, **ran)
