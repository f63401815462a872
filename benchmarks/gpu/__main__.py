"""Every check and measurement of the GPU's executor, once there is a device: Llama-3.1-8B's shape, random weights.

    python -m benchmarks.gpu --model ../shared/models/stories260K --model ../shared/models/tiny
    python -m benchmarks.gpu --rows 128/128 user-fp8
    python -m benchmarks.gpu --dry-run        all rows on tensors of this CPU, a tiny shape: seconds, and no figures

A row is one result file, written when it is done; rows that this commit has a file of are not run again, and none is
begun that would not be through within --minutes: so the same command, again and again, does all of it, in some 25
minutes together. Requests are a tenth to a quarter of the table's, as each file says. Shares are of what this device
was seen to reach in the same run. A start needs some 11 GB of the disk for a checkpoint.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import device_told
from benchmarks.gpu.roofline import measured
from benchmarks.gpu.rows import ROWS, Bench, Row, goals
from benchmarks.record import RESULTS, commit, count, provenance, write_result
from millrace.engine.cuda.gpu import check_gpu
from millrace.errors import MillraceError

SHAPE = "llama-3.1-8b"


def done(folder: Path, device: str) -> set[str]:
    """Rows that this commit has a file of, on a device of that name."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-*.json"))]
    own = [f for f in files if "row" in f and f["commit"] == commit() and f["device"]["name"] == device]
    return {f["row"] for f in own if "refused" not in f}


def run(bench: Bench, row: Row) -> dict[str, Any]:
    told = {
        **provenance("benchmarks.gpu"), "shape": "tiny" if bench.dry_run else SHAPE, "row": row.name,
        "dry_run": bench.dry_run, "device": device_told(bench.device), "rates": bench.rates.told(),
    }  # fmt: skip
    try:
        found = row.run(bench, row)
    except (MillraceError, RuntimeError) as error:  # the device lacks it, or fails: the next row may go well
        return {**told, "refused": str(error).splitlines()[0]}
    return {**told, **found, "goals": [] if bench.dry_run else goals(row, found)}


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help=f"only these, of {', '.join(names)}")
    parser.add_argument("--minutes", type=count, default=9, help="for this call (default: %(default)s)")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="a checkpoint whose answers are checked"
    )
    parser.add_argument("--out", type=Path, help="where results go (default: benchmarks/results; of a dry run nowhere)")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(arguments)
    if not args.dry_run:
        check_gpu(torch.device("cuda"), ())
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or (Path(temporary) if args.dry_run else RESULTS)
        _rows(args, folder, "cpu" if args.dry_run else "cuda")


def _rows(args: argparse.Namespace, folder: Path, device: str) -> None:
    ends = time.monotonic() + 60 * args.minutes
    wanted = [row for row in ROWS if not args.rows or row.name in args.rows]
    if not args.rows:
        known = done(folder, device_told(device)["name"])
        wanted = [row for row in wanted if row.name not in known]
    bench = Bench(device, measured(torch.device(device)), tuple(args.model), args.dry_run)
    left = []
    for row in wanted:
        if time.monotonic() + row.about_s > ends:
            left.append(row.name)
            continue
        result = run(bench, row)
        path = write_result(f"gpu-{row.name.replace('/', '-')}", result, folder)
        print(_told(result), path.name, flush=True)
    print(f"left: {', '.join(left)}; run it again" if left else "all rows are done")


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
    dry = " (a dry run: no figures)" if result["dry_run"] else ""
    verdicts = "; ".join(g["verdict"] for g in result["goals"])
    return f"{result['row']}{dry}: {', '.join(figures)} {verdicts}".rstrip()


if __name__ == "__main__":
    main()
