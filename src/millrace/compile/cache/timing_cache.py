"""The timing cache: tactics timed on this machine, for later builds. Readable JSON, merged under a lock.

If every timing is cached, a build times nothing, so the same inputs and the same cache give the same tactics.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from millrace.engine.artifact.folder_lock import WRITING_S, lock
from millrace.engine.artifact.manifest import UNREADABLE
from millrace.engine.artifact.tactics import Choice, knob_values, write_whole
from millrace.errors import MachineError
from millrace.kernels.library import library_path
from millrace.machine.cpu import fingerprint

Regions = dict[str, list[Choice]]  # region -> a choice for each number of rows


@cache
def _library_digest() -> str:
    return hashlib.blake2b(library_path().read_bytes(), digest_size=6).hexdigest()


def machine_key(isa: str, threads: int) -> str:
    """Return the key of a timing: processor, instruction set, threads and a digest of the timed code."""
    machine = fingerprint(isa)
    return f"{machine['cpu']}, {isa}, {threads} of {machine['cores']} cores, kernels {_library_digest()}"


def _check_choice(region: str, choice: Choice) -> None:
    knob_values(region.split(" ")[0], choice.knobs)


class TimingCache:
    def __init__(self, path: Path, check: Callable[[str, Choice], None] = _check_choice) -> None:
        """check: raises ValueError for a region's choice that the machine does not support"""
        self._path, self._check = path, check

    def read(self, machine: str) -> Regions:
        """Return the timings of one machine. raises MachineError if unreadable

        The entries of other machines are not checked: they may be from another version.
        """
        try:
            regions = msgspec.json.decode(self._machines().get(machine, b"{}"), type=Regions)
            for region, choices in regions.items():
                for choice in choices:
                    self._check(region, choice)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._unreadable(error) from error
        return regions

    def merge(self, machine: str, regions_timed: Regions) -> None:
        """Add timings. New ones replace old ones for the same rows."""
        with self._locked():
            regions = self.read(machine)
            for region, choices in regions_timed.items():
                by_rows = {c.rows: c for c in [*regions.get(region, []), *choices]}
                regions[region] = [by_rows[rows] for rows in sorted(by_rows)]
            machines = {**self._machines(), machine: msgspec.Raw(msgspec.json.encode(regions))}
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(machines), indent=1))

    def _machines(self) -> dict[str, msgspec.Raw]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, msgspec.Raw])
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, *UNREADABLE) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> MachineError:
        return MachineError(
            f"the timing cache {self._path} cannot be read: {error}", "JSON as millrace writes it", "remove the file"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(f".{self._path.name}.lock").open("w") as file:
            lock(file.fileno(), fcntl.LOCK_EX, f"another process, which is writing {self._path}", WRITING_S)
            yield
