"""Runs `millrace size fit`, whose options are in `fit_options.py`: `--help` imports nothing else."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from millrace.cli.console import heading, note, pairs, print_json, table
from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.report.format_numbers import format_4_digits, pluralize
from millrace.size.answer.sizing import instance_of
from millrace.size.fit.device import Residual
from millrace.size.fit.overhead import LeaveOneOutResult, MeasuredRun
from millrace.size.fit.overhead import leave_one_out as left_out
from millrace.size.fit.overhead_file import FittedStack, write_stack
from millrace.size.fit.user_runs import Refit, UserRun, read_results, refit
from millrace.size.performance.measured_points import write_points
from millrace.size.performance.models import find_model
from millrace.size.performance.operating_point import FigureSource, OperatingPoint, Waits
from millrace.size.performance.roofline_cost import ModelInstance

_MAX_LEFT_OUT = 64


def run(
    results: tuple[Path, ...], output: Path | None, runs: Path | None, leave_one_out: bool, as_json: bool, **ran: Any
) -> None:  # fmt: skip
    """Run `millrace size fit`."""
    device, precision = find_device(ran["hardware"]), str(ran["precision"])
    device.peak(precision)
    instance = instance_of(find_model(ran["model"]), device, precision, ran["tp"])
    read = read_results(results)
    result = refit(read, instance)
    left_out_results = _leave_one_out(result) if leave_one_out else []
    own = FittedStack(device.name, precision, result.stack, result.after.rate.mape)
    if as_json:
        print_json({
            "stack": asdict(own), "before": asdict(result.before), "after": asdict(result.after),
            "left_out": [asdict(one) for one in left_out_results],
            "results": [_row(one, number, result) for number, one in enumerate(read)],
        })  # fmt: skip
    else:
        _show(read, result)
        if left_out_results:
            _show_left_out(left_out_results)
    _write(output, lambda file: write_stack(file, own))
    _write(runs, lambda file: write_points(file, [_point(one, instance) for one in read]))


def _leave_one_out(result: Refit) -> list[LeaveOneOutResult]:
    """Predict each run by a fit to the others. raises ConfigError if there are too few or too many runs"""
    runs = [replayed.run for replayed in result.runs]
    names = {_label(run) for run in runs}
    if not 5 <= len(names) <= _MAX_LEFT_OUT:
        raise ConfigError(f"--leave-one-out of {len(names)} runs that differ", f"5 to {_MAX_LEFT_OUT}",
                          "measure more, or name fewer")  # fmt: skip
    return left_out(runs, result.stack, _label)


def _label(run: MeasuredRun) -> str:
    return f"{run.lengths.n_input}/{run.lengths.n_output}, {run.concurrency} in flight"


def _show_left_out(results: list[LeaveOneOutResult]) -> None:
    heading("Each by a fit to all others")
    table(["left out", "requests/s", "TTFT", "ITL"],
          [[fold.what, *(f"{e.bias:+.1%}" for e in (fold.rate, fold.ttft, fold.itl))] for fold in results])  # fmt: skip
    worst = max(results, key=lambda fold: fold.rate.mape)
    click.echo(f"  worst error of requests/s {worst.rate.mape:.1%}: {worst.what}")


def _write(file: Path | None, write: Callable[[Path], None]) -> None:
    if file is None:
        return
    try:
        write(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", "a file that can be", "name another") from None
    note(f"  written to {file}")


def _row(user_run: UserRun, number: int, result: Refit) -> dict[str, float | str]:
    computed = result.runs[number].point
    return {
        "source": user_run.source,
        "requests_per_s": user_run.rate,
        "computed_requests_per_s": computed.rate,
        "ttft_ms": user_run.ttft_s * 1e3,
        "computed_ttft_ms": computed.mean.ttft_s * 1e3,
        "itl_ms": user_run.itl_s * 1e3,
        "computed_itl_ms": computed.mean.itl_s * 1e3,
    }


def _show(read: list[UserRun], result: Refit) -> None:
    heading(f"{pluralize(len(read), 'result')} beside a simulation, with {result.stack.name}")
    rows = []
    for one, replayed in zip(read, result.runs, strict=True):
        p = replayed.point
        rows.append([
            one.source, f"{one.n_input:.0f}/{one.n_output:.0f}", f"{one.concurrency:.1f}", format_4_digits(one.rate),
            format_4_digits(p.rate), *_ms(one.ttft_s, p.mean.ttft_s), *_ms(one.itl_s, p.mean.itl_s),
        ])  # fmt: skip
    table(["", "in/out", "in flight", "requests/s", "computed", "TTFT, ms", "computed", "ITL, ms", "computed"], rows)
    s = result.stack
    pairs([
        ("factors", f"prompts {s.prefill:.3f}, decode steps {s.decode:.3f}, keys and values {s.cache:.3f}, host "
                    f"{s.host_s * 1e6:.1f} us a sequence and step"),
        ("before", _errors(result.before.rate, result.before.ttft, result.before.itl)),
        ("after", _errors(result.after.rate, result.after.ttft, result.after.itl)),
    ])  # fmt: skip


def _errors(rate: Residual, ttft: Residual, itl: Residual) -> str:
    return f"mean errors of requests/s {rate.mape:.1%}, TTFT {ttft.mape:.1%}, ITL {itl.mape:.1%}"


def _ms(measured: float, computed: float) -> tuple[str, str]:
    return f"{measured * 1e3:,.1f}", f"{computed * 1e3:,.1f}"


def _point(user_run: UserRun, instance: ModelInstance) -> OperatingPoint:
    p95 = None if user_run.p95 is None else Waits(*user_run.p95)
    return OperatingPoint(
        model=instance.model.name,
        device=instance.device.name,
        precision=instance.precision,
        tp=instance.tp,
        input_tokens=round(user_run.n_input),
        output_tokens=round(user_run.n_output),
        concurrency=user_run.concurrency,
        rate=user_run.rate,
        mean=Waits(user_run.ttft_s, user_run.itl_s, user_run.e2e_s),
        p95=p95,
        source=FigureSource.MEASURED,
    )
