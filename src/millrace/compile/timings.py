"""The timing cache: what was timed on this machine, kept for engines to come. Readable JSON, merged under a lock.

With every answer in it a build times nothing, so the same inputs and the same cache give the same tactics.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from millrace.engine.tactics import Choice, knob_values
from millrace.errors import MachineError
from millrace.kernels.library import library_path
from millrace.machine.cpu import fingerprint

Timings = dict[str, dict[str, list[Choice]]]  # machine -> region -> a choice for each number of rows


@cache
def _library_digest() -> str:
    return hashlib.blake2b(library_path().read_bytes(), digest_size=6).hexdigest()


def machine_key(isa: str, threads: int) -> str:
    """What a time holds for: processor, instruction set, threads and the very code that was timed."""
    machine = fingerprint(isa)
    return f"{machine['cpu']}, {isa}, {threads} of {machine['cores']} cores, kernels {_library_digest()}"


class TimingCache:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Timings:
        """raises MachineError where the file cannot be read"""
        try:
            timings = msgspec.json.decode(self._path.read_bytes(), type=Timings)
            for regions in timings.values():
                for region, choices in regions.items():
                    for choice in choices:
                        knob_values(region.split(" ")[0], choice.knobs)
            return timings
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, msgspec.DecodeError, ValueError) as error:
            raise MachineError(
                f"the timing cache {self._path} cannot be read: {error}",
                "JSON as millrace writes it",
                "remove the file",
            ) from error

    def merge(self, machine: str, found: dict[str, list[Choice]]) -> None:
        """New answers replace old ones for the same rows; all others stay."""
        with self._locked():
            timings = self.read()
            regions = timings.setdefault(machine, {})
            for region, choices in found.items():
                known = {c.rows: c for c in [*regions.get(region, []), *choices]}
                regions[region] = [known[rows] for rows in sorted(known)]
            unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(timings), indent=1))
            unfinished.replace(self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(f".{self._path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
