"""Tactics: how each call of a program runs on one machine, and the timings behind these choices (tactics.json).

A tactic sets the knobs that a kernel declares (kernels/declare.py). Tactics never change results, so a table may be
missing, old or made elsewhere: it is used only on its machine and with its number of threads; otherwise kernels use
their default rules. The file holds one table per machine and number of threads, the latest first.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from millrace.engine.artifact.folder_lock import WRITING_S, lock
from millrace.engine.artifact.manifest import UNREADABLE, damaged, sealed
from millrace.errors import EngineError
from millrace.kernels.catalogue import kernels
from millrace.kernels.declare import MAX_KNOBS

TACTICS = "tactics.json"
_LIMIT = 16 << 20
_MAX_TABLES = 16
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TacticTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The timing of one setting of a knob; 0 is the kernel's default rule."""

    value: Count
    median_us: float
    p10_us: float
    p90_us: float
    samples: Count


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one knob, timed alternately, with the chosen settings of earlier knobs. The first is the default."""

    knob: str
    tried: list[TacticTiming]
    chosen: Count


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a region for up to `rows` rows. The last choice also applies beyond its rows."""

    rows: Count
    knobs: dict[str, Count]  # only those that differ from the default rule
    compared: list[Comparison]


class TunedRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls of the program that do the same work with different weights."""

    name: str
    kernel: str
    calls: list[Count]
    choices: list[Choice]  # in order of rows


class TacticTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: dict[str, str | int]  # cpu, isa, cores
    threads: Count
    regions: list[TunedRegion]
    note: str = ""  # what went wrong
    checksum: str = ""  # of all fields above

    def is_for(self, machine: Mapping[str, str | int], threads: int) -> bool:
        return dict(self.machine) == dict(machine) and self.threads == threads

    def compared(self) -> list[Choice]:
        """Choices that were made by timing, not for lack of time."""
        return [choice for region in self.regions for choice in region.choices if choice.compared]

    def entries(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return the tactics as (call, rows, knobs), in the native executor's order."""
        result = [
            (call, choice.rows, knob_values(region.kernel, choice.knobs))
            for region in self.regions
            for call in region.calls
            for choice in region.choices
        ]
        return sorted(result)


def knob_values(kernel: str, knobs: Mapping[str, int]) -> tuple[int, ...]:
    """Return knobs in the kernel's order. raises ValueError for an unknown kernel, knob or value"""
    declared = {knob.name: (i, knob.high) for k in kernels() if k.name == kernel for i, knob in enumerate(k.knobs)}
    values = [0] * MAX_KNOBS
    for name, value in knobs.items():
        if name not in declared:
            raise ValueError(f"no kernel {kernel} has a knob {name}")
        at, high = declared[name]
        if not 0 <= value <= high:
            raise ValueError(f"{name} of {kernel} is {value}, not 0 to {high}")
        values[at] = value
    return tuple(values)


def read_tactics(folder: Path, *, ignore_damaged: bool = False) -> TacticTable | None:
    """Return the table that was written last; None if the engine was never tuned.

    ignore_damaged: return None for damaged tables. raises EngineError for damaged tables otherwise
    """
    return next(iter(read_tables(folder, ignore_damaged=ignore_damaged)), None)


def table_for(tables: Sequence[TacticTable], machine: Mapping[str, str | int], threads: int) -> TacticTable | None:
    return next((table for table in tables if table.is_for(machine, threads)), None)


def read_tables(folder: Path, *, ignore_damaged: bool = False) -> list[TacticTable]:
    """Return one table per machine and thread count, the latest first.

    ignore_damaged: return none if they are damaged. raises EngineError for damaged tables otherwise
    """
    try:
        return _read(folder)
    except EngineError:
        if ignore_damaged:
            return []
        raise


def _read(folder: Path) -> list[TacticTable]:
    path = folder / TACTICS
    if not path.exists():
        return []
    if not path.is_file():
        raise damaged_tactics(folder, "it is no file")
    if path.stat().st_size > _LIMIT:
        raise damaged_tactics(folder, f"it has {path.stat().st_size} bytes, more than {_LIMIT}")
    try:
        # engines that were tuned for one number of threads have a single table
        result = msgspec.json.decode(path.read_bytes(), type=TacticTable | list[TacticTable])
        tables = [result] if isinstance(result, TacticTable) else result
        for table in tables:
            table.entries()
    except (*UNREADABLE, ValueError) as error:
        raise damaged_tactics(folder, f"it is not readable: {error}") from error
    if any(table != sealed(table) for table in tables):
        raise damaged_tactics(folder, "its checksum differs")
    return tables


def write_tactics(folder: Path, table: TacticTable) -> TacticTable:
    """Write a table next to those for other machines and threads, atomically. Return it with its checksum.

    raises OSError, MachineError if another process keeps writing
    """
    table = sealed(table)
    with _locked(folder):
        other_tables = [
            t for t in read_tables(folder, ignore_damaged=True) if not t.is_for(table.machine, table.threads)
        ]
        tables = [table, *other_tables[: _MAX_TABLES - 1]]
        write_whole(folder / TACTICS, msgspec.json.format(msgspec.json.encode(tables), indent=1))
    return table


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for writing tactics.

    The lock is on the folder itself, because tables are replaced, and the manifest's lock belongs to the engine's
    users.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # on a file system without locks, one of two concurrent tables may be lost
            lock(file, fcntl.LOCK_EX, f"another process, which is writing {folder / TACTICS}", WRITING_S)
        yield
    finally:
        os.close(file)


def write_whole(path: Path, content: bytes) -> None:
    """Write the whole content or nothing, without leaving partial files. Devices are written directly."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(unfinished).chmod(0o644)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def damaged_tactics(folder: Path, what: str) -> EngineError:
    error = damaged(folder, f"{TACTICS} is damaged: {what}")
    return EngineError(
        error.what, error.expected, f"time the kernels again: millrace tune {folder}, or remove the file"
    )
