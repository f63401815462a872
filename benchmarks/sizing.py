"""Sizing's cost model beside published runs: as it is fitted, and of each part by a fit to the others.

    python -m benchmarks.sizing ../shared/data/sizing
    python -m benchmarks.sizing ../shared/data/sizing --left-out

Engines in static batches: mean errors of prompts and of decode steps, of each device and precision, fitted to all
models and without each in turn; of the product's own constants, which know neither Mistral 7B nor GH200, all runs and
these. A server: median errors of requests/s, TTFT and ITL by simulation with the product's stacks; --left-out: and of
each model, length and TP by a fit to the others (some minutes). Writes results/sizing-TIME-COMMIT.json.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import engine_steps, served_runs
from benchmarks.record import judged, provenance, write_result
from millrace.machine.devices import Link, find_device
from millrace.size.fit.device import MeasuredBatch, fit, residuals
from millrace.size.fit.overhead import LeaveOneOutResult, MeasuredRun, leave_one_out, replay
from millrace.size.fit.overhead import summarize_errors as errors_of
from millrace.size.performance.fitted_devices import profile

FITTED, LEFT_OUT, PREFILL_BY_PCIE, SERVED, TTFT = 0.10, 0.13, 0.19, 0.14, 0.20  # what is asked, at most
HELD_MODEL, HELD_DEVICE = "mistral-7b", "GH200 96GB"
PARTS: Mapping[str, Callable[[MeasuredRun], str]] = {
    "model": lambda run: run.instance.model.name,
    "lengths": lambda run: f"{run.lengths.n_input}/{run.lengths.n_output}",
    "tp": lambda run: f"TP{run.instance.tp}",
}


def of_engines(steps: Sequence[MeasuredBatch]) -> dict[str, Any]:
    """Of one device and precision: mean relative errors of prompts and of decode steps."""
    device, precision = steps[0].instance.device, steps[0].instance.precision
    ours = profile(device, precision).constants
    models = sorted({step.instance.model.name for step in steps})

    def of(name: str, others: bool = False) -> list[MeasuredBatch]:
        return [step for step in steps if (step.instance.model.name == name) != others]

    return {
        "device": device.name, "precision": precision, "by_switch": device.link == Link.SWITCH, "n": len(steps),
        "fitted": _mean(residuals(fit(steps), steps)), "shipped": _mean(residuals(ours, steps)),
        "held_model": _mean(residuals(ours, of(HELD_MODEL))),
        "left_out": {name: _mean(residuals(fit(of(name, others=True)), of(name))) for name in models},
    }  # fmt: skip


def _mean(found: tuple[Any, Any]) -> list[float]:
    return [found[0].mape, found[1].mape]


def of_server(runs: Sequence[MeasuredRun], left_out: bool) -> list[dict[str, Any]]:
    by_profile: dict[tuple[str, str], list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        by_profile[run.instance.device.name, run.instance.precision].append(run)
    found, every = [], []
    for (device, precision), some in by_profile.items():
        stack = profile(find_device(device), precision).stack
        replayed = [replay(run, stack) for run in some]
        every += replayed
        found.append(_told(f"{device} {precision}", errors_of("by the product's stack", replayed)))
        for part, group in PARTS.items() if left_out else ():
            found += [_told(f"{device} {precision}, {part}", held) for held in leave_one_out(some[::2], stack, group)]
    return [_told("all", errors_of("by the product's stacks", every)), *found]


def _told(of: str, held: LeaveOneOutResult) -> dict[str, Any]:
    return {"of": of, **asdict(held)}


def goals(engines: Sequence[dict[str, Any]], served: dict[str, Any]) -> list[dict[str, Any]]:
    switched = [one for one in engines if one["by_switch"]]
    left_out = np.max([errors for one in switched for errors in one["left_out"].values()], axis=0)
    by_pcie = max(one["fitted"][0] for one in engines if not one["by_switch"])
    asked = [
        ("engines by switch, fitted: mean error of the worst device", max(max(one["fitted"]) for one in switched),
         FITTED),
        ("engines by switch, the worst model left out: mean error of prompts", left_out[0], LEFT_OUT),
        ("engines by switch, the worst model left out: mean error of decode steps", left_out[1], LEFT_OUT),
        ("engines by PCIe and bridges, fitted: mean error of prompts of the worst device", by_pcie, PREFILL_BY_PCIE),
        ("server: median error of requests/s", served["rate"]["median"], SERVED),
        ("server, simulated: median error of TTFT", served["ttft"]["median"], TTFT),
    ]  # fmt: skip
    return [judged(what, float(reached), goal, goal, at_most=True) for what, reached, goal in asked]


def run(folder: Path, left_out: bool) -> dict[str, Any]:
    engines = [of_engines(steps) for steps in engine_steps(folder).values()]
    server = of_server(served_runs(folder), left_out)
    return {
        **provenance("benchmarks.sizing"), "model": "published runs", "engines": engines, "server": server,
        "goals": goals(engines, server[0]),
    }  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    lines = ["engines, mean errors of prompts and decode steps: fitted; by the product; of it, Mistral 7B; left out"]
    for one in result["engines"]:
        held = " (not fitted to)" if one["device"] == HELD_DEVICE else ""
        out = "; ".join(f"{name} {_both(errors)}" for name, errors in one["left_out"].items())
        lines.append(f"  {one['device']} {one['precision']}: {_both(one['fitted'])}; {_both(one['shipped'])}{held}; "
                     f"{_both(one['held_model'])}; {out}")  # fmt: skip
    lines.append("server, median errors of requests/s, TTFT and ITL; mean of requests/s")
    for one in result["server"]:
        medians = ", ".join(f"{one[name]['median']:.1%}" for name in ("rate", "ttft", "itl"))
        lines.append(f"  {one['of']}, {one['what']}: {medians}; {one['rate']['mape']:.1%} ({one['rate']['n']} runs)")
    lines += [f"  {g['what']}: {g['reached']:.1%}, at most {g['goal']:.0%}: {g['verdict']}" for g in result["goals"]]
    return "\n".join(lines)


def _both(errors: Sequence[float]) -> str:
    return " and ".join(f"{error:.1%}" for error in errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sizing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, help="the folder of the published tables")
    parser.add_argument(
        "--left-out", action="store_true", help="parts of the server's runs, too, by fits to the others"
    )
    args = parser.parse_args()
    result = run(args.tables, args.left_out)
    path = write_result("sizing", result)
    print(f"{summary(result)}\n{path.name}")


if __name__ == "__main__":
    main()
