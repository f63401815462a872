"""Runs `millrace bench infer`, whose options are in `infer_options.py`: `--help` imports nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from millrace.bench.infer.latency_curves import Line, earlier
from millrace.bench.infer.measure import infer, infer_plan
from millrace.bench.infer.results import PICTURE, answered, report, write_results
from millrace.bench.infer.settings import LevelSettings, ModelSettings
from millrace.cli.bench.foreign_flags import check_pictures, ready_folder, told_and_written
from millrace.cli.bench.progress import driven
from millrace.cli.console import heading, print_json, table
from millrace.cli.options import made
from millrace.errors import ConfigError, MachineError

_MOST_BESIDE = 16
NAMES = ("report.html", "summary.json", PICTURE)  # of files that may be in the way


def run(
    url: str | None,
    url_given: str | None,
    certify_s: float,
    output: Path | None,
    beside: tuple[Path, ...],
    as_png: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run `millrace bench infer`."""
    targets = [target for target in (url, url_given) if target]
    if len(targets) != 1:
        raise ConfigError("there is no one URL", "millrace bench infer http://HOST:PORT", "give it, once")
    check_pictures(output, as_png)
    others = _others(beside, output)
    plan = infer_plan(targets[0], made(ModelSettings, given), made(LevelSettings, given))
    ready_folder(output, NAMES)
    done = driven(lambda begins: infer(plan, certify_s, begins), quiet=as_json)
    told = report(done)
    told_and_written(
        lambda: print_json(told) if as_json else _show(told),
        output,
        lambda folder: write_results(folder, done, as_png, others),
    )
    if not answered(done.points):
        kinds = {kind for p in done.points for kind in p.metrics.failures}
        raise MachineError(
            f"no request was answered ({', '.join(sorted(kinds)) or done.ended})", "one whole answer at least",
            "the server's log says more",
        )  # fmt: skip


def _others(beside: Sequence[Path], output: Path | None) -> list[Line]:
    """Read before anything is measured. raises ConfigError"""
    if beside and output is None:
        raise ConfigError("--beside without -o", "a folder for the page that they are drawn on", "give -o FOLDER")
    if len(beside) > _MOST_BESIDE:
        raise ConfigError(f"--beside {len(beside)} times", f"at most {_MOST_BESIDE}", "leave some out")
    return [line for path in beside for line in earlier(path)]


def _show(told: dict[str, Any]) -> None:
    model, points = told["model"], told["points"]
    click.echo()
    heading(f"{model['name']}: instances: {model['instances'] or 'the server does not say'}")
    load = "concurrency" if points and points[0]["concurrency"] else "requests/s"
    table(["batch", load, "inferences/s", "p50, ms", "p90", "p99", "server: queue, ms", "computing", "failed"],
          [_row(p) for p in points])  # fmt: skip
    click.echo()
    for said in (told["verdict"], *told["notes"]):
        click.echo(f"  {said}")


def _row(p: dict[str, Any]) -> list[str]:
    rate, server = p["inferences_per_s"], p["server"]
    latency = p["latency_ms"]
    times = ["-"] * 3 if latency is None else [f"{latency[name]:,.2f}" for name in ("p50", "p90", "p99")]
    stages = ["-"] * 2
    if server is not None:
        computing = sum(ms for name, ms in server["stages_ms"].items() if name != "queue")
        stages = [f"{server['stages_ms']['queue']:,.2f}", f"{computing:,.2f}"]
    load = p["concurrency"] or f"{p['request_rate']:g}"
    return [str(p["batch_size"]), str(load), f"{rate['value']:,.1f}", *times, *stages, str(p["requests"]["failed"])]
