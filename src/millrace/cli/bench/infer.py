"""Runs `millrace bench infer`, whose options are in `infer_options.py`: `--help` imports nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from millrace.bench.infer.latency_curves import LatencyCurve, read_curves
from millrace.bench.infer.measure import infer, infer_plan
from millrace.bench.infer.results import PICTURE, report, with_answers, write_results
from millrace.bench.infer.settings import LevelSettings, ModelSettings
from millrace.cli.bench.foreign_flags import check_pictures, ready_folder, show_and_write
from millrace.cli.bench.progress import run_with_progress
from millrace.cli.console import heading, print_json, table
from millrace.cli.options import make_settings
from millrace.errors import ConfigError, MachineError

_MAX_COMPARED = 16
NAMES = ("report.html", "summary.json", PICTURE)  # files that would be overwritten


def run(
    url: str | None,
    url_given: str | None,
    certify_s: float,
    output: Path | None,
    earlier: tuple[Path, ...],
    as_png: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `millrace bench infer`."""
    targets = [target for target in (url, url_given) if target]
    if len(targets) != 1:
        raise ConfigError("there is no one URL", "millrace bench infer http://HOST:PORT", "give it, once")
    check_pictures(output, as_png)
    earlier_curves = _read_earlier(earlier, output)
    plan = infer_plan(targets[0], make_settings(ModelSettings, options), make_settings(LevelSettings, options))
    ready_folder(output, NAMES)
    done = run_with_progress(lambda begins: infer(plan, certify_s, begins), quiet=as_json)
    document = report(done)
    show_and_write(
        lambda: print_json(document) if as_json else _show(document),
        output,
        lambda folder: write_results(folder, done, as_png, earlier_curves),
    )
    if not with_answers(done.points):
        kinds = {kind for p in done.points for kind in p.metrics.failures}
        raise MachineError(
            f"no request was answered ({', '.join(sorted(kinds)) or done.ended})", "one whole answer at least",
            "the server's log says more",
        )  # fmt: skip


def _read_earlier(paths: Sequence[Path], output: Path | None) -> list[LatencyCurve]:
    """Read earlier results before measuring. raises ConfigError"""
    if paths and output is None:
        raise ConfigError("--beside without -o", "a folder for the page that they are drawn on", "give -o FOLDER")
    if len(paths) > _MAX_COMPARED:
        raise ConfigError(f"--beside {len(paths)} times", f"at most {_MAX_COMPARED}", "leave some out")
    return [line for path in paths for line in read_curves(path)]


def _show(document: dict[str, Any]) -> None:
    model, points = document["model"], document["points"]
    click.echo()
    heading(f"{model['name']}: instances: {model['instances'] or 'the server does not say'}")
    load = "concurrency" if points and points[0]["concurrency"] else "requests/s"
    table(["batch", load, "inferences/s", "p50, ms", "p90", "p99", "server: queue, ms", "computing", "failed"],
          [_row(p) for p in points])  # fmt: skip
    click.echo()
    for sentence in (document["verdict"], *document["notes"]):
        click.echo(f"  {sentence}")


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
