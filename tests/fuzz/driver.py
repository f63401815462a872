"""Seeded fuzzing: case = f(seed, index), in a child process, so that a crash or a hang costs one case and names itself.

A target prepares its originals in a folder and gives a function of a random generator, which mutates one of them and
opens it. The property: it opens, or it raises a MillraceError of less than MAX_MESSAGE printable characters; within
MAX_CASE_S of processor time, and without keeping or taking much memory.

    python -m tests.fuzz TARGET --cases 100000 --seed 7 --jobs 2
"""

import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
MAX_CASE_S = 2.0  # of processor time
HUNG_S = 30.0  # of any time: the machine may be busy
MAX_MESSAGE = 2000
ROOM_BYTES = 3 << 30  # of address space that a child may take beyond what it has when it begins
MAX_GROWTH_BYTES = 96 << 20  # that all of its cases together may keep
MAX_LEAP_BYTES = 256 << 20  # that one case may take for a while

Case = Callable[[Random], None]
Target = Callable[[Path], Case]


@dataclass(frozen=True, slots=True)
class Failure:
    target: str  # "module:function"
    seed: int
    index: int
    kind: str  # raised | message | slow | memory | hung | crashed
    detail: str

    def __str__(self) -> str:
        return f"{self.target} --seed {self.seed} --only {self.index}: {self.kind}: {self.detail}"


def random_of(seed: int, index: int) -> Random:
    """Every case has its own generator, so that it can be run alone."""
    return Random(f"{seed}/{index}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a case may take, in seconds."""

    hung_s: float = HUNG_S
    slow_s: float = MAX_CASE_S


def fuzz(target: str, seed: int, first: int, count: int, limits: Limits = Limits()) -> Iterator[Failure]:
    """Runs cases first .. first+count-1 of `target` ("module:function"); a new child goes on behind each lost one."""
    last = first + count
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while first < last:
            at = yield from _batch(target, seed, first, last, Path(folder), limits)
            first = at + 1


def _batch(
    target: str, seed: int, first: int, last: int, folder: Path, limits: Limits
) -> Generator[Failure, None, int]:
    """Gives the last case that was run."""
    place, said, errors = folder / "at", folder / "said", folder / "stderr"
    place.write_bytes(b"")
    numbers = map(str, (seed, first, last, place, limits.slow_s))
    command = [sys.executable, "-m", "tests.fuzz.child", target, *numbers]
    with (
        said.open("wb") as out,
        errors.open("wb") as err,
        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err) as child,
    ):
        hung = _wait(child, place, limits.hung_s)
    reached = _place(place)
    at = first if reached is None else reached
    for line in said.read_text().splitlines():
        yield Failure(**json.loads(line))
    if hung:
        yield Failure(target, seed, at, "hung", f"no end after {limits.hung_s:g} s")
    elif child.returncode:
        last_words = errors.read_bytes()[-300:].decode(errors="backslashreplace").strip()
        yield Failure(target, seed, at, "crashed", f"exit status {child.returncode}: {last_words}")
    else:
        at = last
    return at


def _wait(child: "subprocess.Popen[bytes]", place: Path, hung_s: float) -> bool:
    """Whether one case took so long that the child had to be killed."""
    at, since = _place(place), time.monotonic()
    while True:
        try:
            child.wait(timeout=min(0.5, hung_s / 4))
            return False
        except subprocess.TimeoutExpired:
            now = _place(place)
            if now != at:
                at, since = now, time.monotonic()
            elif time.monotonic() - since > (HUNG_S if at is None else hung_s):
                child.kill()
                child.wait()
                return True


def _place(place: Path) -> int | None:
    """The case that the child is at; None before its first."""
    written = place.read_bytes()
    return int(struct.unpack("<q", written)[0]) if written else None


def line_of(failure: Failure) -> str:
    return json.dumps(asdict(failure))
