"""`millrace size fit`: benchmarks of one's own beside what is computed for them, and the factor between them."""

from dataclasses import asdict
from pathlib import Path

import click

from millrace.cli.options import json_option
from millrace.cli.screen import heading, note, pairs, print_json, table
from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size.models import find_model
from millrace.size.plan import instance_of
from millrace.size.points import Point
from millrace.size.results import Compared, Fitted, compared, fitted, read_result, write_table
from millrace.size.told import told_point

_MOST_RESULTS = 1000
EPILOG = """\b
Examples:
  millrace size fit results/c*/ --model llama-3-8b --hardware H100 --precision fp8 -o runs.csv
  millrace size --measured runs.csv --isl 2000 --osl 200 --rate 70 --ttft-ms 500"""


@click.command(epilog=EPILOG)
@click.argument("results", nargs=-1, required=True, type=Path)
@click.option("--model", required=True, help="A preset, or the path of a config.json.")
@click.option("--hardware", required=True, metavar="NAME", help="The device that it ran on.")
@click.option("--precision", required=True, metavar="NAME", help="Of weights and products: fp16, bf16, fp8, ...")
@click.option("--tp", type=click.IntRange(1, 64), default=1, show_default=True, help="Devices of the instance.")
@click.option("-o", "--output", type=Path, metavar="FILE", help="Write them there as a table for --measured.")
@json_option
def command(
    results: tuple[Path, ...], model: str, hardware: str, precision: str, tp: int, output: Path | None, as_json: bool
) -> None:  # fmt: skip
    """Hold benchmarks of your own against what is computed.

    RESULTS are folders of `millrace bench -o`, or JSON of GenAI-Perf, AIPerf or `vllm bench serve`: one instance, one
    load each. What no such device can do is refused. The factor goes to `millrace size --factor`.
    """
    if len(results) > _MOST_RESULTS:
        raise ConfigError(f"{len(results)} results", f"at most {_MOST_RESULTS}", "give fewer")
    device = find_device(hardware)
    device.peak(precision)
    instance = instance_of(find_model(model), device, precision, tp)
    rows = [compared(str(path), read_result(path, instance), instance) for path in results]
    found = fitted(rows, instance)
    if output is not None:
        _write(output, [row.measured for row in rows])
    if as_json:
        each = [{"name": r.name, "measured": told_point(r.measured), "computed": told_point(r.computed)} for r in rows]
        print_json({"results": each, **asdict(found)})
    else:
        _show(rows, found)
    if output is not None:
        note(f"  {len(rows)} rows written to {output}")


def _write(file: Path, points: list[Point]) -> None:
    try:
        write_table(file, points)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", "a file that can be", "name another") from None


def _show(rows: list[Compared], found: Fitted) -> None:
    heading(f"{len(rows)} results beside what is computed ({found.provenance})")
    table(
        ["result", "in/out", "in flight", "requests/s", "computed", "TTFT, ms", "computed", "ITL, ms", "computed"],
        [
            [r.name, f"{r.measured.input_tokens:g}/{r.measured.output_tokens:g}", f"{r.measured.concurrency:.1f}",
             f"{r.measured.rate:.4g}", f"{r.computed.rate:.4g}", *_ms(r.measured.mean.ttft_s, r.computed.mean.ttft_s),
             *_ms(r.measured.mean.itl_s, r.computed.mean.itl_s)] for r in rows
        ],
    )  # fmt: skip
    pairs([
        ("factor", f"{found.factor:.3f}: millrace size --factor {found.factor:.3f}"),
        ("error", f"{found.before:.0%} of requests/s on average as it is, {found.after:.0%} with the factor"),
    ])  # fmt: skip


def _ms(measured: float, computed: float) -> tuple[str, str]:
    return f"{measured * 1e3:,.1f}", f"{computed * 1e3:,.1f}"
