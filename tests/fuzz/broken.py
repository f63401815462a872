"""Targets that break the property, each in its own way: what the driver must notice."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from millrace.errors import ConfigError
from tests.fuzz.driver import Case

BAD = 47  # the case that goes wrong, behind what warms up


def _when_bad(action: Callable[[Random], object], calls: int = 1) -> Case:
    """Counts by itself: a case knows no index. calls: of the case, which is called again if it was slow"""
    n = -1

    def case(rng: Random) -> None:
        nonlocal n
        n += 1
        if BAD <= n < BAD + calls:
            action(rng)
        raise ConfigError("as it should be", "a", "b")

    return case


def raises(folder: Path) -> Case:
    return _when_bad(lambda rng: int("nothing"))


def aborts(folder: Path) -> Case:
    return _when_bad(lambda rng: os.abort())


def reads_nowhere(folder: Path) -> Case:
    return _when_bad(lambda rng: ctypes.memset(8, 0, 1))


def hangs(folder: Path) -> Case:
    return _when_bad(lambda rng: time.sleep(1000))


def is_slow(folder: Path) -> Case:
    def spin(rng: Random) -> None:
        end = time.process_time() + 0.6
        while time.process_time() < end:
            pass

    return _when_bad(spin, calls=2)


class _UncleanedError(ConfigError):
    """What was said as it came, past `errors.sanitize`."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "a", "b")
        self._raw = what

    def __str__(self) -> str:
        return self._raw


def says_much(folder: Path) -> Case:
    def say(rng: Random) -> None:
        raise _UncleanedError("x" * 5000)

    return _when_bad(say)


def says_escapes(folder: Path) -> Case:
    def say(rng: Random) -> None:
        raise _UncleanedError("a \x1b[31mred\x1b[0m thing")

    return _when_bad(say)


def takes_much(folder: Path) -> Case:
    return _when_bad(lambda rng: (bytearray(b"x") * (300 << 20)).clear())


def keeps(folder: Path) -> Case:
    held: list[bytearray] = []

    def case(rng: Random) -> None:
        held.append(bytearray(1 << 20))
        held[-1][::4096] = b"x" * 256

    return case
