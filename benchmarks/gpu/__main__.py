"""Every check and measurement of the GPU's executor, once there is a device: Llama-3.1-8B's shape, random weights.

    python -m benchmarks.gpu --model ../shared/models/stories260K --model ../shared/models/tiny
    python -m benchmarks.gpu --rows 128/128 user-fp8
    python -m benchmarks.gpu --dry-run        all rows on tensors of this CPU, a tiny shape: seconds, and no figures

A row is one result file, written when it is done; rows that this commit has a file of are not run again, and none is
begun that would not be through within --minutes of the process's start: so the same command, again and again, does all
of it, in some 15 minutes together. What tells most comes first, and what a run before has begun in vain comes last.
A row that fails is written with its whole traceback, and the next one runs. What does not agree in the first row is
tried without overlapping kernels, then without graphs, and the rows behind go the way in which most agrees; a precision
that does not agree even so is not measured. A device that has failed ends the process (exit code 1): its context does
not come back; where that was the first row, the next run begins one way further.

Requests are a tenth to a quarter of the table's, as each file says; shares are of what this device was seen to reach in
the same run. A start needs some 20 GB of the disk, for a checkpoint and an engine.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import WAYS, Bench, CompressionMethod, Row
from benchmarks.gpu.checks import device_told
from benchmarks.gpu.failures import FAILURES, traced
from benchmarks.gpu.model import gpu_of
from benchmarks.gpu.rows import ROWS, goals
from benchmarks.record import RESULTS, commit, provenance, write_result
from millrace.engine.cuda.capability_check import check_gpu
from millrace.engine.cuda.device_lookup import first_line
from millrace.engine.cuda.device_roofline import DeviceRates, measured, wait_for
from millrace.errors import MachineError
from millrace.machine.process_info import age_s
from millrace.size.performance.hardware import named_hardware

SHAPE = "llama-3.1-8b"


NOTHING = "nothing is measured of what does not agree"
BEGUN = "gpu-begun.txt"  # in the results' folder: a commit and a row a line


def tried(folder: Path, device: str, of: str) -> tuple[set[str], set[str]]:
    """Rows that a commit has a file of, on a device of that name; and those that it has begun in vain."""
    own = _own(folder, device, of)
    done = {f["row"] for f in own if "refused" not in f}
    return done, ({*_begun(folder, of)} | {f["row"] for f in own}) - done


def _own(folder: Path, device: str, of: str) -> list[dict[str, Any]]:
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-*.json"))]
    return [f for f in files if "row" in f and f["commit"] == of and f["device"]["name"] == device]


def _begun(folder: Path, of: str) -> list[str]:
    lines = (folder / BEGUN).read_text().splitlines() if (folder / BEGUN).exists() else []
    return [row for commit_, _, row in (line.partition(" ") for line in lines) if commit_ == of]


def known_way(folder: Path, device: str, of: str) -> tuple[CompressionMethod, list[str] | None]:
    """How a commit's steps are run on a device, and which precisions agreed; None: that is not known yet.

    As its first row found, or where that was begun in vain, each time without one thing more
    """
    first = {row.name for row in ROWS if row.first}
    for found in reversed(_own(folder, device, of)):
        if found["row"] in first and "refused" not in found:
            return CompressionMethod(**found["way"]), found["agree"]
    return WAYS[min(sum(row in first for row in _begun(folder, of)), len(WAYS) - 1)], None


def rates_of(device: str) -> tuple[DeviceRates, str]:
    """As they are measured; where that fails as the datasheet has them, and why."""
    gpu = gpu_of(device)
    try:
        return measured(gpu, ("bf16", "fp8") if gpu.capability >= (8, 9) else ("bf16",)), ""
    except MachineError:
        why, sheet = traced(), named_hardware(gpu.name).device
        return DeviceRates(sheet.bandwidth, sheet.bandwidth, dict(sheet.peaks)), why


def run(bench: Bench, row: Row, of: str) -> dict[str, Any]:
    told = {
        **provenance("benchmarks.gpu"), "commit": of, "shape": "tiny" if bench.dry_run else SHAPE, "row": row.name,
        "dry_run": bench.dry_run, "device": device_told(bench.device), "rates": asdict(bench.rates),
        "way": asdict(bench.way),
    }  # fmt: skip
    try:
        found = row.run(bench, row)
    except FAILURES as error:  # it lacks something, or fails: the next may go well
        refused = {"refused": first_line(error), "traceback": traced()}
    else:
        refused = {}
    if refused:  # behind the error, which holds what the row had
        with suppress(RuntimeError):  # of a device that has failed
            bench.release()
        return {**told, **refused}
    return {**told, **found, "goals": [] if bench.dry_run else goals(row, found)}


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help=f"only these, of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=9, help="for this call (default: %(default)s)")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="a checkpoint whose answers are checked"
    )
    parser.add_argument("--commit", default=commit(), help="what is run (default: as git says it)")
    parser.add_argument("--out", type=Path, help="where results go (default: benchmarks/results; of a dry run nowhere)")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(arguments)
    if not args.dry_run:
        check_gpu(torch.device("cuda"), ())
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or (Path(temporary) if args.dry_run else RESULTS)
        _rows(args, folder, "cpu" if args.dry_run else "cuda")


def _rows(args: argparse.Namespace, folder: Path, device: str) -> None:
    name = device_told(device)["name"]
    way, agree = known_way(folder, name, args.commit)
    if agree == [] and not args.rows:
        print(NOTHING)
        return
    wanted = _wanted(args, folder, name)
    rates, why = rates_of(device)
    if why:
        print(f"rates are the datasheet's: {why}")
    bench = Bench(device, rates, tuple(args.model), args.dry_run)
    ends_s = 60 * args.minutes + (age_s() if args.dry_run else 0)  # of a dry run in a process that is old already
    left = [row.name for row in wanted]
    with ExitStack() as ways:
        ways.enter_context(bench.going(way))
        for row in wanted:
            if agree is not None and row.precision and row.precision not in agree:
                left.remove(row.name)
                print(f"{row.name}: left out, {row.precision} does not agree")
                continue
            if age_s() + bench.seconds_of(row) > ends_s:
                continue
            result = _run_and_write(bench, row, args.commit, folder)
            left.remove(row.name)
            if "refused" in result and not _works(device):
                sys.exit("the device has failed; start again")
            if row.first and not result.get("ok"):
                print(NOTHING)
                return
            if row.first:
                agree = result["agree"]
                ways.enter_context(bench.going(CompressionMethod(**result["way"])))
    print(f"left: {', '.join(left)}; run it again" if left else "all rows are done")


def _wanted(args: argparse.Namespace, folder: Path, device: str) -> list[Row]:
    """What was begun in vain comes last, but for the first row as long as there is another way for it to go."""
    if args.rows:
        return [row for row in ROWS if row.name in args.rows]
    done, in_vain = tried(folder, device, args.commit)
    begun = _begun(folder, args.commit)
    last = in_vain - {row.name for row in ROWS if row.first and begun.count(row.name) < len(WAYS)}
    return sorted((row for row in ROWS if row.name not in done), key=lambda row: row.name in last)


def _run_and_write(bench: Bench, row: Row, of: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / BEGUN).open("a") as begun:
        begun.write(f"{of} {row.name}\n")
    result = run(bench, row, of)
    path = write_result(f"gpu-{row.name.replace('/', '-')}", result, folder)
    print(f"{age_s():.0f} s:", _told(result), path.name, flush=True)
    if "traceback" in result:
        print(result["traceback"], flush=True)
    return result


def _works(device: str) -> bool:
    """Still: most errors of a device are told again by whatever comes next."""
    try:
        wait_for(torch.device(device))
    except RuntimeError:
        return False
    return True


def _told(result: dict[str, Any]) -> str:
    """In one line."""
    if "refused" in result:
        return f"{result['row']}: {result['refused']}"
    shown = () if result["dry_run"] else ("tokens_per_s", "ttft_ms", "ready_s", "share_of_roofline")
    figures = [f"{k} {result[k]:,.4g}" for k in shown if k in result]
    if "requests" in result:
        figures.append(f"{result['requests']:,} of {result['requests_of_the_table']:,} requests")
    if "ok" in result:
        figures.append("agrees" if result["ok"] else "DOES NOT AGREE")
    wrong = [check for check in result.get("checks", ()) if not check["ok"]]
    figures += [f"{c['what']}: {_where(c)}" for c in wrong]
    if result["way"] != asdict(WAYS[0]):
        figures.append(f"overlap {result['way']['overlap']}, graphs {result['way']['graphs']}")
    dry = " (a dry run: no figures)" if result["dry_run"] else ""
    verdicts = "; ".join(g["verdict"] for g in result["goals"])
    return f"{result['row']}{dry}: {', '.join(figures)} {verdicts}".rstrip()


def _where(check: dict[str, Any]) -> str:
    """The kernels that are furthest from what they should give; what failed, and of which kernel."""
    if "traceback" in check:
        return "; ".join(check["traceback"].strip().splitlines()[-2:])
    furthest = sorted(check.get("by_kernel", {}).items(), key=lambda one: -one[1]["apart"])[:3]
    return "; ".join(f"{name} {seen['apart']:.2g} of {seen['of']}" for name, seen in furthest)


if __name__ == "__main__":
    main()
