"""python -m tests.fuzz TARGET [--cases N] [--seed S] [--jobs J] [--only INDEX]: 0 where every case held."""

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz.driver import Failure, fuzz
from tests.fuzz.known import is_known
from tests.fuzz.targets import TARGETS

_BATCH = 5000  # cases a child runs: memory that it keeps is measured over so many


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--cases", type=int, default=10_000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this case alone")
    asked = parser.parse_args()
    names = list(TARGETS) if asked.target == "all" else [asked.target]
    return 1 if sum(_run(name, asked) for name in names) else 0


def _run(name: str, asked: argparse.Namespace) -> int:
    """How many failures there were that nobody knows."""
    first, count = (0, asked.cases) if asked.only is None else (asked.only, 1)
    begun, known, fresh = time.monotonic(), 0, 0
    for failure in _all(TARGETS[name], asked.seed, first, count, asked.jobs):
        known += is_known(failure)
        fresh += not is_known(failure)
        _say(f"{'known' if is_known(failure) else 'FAILED'} {failure}")
    taken = time.monotonic() - begun
    _say(f"{name}: {count} cases of seed {asked.seed}, {count / taken:.0f} a second, {fresh} failed, {known} known")
    return fresh


def _all(target: str, seed: int, first: int, count: int, jobs: int) -> Iterator[Failure]:
    starts = range(first, first + count, _BATCH)
    with ThreadPoolExecutor(jobs) as pool:
        batches = pool.map(lambda at: list(fuzz(target, seed, at, min(_BATCH, first + count - at))), starts)
        for failures in batches:
            yield from failures


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
