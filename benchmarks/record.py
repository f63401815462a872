"""What every result file says about where its numbers come from, where it is written, and what it was to reach."""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from millrace.machine.cpu import cpu_model, huge_pages, memory, usable_cores

RESULTS = Path(__file__).parent / "results"


def provenance(module: str) -> dict[str, Any]:
    """Time, commit, command and machine; no names of hosts, no paths of this machine.

    module: what was started with `python -m`
    """
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.date().isoformat(),
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "command": " ".join([f"python -m {module}", *(_without_folder(a) for a in sys.argv[1:])]),
        "machine": {
            "cpu": cpu_model(), "cpu_number": cpu_number(), "cores": usable_cores(),
            "memory_bytes": memory().total_bytes,
            "transparent_huge_pages": huge_pages(), "kernel": platform.release(),
        },
    }  # fmt: skip


def cpu_number() -> str:
    """Family and model, as "25.17": hosts give processors of several generations one name. "": the kernel tells none"""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    told: dict[str, str] = {}  # of the first processor
    for line in lines:
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    return f"{told['cpu family']}.{told['model']}" if {"cpu family", "model"} <= told.keys() else ""


def _without_folder(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def commit() -> str:
    """The short id of what is checked out, with a + where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, cwd=RESULTS.parent
    )
    return done.stdout.strip() or "unknown"


def write_result(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """FOLDER/NAME-TIME-COMMIT.json, of the result's own provenance: no run ever replaces another."""
    folder.mkdir(parents=True, exist_ok=True)
    time = result["time"].replace("-", "").replace(":", "")
    path = folder / f"{name}-{time}-{result['commit']}.json"
    with path.open("x") as file:
        file.write(json.dumps(result, indent=1) + "\n")
    return path


def judged(what: str, reached: float, goal: float, milestone: float, *, at_most: bool = False) -> dict[str, Any]:
    """One goal as it goes into a result file, with the verdict of the day. at_most: less is better"""

    def within(bound: float) -> bool:
        return reached <= bound if at_most else reached >= bound

    verdict = "goal met" if within(goal) else "milestone met, goal missed" if within(milestone) else "missed"
    return {
        "what": what, "milestone": milestone, "goal": goal, "at_most": at_most, "reached": round(reached, 3),
        "verdict": verdict,
    }  # fmt: skip


def judged_surely(what: str, interval: tuple[float, float, float], bound: float) -> dict[str, Any]:
    """As `judged`, of a figure that is at most so large, and of which a sample says (value, low, high): "met" and
    "missed" where the whole interval says so."""
    value, low, high = interval
    return {
        "what": what, "milestone": bound, "goal": bound, "at_most": True, "reached": float(f"{value:.4g}"),
        "interval": [float(f"{low:.4g}"), float(f"{high:.4g}")],
        "verdict": "met" if high <= bound else "missed" if low > bound else "not decided",
    }  # fmt: skip


def count(text: str) -> int:
    """As argparse takes a type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return int(text)


def shape_command(
    name: str, doc: str | None, run: Callable[[str, str, int, Path], dict[str, Any]],
    summary: Callable[[dict[str, Any]], str],
) -> None:  # fmt: skip
    """The command line of a benchmark of one shape: run(shape, precision, rounds, empty folder) -> the result."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES], default="llama-143m", help="default: %(default)s")
    parser.add_argument("--precision", default="w4a8", help="default: %(default)s")
    parser.add_argument("--rounds", type=count, default=5, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the result instead of a summary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(args.shape, args.precision, args.rounds, Path(temporary))
    path = write_result(f"{name}-{args.shape}", result)
    print(json.dumps(result) if args.json else f"{summary(result)}\n{path}")
