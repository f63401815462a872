"""What was found of a model, piece by piece, in a file that a run goes on with where an earlier one was ended.

The first line says of what: an engine, a task, its data. Then a line for each question, window or document.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from millrace.errors import ConfigError
from millrace.evaluate.paired import Paired, Verdict, paired
from millrace.settings import read_given

_MOST_BYTES = 1 << 28
VERSION = 1
Key = tuple[str, int]  # a group, and the number of a question in it; of a text, "" and the number of a window
RIGHT, PER_BYTE = "right", "right per byte"  # by what a multiple-choice answer is judged: the likeliest, or per byte


class Record(Protocol):
    """A line, which is a msgspec.Struct."""

    @property
    def key(self) -> Key: ...


class Judged(Record, Protocol):
    """A line about a question. verdicts: by the measure; all lines of a file have the same measures"""

    @property
    def verdicts(self) -> Mapping[str, Verdict]: ...

    @property
    def cut(self) -> bool: ...


R = TypeVar("R", bound=Record)
J = TypeVar("J", bound=Judged)


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """engine: its identity; data: a digest of the questions and how they are posed, or of the text and its windows"""

    model: str
    engine: str
    precision: str
    task: str
    data: str
    version: int = VERSION

    def same(self, other: "About") -> bool:
        """Whether answers of one go on with those of the other: a model's name decides nothing."""
        return msgspec.structs.replace(self, model="") == msgspec.structs.replace(other, model="")


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """logprobs: of each choice; cut: the prompt was longer than the context; per_byte: the likeliest by byte, where
    choices are texts whose lengths differ; id: the user's own"""

    group: str
    number: int
    answer: int
    chosen: int
    logprobs: list[float]
    cut: bool = False
    per_byte: int | None = None
    id: str = ""

    @property
    def key(self) -> Key:
        return self.group, self.number

    @property
    def right(self) -> bool:
        return self.chosen == self.answer

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        found = {RIGHT: Verdict(self.chosen, self.right)}
        if self.per_byte is not None:
            found[PER_BYTE] = Verdict(self.per_byte, self.per_byte == self.answer)
        return found


class Results(NamedTuple, Generic[R]):
    """n_bytes: of the file that hold it whole, for its last line may have been cut"""

    about: About
    records: dict[Key, R]
    n_bytes: int = 0


def beside(now: Results[J], before: Results[J]) -> dict[str, Paired]:
    """The same questions, one by one, by each measure. raises ConfigError where they did not answer the same"""
    about, of = now.about, before.about
    if (about.task, about.data) != (of.task, of.data) or now.records.keys() != before.records.keys():
        raise ConfigError(
            f"the results of {of.model} are of other questions: {of.task}, {len(before.records):,} answered",
            f"{about.task}, {len(now.records):,} answered", "evaluate both in the same way",
        )  # fmt: skip
    pairs = [(one.verdicts, before.records[key].verdicts) for key, one in now.records.items()]
    measures = pairs[0][0] if pairs else ()
    return {name: paired([mine[name] for mine, _ in pairs], [theirs[name] for _, theirs in pairs]) for name in measures}


class Kept(Generic[R]):
    """The file, open for more; close it when done."""

    def __init__(self, path: Path, about: About, kind: type[R]) -> None:
        """Goes on with a file of the same, begins one that is not there. raises ConfigError for what is another"""
        self.path, self.records = path, dict[Key, R]()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(self._file).st_size:
                found, self.records, size = read(path, kind)
                if not found.same(about):
                    raise _of_another(path, found, about)
                os.ftruncate(self._file, size)  # a line that was not written whole is asked again
                os.lseek(self._file, 0, os.SEEK_END)
            else:
                os.write(self._file, msgspec.json.encode(about) + b"\n")
        except ConfigError:
            self.close()
            raise

    def add(self, found: R) -> None:
        """Written at once: what was found is not lost."""
        self.records[found.key] = found
        os.write(self._file, msgspec.json.encode(found) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(path: Path, kind: type[R]) -> Results[R]:
    """kind: of the lines behind the first. raises ConfigError for files of another kind"""
    try:
        data = read_given(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", "results of `millrace eval`", "check the path") from error
    head, *lines = data[: data.rfind(b"\n") + 1].splitlines() or [b""]
    found, number = dict[Key, R](), 1
    decoder = msgspec.json.Decoder(kind)
    try:
        about = msgspec.json.decode(head, type=About)
        for line in lines:
            number += 1
            one = decoder.decode(line)
            found[one.key] = one
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}:{number} is no line of results: {error}", "a file that `millrace eval` wrote", "name another one"
        ) from None
    return Results(about, found, data.rfind(b"\n") + 1)


def _of_another(path: Path, found: About, wanted: About) -> ConfigError:
    differs = [n for n in ("task", "data", "precision", "engine") if getattr(found, n) != getattr(wanted, n)]
    what = f"{differs[0]} {getattr(found, differs[0])!r:.80}" if differs else f"version {found.version}"
    ours = getattr(wanted, differs[0]) if differs else VERSION
    return ConfigError(f"{path} has results of the {what}", f"{ours!r:.80}", "name another file: --out")
