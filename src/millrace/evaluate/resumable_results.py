"""Resumable evaluation results: a file per model, to which a run appends and from which a later run resumes.

The first line identifies the engine, the task and its data. Then each question, window or document has a line, which
ends with a checksum.
"""

import fcntl
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from millrace.errors import ConfigError, MachineError, MillraceError
from millrace.evaluate.paired_comparison import Paired, Verdict, paired
from millrace.runtime.open_engine import RunningModel
from millrace.settings import read_bounded

_MAX_BYTES = 1 << 28
VERSION = 2  # 1 had no checksums
_CHECKSUM, _END = b',"checksum":"', b'"}'
Key = tuple[str, int]  # group and index of a question; for a text, "" and the index of a window
RIGHT, PER_BYTE = "right", "right per byte"  # measures of multiple-choice answers: by likelihood, or per byte


class ResultRecord(Protocol):
    """A line of the file: a msgspec.Struct."""

    @property
    def key(self) -> Key: ...


class ScoredAnswer(ResultRecord, Protocol):
    """A line of a question. verdicts: by measure; all lines of a file have the same measures"""

    @property
    def verdicts(self) -> Mapping[str, Verdict]: ...

    @property
    def cut(self) -> bool: ...

    @property
    def gave_up(self) -> bool: ...


R = TypeVar("R", bound=ResultRecord)
J = TypeVar("J", bound=ScoredAnswer)


class ResultsInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """engine: its identity; data: digest of the questions and their format, or of the text and its windows"""

    model: str
    engine: str
    precision: str
    task: str
    data: str
    version: int = VERSION

    def same(self, other: "ResultsInputs") -> bool:
        """Whether results can be combined; the model's name does not matter."""
        return msgspec.structs.replace(self, model="") == msgspec.structs.replace(other, model="")

    @classmethod
    def from_model(cls, model: RunningModel, task: str, data: str) -> "ResultsInputs":
        return cls(model.name, model.engine.manifest.identity, precision_summary(model), task, data)

    def summary(self) -> dict[str, str]:
        """Return JSON data."""
        return {
            "model": self.model, "engine": self.engine, "precision": self.precision, "task": self.task,
            "data": self.data,
        }  # fmt: skip


def precision_summary(model: RunningModel) -> str:
    """Format the precisions of an engine: "weights w8a8, lm_head bf16"."""
    return ", ".join(f"{name} {precision}" for name, precision in model.engine.manifest.precision.items())


class ChosenAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A multiple-choice answer. logprobs: of each choice; cut: whether the prompt was longer than the context.

    per_byte: the likeliest choice per byte, if choices are texts of different lengths; id: set by the user
    """

    group: str
    number: int
    answer: int
    chosen: int
    logprobs: list[float]
    cut: bool = False
    per_byte: int | None = None
    id: str = ""
    gave_up: ClassVar[bool] = False  # matching is never undecided

    @property
    def key(self) -> Key:
        return self.group, self.number

    @property
    def right(self) -> bool:
        return self.chosen == self.answer

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        stored = {RIGHT: Verdict(self.chosen, self.right)}
        if self.per_byte is not None:
            stored[PER_BYTE] = Verdict(self.per_byte, self.per_byte == self.answer)
        return stored


class Results(NamedTuple, Generic[R]):
    """The contents of a file. n_bytes: of its complete lines; the last line may be truncated"""

    about: ResultsInputs
    records: dict[Key, R]
    n_bytes: int = 0


def compare_results(now: Results[J], before: Results[J]) -> dict[str, Paired]:
    """Compare answers by question, for each measure. raises ConfigError if the questions differ"""
    check_same(before, now.about.task, now.about.data, len(now.records))
    measures = measures_of(now)
    if now.records.keys() != before.records.keys() or measures != measures_of(before):
        raise _of_other_questions(before, now.about.task, len(now.records))
    pairs = [(one.verdicts, before.records[key].verdicts) for key, one in now.records.items()]
    return {name: paired([mine[name] for mine, _ in pairs], [theirs[name] for _, theirs in pairs]) for name in measures}


def measures_of(stored: Results[J]) -> list[str]:
    """Return the measures of all answers. raises ConfigError if they differ, i.e. the file was modified"""
    some = [list(one.verdicts) for one in stored.records.values()]
    if any(one != some[0] for one in some):
        raise ConfigError(
            f"the results of {stored.about.model} are not all judged alike", "answers to one file of questions",
            "they are damaged: evaluate again, into another file: --out",
        )  # fmt: skip
    return some[0] if some else []


def check_whole(stored: Results[J], n: int) -> None:
    """Raise ConfigError if a file has answers to unknown questions, or is otherwise damaged."""
    if len(stored.records) != n:
        raise ConfigError(
            f"the file of results has {len(stored.records):,} answers", f"one to each of {n:,} questions",
            "it is damaged: name another, and evaluate again: --out",
        )  # fmt: skip
    measures_of(stored)


def check_same(before: Results[J], task: str, data: str, n: int) -> None:
    """Raise ConfigError if the results are not answers to all `n` questions."""
    if (task, data, n) != (before.about.task, before.about.data, len(before.records)):
        raise _of_other_questions(before, task, n)


def _of_other_questions(before: Results[J], task: str, n: int) -> ConfigError:
    earlier = before.about
    return ConfigError(
        f"the results of {earlier.model} are of other questions: {earlier.task}, {len(before.records):,} answered",
        f"{task}, {n:,} answered", "evaluate both in the same way",
    )  # fmt: skip


class ResumableResults(Generic[R]):
    """A results file opened for appending, with an exclusive lock; close it when done."""

    def __init__(self, path: Path, about: ResultsInputs, kind: type[R]) -> None:
        """Create a file, or resume one with the same inputs.

        raises ConfigError if its inputs differ or another run writes it, MachineError if it cannot be written
        """
        self.path, self.records, self._n_bytes = path, dict[Key, R](), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._go_on(about, kind)
        except (MillraceError, OSError):
            self.close()
            raise

    def add(self, stored: R) -> None:
        """Append a line immediately. raises MachineError, and ConfigError if the file becomes too large"""
        self._write(_sealed(msgspec.json.encode(stored)))
        self.records[stored.key] = stored

    def close(self) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"the results {self.path} are in use by another run"
            raise ConfigError(what, "a file for each run", "wait for the other, or name another file: --out") from None

    def _go_on(self, about: ResultsInputs, kind: type[R]) -> None:
        head, size = msgspec.json.encode(about) + b"\n", os.fstat(self._file).st_size
        if not size or (size < len(head) and os.pread(self._file, size, 0) == head[:size]):
            self._n_bytes = size  # of a truncated first line
            self._write(head[size:])
            return
        stored, self.records, self._n_bytes = read(self.path, kind)
        if not stored.same(about):
            raise _of_another(self.path, stored, about)
        os.ftruncate(self._file, self._n_bytes)  # an incomplete line is computed again

    def _write(self, line: bytes) -> None:
        """Write a line completely or not at all: a part, left by a full disk, would corrupt the next line."""
        if self._n_bytes + len(line) > _MAX_BYTES:
            raise _too_large(self.path, "ask fewer questions, or shorter texts: --limit")
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with suppress(OSError):  # report the first error; a line that stays incomplete is computed again
                os.ftruncate(self._file, self._n_bytes)
            what = f"cannot write results to {self.path}: {error.strerror}"
            fix = "make room, and run it again: it goes on from there"
            raise MachineError(what, "a disk that takes them", fix) from error
        self._n_bytes += len(line)


def read(path: Path, kind: type[R]) -> Results[R]:
    """Read a file. kind: type of the lines after the first. raises ConfigError for another kind, or a large file"""
    try:
        data = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", "results of `millrace eval`", "check the path") from error
    if len(data) > _MAX_BYTES:
        raise _too_large(path, "name another file")
    head, *lines = data[: data.rfind(b"\n") + 1].splitlines() or [b""]
    stored, number = dict[Key, R](), 1
    decoder = msgspec.json.Decoder(kind)
    try:
        about = msgspec.json.decode(head, type=ResultsInputs)
        if about.version != VERSION:
            fix = "evaluate again, into another file: --out"
            raise ConfigError(f"{path} has results of version {about.version}", f"version {VERSION}", fix)
        for line in lines:
            number += 1
            one = decoder.decode(_unsealed(line))
            stored[one.key] = one
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"{path}:{number} is no line of results: {error}", "a file that `millrace eval` wrote", "name another one"
        ) from None
    return Results(about, stored, data.rfind(b"\n") + 1)


def _sealed(line: bytes) -> bytes:
    """Return a JSON record with its checksum as the last field, and a newline."""
    return line.removesuffix(b"}") + _CHECKSUM + _digest(line) + _END + b"\n"


def _unsealed(line: bytes) -> bytes:
    """Check and remove the checksum. raises ValueError if the line was changed"""
    record, stored, checksum = line.rpartition(_CHECKSUM)
    if not stored:
        raise ValueError("it has no checksum")
    record += b"}"
    if checksum != _digest(record) + _END:
        raise ValueError("it is damaged: its checksum is another")
    return record


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=8).hexdigest().encode()


def _too_large(path: Path, fix: str) -> ConfigError:
    return ConfigError(f"{path} is too large for results", f"at most {_MAX_BYTES:,} bytes", fix)


def _of_another(path: Path, stored: ResultsInputs, expected: ResultsInputs) -> ConfigError:
    name = next(n for n in ("task", "data", "precision", "engine") if getattr(stored, n) != getattr(expected, n))
    theirs, ours = (f"{getattr(one, name)!r:.80}" for one in (stored, expected))
    return ConfigError(f"{path} has results of the {name} {theirs}", ours, "name another file: --out")
