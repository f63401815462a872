"""Tactics: how each call of a program works on one machine, and what was timed to find that out (tactics.json).

A tactic turns the knobs that a kernel declares (kernels/declare.py). None ever changes a result, so a table may be
missing, old or made elsewhere: it is used only on the machine and with the threads that it was made for; elsewhere
kernels go by their own rules. The file holds a table for each of these, the last written first.
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
_MOST_TABLES = 16
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TacticTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One setting of a knob; 0 is the kernel's own rule."""

    value: Count
    median_us: float
    p10_us: float
    p90_us: float
    samples: Count


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one knob, timed in turn; the knobs before it stay as they were chosen. The first is the rule."""

    knob: str
    tried: list[TacticTiming]
    chosen: Count


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a region does with at most so many rows, beyond what the last one says as that says."""

    rows: Count
    knobs: dict[str, Count]  # what differs from the rule
    compared: list[Comparison]


class TunedRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of the program that do the same work on other weights."""

    name: str
    kernel: str
    calls: list[Count]
    choices: list[Choice]  # in order of rows


class TacticTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: dict[str, str | int]  # cpu, isa, cores
    threads: Count
    regions: list[TunedRegion]
    note: str = ""  # what went wrong
    checksum: str = ""  # of all of the above

    def is_for(self, machine: Mapping[str, str | int], threads: int) -> bool:
        return dict(self.machine) == dict(machine) and self.threads == threads

    def compared(self) -> list[Choice]:
        """What was chosen by timing, not for want of it."""
        return [choice for region in self.regions for choice in region.choices if choice.compared]

    def entries(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(call, rows, knobs) as the native core takes them, in its order."""
        result = [
            (call, choice.rows, knob_values(region.kernel, choice.knobs))
            for region in self.regions
            for call in region.calls
            for choice in region.choices
        ]
        return sorted(result)


def knob_values(kernel: str, knobs: Mapping[str, int]) -> tuple[int, ...]:
    """In the kernel's order. raises ValueError for a kernel, a knob or a value that there is not"""
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


def read_tactics(folder: Path, *, mend: bool = False) -> TacticTable | None:
    """The table that was written last.

    None: the engine was never tuned, or with `mend` its tables are damaged. raises EngineError for damaged tables
    """
    return next(iter(read_tables(folder, mend=mend)), None)


def table_for(tables: Sequence[TacticTable], machine: Mapping[str, str | int], threads: int) -> TacticTable | None:
    return next((table for table in tables if table.is_for(machine, threads)), None)


def read_tables(folder: Path, *, mend: bool = False) -> list[TacticTable]:
    """One for each machine and number of threads, the last written first; with `mend` none where they are damaged."""
    try:
        return _read(folder)
    except EngineError:
        if mend:
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
        # one alone is what engines had that were tuned for one number of threads only
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
    """Beside the tables for other machines and threads; whole, or not at all. Gives the table with its checksum.

    raises OSError, MachineError where another process keeps on writing
    """
    table = sealed(table)
    with _locked(folder):
        other_tables = [t for t in read_tables(folder, mend=True) if not t.is_for(table.machine, table.threads)]
        tables = [table, *other_tables[: _MOST_TABLES - 1]]
        write_whole(folder / TACTICS, msgspec.json.format(msgspec.json.encode(tables), indent=1))
    return table


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else writes tactics meanwhile. The folder itself is locked: tables are replaced, and no file to lock, and
    the manifest is held by whoever uses the engine."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: a table that two write at once may get lost there
            lock(file, fcntl.LOCK_EX, f"another process, which is writing {folder / TACTICS}", WRITING_S)
        yield
    finally:
        os.close(file)


def write_whole(path: Path, content: bytes) -> None:
    """The whole content or what was there before; nothing unfinished stays behind. A device is written into."""
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
