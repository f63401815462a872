"""Runs `millrace size verify`, whose options are in `verify_options.py`: `--help` imports nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from millrace.bench.run.server_process import ServerProcess
from millrace.cli.bench.progress import run_with_progress
from millrace.cli.console import heading, note, pairs, print_json, table
from millrace.cli.open_model import engine_of
from millrace.cli.options import make_settings
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.report.format_numbers import format_4_digits
from millrace.runtime.scheduling.step_cost_model import write_profile
from millrace.size.fit.verify import MEDIAN, P90, Verified, VerifiedLoad, verify
from millrace.size.question.settings import VerifySettings

MISSED = 3  # exit code for CI, like that of `bench compare`
_UNITS = {"ttft": (1e3, "TTFT, ms"), "itl": (1e3, "ITL, ms"), "e2e": (1e3, "E2E, ms"), "throughput": (1, "requests/s")}


def run(
    env: Env, /, model: str | None, flags: tuple[str, ...], url: str | None, output: Path | None,
    as_json: bool, **options: Any,
) -> int:  # fmt: skip
    """Run `millrace size verify`."""
    settings = make_settings(VerifySettings, options)
    settings.shares  # noqa: B018 (complains before anything is built)
    if (model is None) == (url is None):
        raise ConfigError("MODEL and --url" if model else "neither MODEL nor --url", "one of them", "name what to ask")
    if url is not None and flags:
        raise ConfigError("FLAGS of a server that runs already", "MODEL, which is started with them", "leave them out")
    with _running_server(model, flags, url, env, as_json) as at:
        result = run_with_progress(lambda begins: verify(at, settings, begins=begins), as_json)
    if as_json:
        print_json(verified_to_dict(result))
    else:
        _show(result, settings)
    if output is not None:
        try:
            write_profile(output, result.profile)
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror}", "a file that can be",
                              "name another") from None  # fmt: skip
        note(f"  profile written to {output}")
    if result.holds:
        return 0
    note("Predictions are further off than they should be: leave the machine alone meanwhile, and ask for longer "
         "(--each-s)")  # fmt: skip
    return MISSED


@contextmanager
def _running_server(model: str | None, flags: tuple[str, ...], url: str | None, env: Env, quiet: bool) -> Iterator[str]:
    if url is not None:
        yield url
        return
    assert model is not None, "one of both is named"
    _, engine = engine_of(model, BuildSettings(), env, quiet=quiet)
    folder = engine.folder
    engine.close()
    with ServerProcess(folder, ("--log-level", "warning", *flags)) as server:
        yield server.url


def verified_to_dict(result: Verified) -> dict[str, Any]:
    """Convert a verification to JSON data."""
    return {
        "model": result.profile.model, "isa": result.isa, "capacity_requests_per_s": result.capacity,
        "profile": asdict(result.profile),
        "loads": [
            {"share": load.share, "requests_per_s": load.rate, "requests": load.n, "paces": load.paces,
             "figures": [{**asdict(f), "error": f.error} for f in load.figures]} for load in result.loads
        ],
        "median_error": result.median, "median_errors": result.medians, "p90_error": result.p90,
        "figures_judged": len(result.judged),
        "asked": {"median_error": MEDIAN, "p90_error": P90}, "holds": result.holds,
    }  # fmt: skip


def _show(result: Verified, settings: VerifySettings) -> None:
    p = result.profile
    heading(f"{p.model} ({result.isa}): predicted beside measured, {settings.isl} / {settings.osl} tokens")
    pairs([
        ("capacity", f"{format_4_digits(result.capacity)} requests/s, simulated with every place taken"),
        ("steps", f"{p.n_steps:,} of probes, fitted to {p.error:.1%} (median); {p.machine}"),
        ("beside steps", f"{p.front * 1e3:.2f} ms a request; {p.cost.host * 1e3:.2f} ms between steps, "
                         f"{p.cost.host_sequence * 1e3:.2f} ms a sequence"),
    ])  # fmt: skip
    click.echo()
    rows = [row for load in result.loads for row in _rows(load)]
    table(["load", "requests", "", "", "predicted", "measured", "error"], rows)
    within = "as they should be" if result.holds else "more than they should be"
    click.echo(f"  {len(result.judged)} figures: median error {result.median:.1%} (at most {MEDIAN:.0%}), 90 % within "
               f"{result.p90:.1%} ({P90:.0%}): {within}")  # fmt: skip
    errors = ", ".join(f"{_UNITS[name][1].partition(',')[0]} {error:.1%}" for name, error in result.medians.items())
    click.echo(f"  median errors of each: {errors}")
    click.echo("  Not judged: E2E, and TTFT above 0.8 of capacity, where it is that of a queue.")


def _rows(load: VerifiedLoad) -> list[list[str]]:
    rows = []
    for i, f in enumerate(load.figures):
        times, unit = _UNITS[f.name]
        load_cells = [f"{load.share:g} ({load.rate:.3g}/s)", str(load.n)] if not i else ["", ""]
        mark = "" if f.judged else " -"
        rows.append([*load_cells, unit, f.of, format_4_digits(f.predicted * times), format_4_digits(f.measured * times),
                     f"{f.error:+.1%}{mark}"])  # fmt: skip
    return rows
