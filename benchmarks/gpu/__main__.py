"""Every check and measurement of the GPU's executor, once there is a device: Llama-3.1-8B's shape, random weights.

    python -m benchmarks.gpu --model ../shared/models/stories260K --model ../shared/models/tiny
    python -m benchmarks.gpu --rows 128/128 user-fp8
    python -m benchmarks.gpu --dry-run        all rows on tensors of this CPU, a tiny shape: seconds, and no figures

A row is one result file, written when it is done; rows that this commit has a file of are not run again, and none is
begun that would not be through within --minutes of the process's start: so the same command, again and again, does all
of it, in some 15 minutes together. What tells most comes first, and what a run before has begun in vain comes last.
Where the first row does not agree, nothing else is measured. A device that has failed ends the process (exit code 1):
its context does not come back. Requests are a tenth to a quarter of the table's, as each file says; shares are of what
this device was seen to reach in the same run. A start needs some 11 GB of the disk for a checkpoint.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.checks import device_told
from benchmarks.gpu.roofline import measured, wait_for
from benchmarks.gpu.rows import ROWS, goals
from benchmarks.record import RESULTS, commit, provenance, write_result
from millrace.engine.cuda.gpu import check_gpu
from millrace.errors import MillraceError
from millrace.machine.process import age_s

SHAPE = "llama-3.1-8b"


BEGUN = "gpu-begun.txt"  # in the results' folder: a commit and a row a line


def tried(folder: Path, device: str, of: str) -> tuple[set[str], set[str]]:
    """Rows that a commit has a file of, on a device of that name; and those that it has begun in vain."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-*.json"))]
    own = [f for f in files if "row" in f and f["commit"] == of and f["device"]["name"] == device]
    done = {f["row"] for f in own if "refused" not in f}
    lines = (folder / BEGUN).read_text().splitlines() if (folder / BEGUN).exists() else []
    begun = {row for commit_, _, row in (line.partition(" ") for line in lines) if commit_ == of}
    return done, (begun | {f["row"] for f in own}) - done


def run(bench: Bench, row: Row, of: str) -> dict[str, Any]:
    told = {
        **provenance("benchmarks.gpu"), "commit": of, "shape": "tiny" if bench.dry_run else SHAPE, "row": row.name,
        "dry_run": bench.dry_run, "device": device_told(bench.device), "rates": bench.rates.told(),
    }  # fmt: skip
    try:
        found = row.run(bench, row)
    except (MillraceError, RuntimeError, TritonError) as error:  # it lacks something, or fails: the next may go well
        bench.release()
        return {**told, "refused": (str(error) or type(error).__name__).splitlines()[0]}
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
    wanted = [row for row in ROWS if not args.rows or row.name in args.rows]
    done, in_vain = tried(folder, device_told(device)["name"], args.commit)
    if not args.rows:
        wanted = sorted((row for row in wanted if row.name not in done), key=lambda row: row.name in in_vain)
    bench = Bench(device, measured(torch.device(device)), tuple(args.model), args.dry_run)
    ends_s = 60 * args.minutes + (age_s() if args.dry_run else 0)  # of a dry run in a process that is old already
    left = [row.name for row in wanted]
    folder.mkdir(parents=True, exist_ok=True)
    for row in wanted:
        if age_s() + bench.seconds_of(row) > ends_s:
            continue
        with (folder / BEGUN).open("a") as begun:
            begun.write(f"{args.commit} {row.name}\n")
        result = run(bench, row, args.commit)
        path = write_result(f"gpu-{row.name.replace('/', '-')}", result, folder)
        left.remove(row.name)
        print(f"{age_s():.0f} s:", _told(result), path.name, flush=True)
        if "refused" in result and not _works(device):
            sys.exit("the device has failed; start again")
        if row.first and not result.get("ok"):
            print("nothing is measured of what does not agree")
            return
    print(f"left: {', '.join(left)}; run it again" if left else "all rows are done")


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
    dry = " (a dry run: no figures)" if result["dry_run"] else ""
    verdicts = "; ".join(g["verdict"] for g in result["goals"])
    return f"{result['row']}{dry}: {', '.join(figures)} {verdicts}".rstrip()


if __name__ == "__main__":
    main()
