"""Runs cases of one target, writes failures to stdout, and into a file which case it is at: `driver.py` starts it."""

import ctypes
import gc
import importlib
import os
import resource
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

from millrace.errors import MillraceError
from tests.fuzz.driver import (
    MAX_GROWTH_BYTES,
    MAX_LEAP_BYTES,
    MAX_MESSAGE,
    ROOM_BYTES,
    Case,
    Failure,
    Target,
    line_of,
    random_of,
)

_WARM = 40  # cases after which caches are full and memory should not grow any more
_PAGE = resource.getpagesize()


def main(target: str, seed: str, first: str, last: str, place: str, slow_s: str) -> None:
    module, _, name = target.partition(":")
    prepare: Target = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        case = prepare(Path(folder))
        _limit()
        run(case, target, int(seed), range(int(first), int(last)), os.open(place, os.O_WRONLY), float(slow_s))


def run(case: Case, target: str, seed: int, cases: range, place: int, slow_s: float) -> None:
    warm, peak = 0, _peak_bytes()
    for i in cases:
        os.pwrite(place, struct.pack("<q", i), 0)
        found, taken = _timed(case, seed, i)
        if found is None and taken > slow_s:  # or only beside what else this machine did
            taken = min(taken, _timed(case, seed, i)[1])
        before, peak = peak, _peak_bytes()
        if found is None and taken > slow_s:
            found = "slow", f"{taken:.1f} s of processor time"
        if found is None and i - cases.start >= _WARM and peak - before > MAX_LEAP_BYTES:
            found = "memory", f"{(peak - before) >> 20} MiB for one case"
        if found:
            _tell(Failure(target, seed, i, *found))
        if i - cases.start == _WARM:
            warm = _resident_bytes()
    grown = _resident_bytes() - warm
    if warm and grown > MAX_GROWTH_BYTES:
        _tell(Failure(target, seed, cases.stop - 1, "memory", f"{grown >> 20} MiB more than after {_WARM} cases"))


def _timed(case: Case, seed: int, index: int) -> tuple[tuple[str, str] | None, float]:
    """What is wrong, and the processor time in seconds."""
    begun = time.process_time()
    found = _judged(case, seed, index)
    return found, time.process_time() - begun


def _judged(case: Case, seed: int, index: int) -> tuple[str, str] | None:
    try:
        case(random_of(seed, index))
    except MillraceError as error:
        return _judged_text(str(error))
    except BaseException as error:  # noqa: BLE001  a panic of a Rust library is no Exception; whatever comes is the finding
        frames = traceback.extract_tb(error.__traceback__)
        inside = next((f for f in reversed(frames) if "/millrace/" in f.filename), frames[-1])
        where = f"{Path(inside.filename).name}:{inside.name}"
        return "raised", f"{type(error).__name__} in {where}: {str(error)[:200]!r}"
    return None


def _judged_text(text: str) -> tuple[str, str] | None:
    if len(text.encode(errors="surrogatepass")) > MAX_MESSAGE:
        return "message", f"{len(text)} characters: {text[:100]!r}"
    if not all(c == "\n" or c.isprintable() for c in text):
        return "message", f"not printable: {text[:300]!r}"
    return None


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _peak_bytes() -> int:
    """Not getrusage's, which begins with the parent's."""
    status = Path("/proc/self/status").read_bytes()
    return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed between other things is no memory that is kept
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _tell(failure: Failure) -> None:
    sys.stdout.write(line_of(failure) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
