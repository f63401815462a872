"""Two checkouts of Millrace against each other: is the new one as fast, and are its tokens the same?

    python -m benchmarks.versions ../old --shapes llama-143m qwen2.5-0.5b --pairs 40

OLD is another checkout with an environment of its own (`make .venv/.installed` there). Each builds the same random
weights and loads them; then both processes are alive, and samples alternate between them, one at a time: neighbours in
time are compared, so that a machine whose memory changes its speed from minute to minute changes it for both. A second
process of the new checkout takes its turns, too: what it differs from the first is what this machine cannot tell.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import count, judged, provenance, write_result
from benchmarks.shapes import SHAPES

ROOT = Path(__file__).parents[1]
WORK = ("prefill-512", "decode-1", "decode-16")
WITHIN = 0.02


Ask = Callable[[str], dict[str, Any]]


@contextlib.contextmanager
def worker(root: Path, shape: str, precision: str, threads: int) -> Iterator[tuple[Ask, str]]:
    """Yield a checkout's process with its engine, to call with a piece of work, and its instruction set."""
    script = Path(__file__).with_name("versions_engine.py")
    arguments: list[str | Path] = [root / ".venv" / "bin" / "python", script, shape, precision, str(threads)]
    packages = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=packages)
    assert process.stdin and process.stdout
    asked, told = process.stdin, process.stdout

    def ask(work: str) -> dict[str, Any]:
        asked.write(work + "\n")
        asked.flush()
        answer: dict[str, Any] = json.loads(told.readline())
        return answer

    with process:
        isa: str = json.loads(told.readline())["isa"]
        yield ask, isa
        asked.close()


def compared(old: Path, shape: str, precision: str, threads: int, pairs: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        workers = {
            side: stack.enter_context(worker(root, shape, precision, threads))
            for side, root in (("old", old), ("new", ROOT), ("new again", ROOT))
        }
        sides = {side: ask for side, (ask, _) in workers.items()}
        isas = {side: isa for side, (_, isa) in workers.items()}
        return {"isas": isas, "work": [taken_in_turns(sides, work, pairs) for work in WORK]}


def taken_in_turns(sides: dict[str, Ask], work: str, pairs: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {side: [] for side in sides}
    tokens: set[str] = set()
    names = list(sides)
    for ask in sides.values():
        ask(work)  # warm
    for i in range(pairs):
        for side in names[i % 3 :] + names[: i % 3]:  # each is first, second and third in turn
            answer = sides[side](work)
            samples[side].append(answer["seconds"])
            tokens.add(answer["tokens"])
    return {
        "work": work, "samples_s": samples, "same_tokens": len(tokens) == 1,
        "speed_of_old": _ratio(samples["old"], samples["new"]),
        "speed_of_itself": _ratio(samples["new again"], samples["new"]),
    }  # fmt: skip


def _ratio(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast ours is: the median over neighbours."""
    return round(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--precisions", nargs="+", default=["w4a8"], help="names, or maps in JSON")
    parser.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pairs", type=count, default=40, help="default: %(default)s")
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, cwd=args.old, check=True
    )
    result: dict[str, Any] = {
        **provenance("benchmarks.versions"),
        "old": commit.stdout.strip(),
        "threads": args.threads,
    }
    result |= {"shape": ", ".join(args.shapes), "runs": []}
    for shape in args.shapes:
        for precision in args.precisions:
            found = compared(args.old.resolve(), shape, precision, args.threads, args.pairs)
            for one in found["work"]:
                tokens = "same tokens" if one["same_tokens"] else "OTHER TOKENS"
                print(
                    f"{shape} {precision} {one['work']}: {one['speed_of_old']:.3f} x old, "
                    f"{one['speed_of_itself']:.3f} x itself, {tokens}", flush=True,
                )  # fmt: skip
            result["runs"].append({"shape": shape, "precision": precision, **found})
    result["goals"] = [
        judged(
            f"{run['shape']} in {run['precision']}, {one['work']}: speed, of {result['old']}'s",
            one["speed_of_old"],
            1.0,
            1 - WITHIN,
        )
        for run in result["runs"]
        for one in run["work"]
    ]
    print(write_result(f"versions-{result['old']}", result))


if __name__ == "__main__":
    main()
