"""Runs the checks that are too slow for every change, part by part, and reports the age of each part's last result.

    python -m tools.nightly                 run parts without a result of the last 20 hours, the oldest first
    python -m tools.nightly fuzz-gguf llm   run these, whatever their age (a prefix of a name is enough)
    python -m tools.nightly --status        print each part's age; exit with 1 if a result is absent, of a changed tree,
                                            or red without a known reason
    python -m tools.nightly --release       the same; also exit with 1 if a result is stale, or no part ran the kernels
                                            of an instruction set

The status folder, tools/nightly/results, holds the last result of each part in PART.json. A part writes it when it
ends, so the next run continues after an interrupted one. Commit the folder once, with the next change that lands, and
not part by part: `commit` in a result names the commit that it ran on. known.json has the known reasons of red results.
A result is stale if files that its part covers, of the product or of its tests, have changed; the next run repeats it.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.kernels.library import usable_isas
from tools.nightly.packages import BUILD, ROOT, environment
from tools.nightly.parts import ISAS, MINUTES, PARTS, Part

HERE = Path(__file__).parent
RESULTS, KNOWN = HERE / "results", HERE / "known.json"
FRESH_HOURS = 20
_TAIL_LINES = 40
_TOLD_LINES = 100  # of a part that is pytest: counts and figures, wherever its tests print them
# The last line that pytest writes: "2 failed, 31 passed, 4 skipped, 7 deselected in 8.15s".
_PYTEST_LINE = re.compile(r"=*\s*(\d+ [a-z]+(, )?)+ in [\d.]+s\b.*")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b")

Result = dict[str, Any]


def last(part: Part) -> Result | None:
    path = RESULTS / f"{part.name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def age_hours(result: Result, now: datetime.datetime) -> float:
    return (now - datetime.datetime.fromisoformat(result["time"])).total_seconds() / 3600


def run(part: Part) -> Result:
    """One part, its output to the terminal as it comes; the result is written before it is returned."""
    before = last(part) or {}
    seed = int(before.get("next_seed", 0))
    python = sys.executable
    if part.packages:
        folder = BUILD / "nightly" / part.name
        python = str(environment(folder, part.packages, part.environment, beside_ours=True))
    command = [word.format(python=python, seed=seed) for word in part.command]
    if part.cases:
        print(f"seed {seed}", flush=True)
    started, now = time.monotonic(), datetime.datetime.now(datetime.UTC)
    code, tail, told = _streamed(command)
    figures = _figures(told if part.is_pytest else tail[-1:])
    uncounted = part.is_pytest and code == 0 and not figures.get("passed")
    green = code == 0 and not uncounted
    result: Result = {
        "part": part.name, "green": green, "commit": _commit(), "time": now.strftime("%Y-%m-%dT%H:%M:%S+00:00"),
        "seconds": round(time.monotonic() - started), "figures": figures, "isas": usable_isas(),
    }  # fmt: skip
    if part.emulates:
        result["emulated"] = list(part.emulates)
    if part.cases:  # a red night is run again as it was, until it is fixed
        result["next_seed"] = seed + 1 if green else seed
        result["cases_so_far"] = int(before.get("cases_so_far", 0)) + (part.cases if green else 0)
    if uncounted:
        result["why"] = "pytest ended well and told of no test that passed"
    if not green:
        result |= {"exit_code": code, "tail": [_without_folders(line) for line in tail]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{part.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _streamed(command: Sequence[str]) -> tuple[int | None, list[str], list[str]]:
    """Exit code, None where its time was over; the last lines that are not empty; the last that tell figures."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    told: deque[str] = deque(maxlen=_TOLD_LINES)
    until_s = time.monotonic() + 60 * MINUTES
    with subprocess.Popen(
        ["timeout", "--kill-after=10", str(60 * MINUTES), *command], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.strip():
                tail.append(line.rstrip("\n"))
            if _told(line.rstrip("\n")):
                told.append(line.rstrip("\n"))
    return (None if time.monotonic() >= until_s else process.returncode), list(tail), list(told)


def _figures(lines: Sequence[str]) -> dict[str, Any]:
    """What these lines tell together, each JSON or pytest's counts."""
    found: dict[str, Any] = {}
    for line in lines:
        found |= _told(line)
    return found


def _told(line: str) -> Mapping[str, Any]:
    if _PYTEST_LINE.fullmatch(line):
        return {what: int(n) for n, what in _COUNT.findall(line)}
    try:
        return dict(json.loads(line)) if line.startswith("{") else {}
    except ValueError:
        return {}


def _without_folders(line: str) -> str:
    return line.replace(str(ROOT), "").replace(str(Path.home()), "~")


def _commit() -> str:
    """With a + behind it where the tree is not as committed; results of this night do not count."""
    changed = _git("status", "--porcelain", "--", ".", f":(exclude){RESULTS.relative_to(ROOT)}")
    return (_git("describe", "--always") or "unknown") + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def is_stale(part: Part, result: Result) -> bool:
    """Return whether the files that the part covers have changed since; False if git does not know the commit."""
    command = ["git", "diff", "--quiet", result["commit"].removesuffix("+"), "HEAD", "--", *part.files]
    return bool(part.files) and subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 1


def status(now: datetime.datetime, release: bool = False) -> int:
    """Print each part's age, and what is stale. Return 1 if `_wrong` finds something.

    release: also if a result is stale, or no green one that is not stale ran the kernels of an instruction set on
    hardware; emulation is reported, and does not count
    """
    known: Mapping[str, str] = json.loads(KNOWN.read_text())
    bad = [f"{name}: no such part" for name in known if name not in {p.name for p in PARTS}]
    stale, exercised, emulated = [], set[str](), set[str]()
    for part in PARTS:
        result = last(part)
        state = "absent"
        if result is not None:
            colour = "green" if result["green"] else f"red (known: {known.get(part.name, 'no')})"
            is_old = is_stale(part, result)
            state = f"{age_hours(result, now):5.0f} h  {result['commit']:10} {colour}"
            state += ", stale: files that it covers have changed since" if is_old else ""
            stale += [part.name] if is_old else []
            if part.runs_kernels and result["green"] and not is_old:
                exercised.update(result.get("isas", ()))
                emulated.update(result.get("emulated", ()))
        print(f"  {part.name:22} {state}")
        bad += _wrong(part, result, known)
    missing = {isa: f"{isa} (emulated only)" if isa in emulated else isa for isa in ISAS if isa not in exercised}
    if stale:
        print(f"stale: {', '.join(stale)}")
    if missing:
        print(f"kernels as they are ran on no machine with: {', '.join(missing.values())}")
    if release:
        bad += [f"{name} is stale: run `make nightly PARTS={name}`" for name in stale]
        bad += [f"no result covers {isa}: run a part that has kernels on a machine with it" for isa in missing.values()]
    print("\n".join(bad))
    return 1 if bad else 0


def _wrong(part: Part, result: Result | None, known: Mapping[str, str]) -> list[str]:
    """A part that never ran, that ran on files nobody has, or that is red: only of the last may the reason be known."""
    if result is None:
        return [f"{part.name} is absent: run `make nightly`"]
    found = []
    if result["commit"].endswith("+"):
        found.append(f"{part.name} ran in a tree with changes: commit, then run `make nightly PARTS={part.name}`")
    if not result["green"] and part.name not in known:
        found.append(f"{part.name} is red: run `make nightly`")
    if result["green"] and part.name in known:
        found.append(f"{part.name} is green: take it out of {KNOWN.name}")
    return found


def chosen(names: Sequence[str], now: datetime.datetime) -> list[Part]:
    """Named parts; none named: those without a fresh result, the oldest first."""
    if names:
        found = [p for p in PARTS if any(p.name.startswith(name) for name in names)]
        if not found:
            sys.exit(f"no part of these names; there are {', '.join(p.name for p in PARTS)}")
        return found
    ages = {p.name: float("inf") if (r := last(p)) is None else age_hours(r, now) for p in PARTS}
    stale = [p for p in PARTS if ages[p.name] >= FRESH_HOURS]
    return sorted(stale, key=lambda p: -ages[p.name])


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="run these")
    parser.add_argument("--status", action="store_true", help="say how old each part is, and run nothing")
    parser.add_argument("--release", action="store_true", help="as --status, and fail for what is stale")
    args = parser.parse_args()
    now = datetime.datetime.now(datetime.UTC)
    if args.status or args.release:
        return status(now, args.release)
    red = []
    for part in chosen(args.parts, now):
        print(f"=== {part.name}: {part.about}", flush=True)
        result = run(part)
        print(f"=== {part.name}: {'green' if result['green'] else 'RED'} after {result['seconds']} s", flush=True)
        red += [] if result["green"] else [part.name]
    if red:
        print(f"red: {', '.join(red)}")
    print(f"results are in {RESULTS.relative_to(ROOT)}: commit the folder once, with the next change")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
