"""What a model chose, question by question, in a file that a run goes on with where an earlier one was ended.

The first line says of what: an engine, a task, its data. Then a line for each question. Files are small: some 200 bytes
a question.
"""

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from millrace.errors import ConfigError
from millrace.evaluate.paired import Paired, paired
from millrace.settings import read_given

_MOST_BYTES = 1 << 28
VERSION = 1
Key = tuple[str, int]  # a group, and the number of a question in it


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """engine: its identity; data: a digest of the questions and how they are posed"""

    model: str
    engine: str
    precision: str
    task: str
    data: str
    version: int = VERSION

    def same(self, other: "About") -> bool:
        """Whether answers of one go on with those of the other: a model's name decides nothing."""
        return msgspec.structs.replace(self, model="") == msgspec.structs.replace(other, model="")


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """logprobs: of each choice; cut: the prompt was longer than the context"""

    group: str
    number: int
    answer: int
    chosen: int
    logprobs: list[float]
    cut: bool = False

    @property
    def key(self) -> Key:
        return self.group, self.number

    @property
    def right(self) -> bool:
        return self.chosen == self.answer


class Results(NamedTuple):
    """What a model chose; n_bytes: of the file that hold it whole, for its last line may have been cut"""

    about: About
    chosen: dict[Key, Chosen]
    n_bytes: int = 0

    @property
    def n_right(self) -> int:
        return sum(one.right for one in self.chosen.values())

    def beside(self, before: "Results") -> Paired:
        """The same questions, one by one. raises ConfigError where they did not answer the same"""
        about, of = self.about, before.about
        if (about.task, about.data) != (of.task, of.data) or self.chosen.keys() != before.chosen.keys():
            raise ConfigError(
                f"the results of {of.model} are of other questions: {of.task}, {len(before.chosen):,} answered",
                f"{about.task}, {len(self.chosen):,} answered", "evaluate both in the same way",
            )  # fmt: skip
        mine = list(self.chosen.values())
        theirs = [before.chosen[one.key].chosen for one in mine]
        return paired([one.chosen for one in mine], theirs, [one.answer for one in mine])


class Kept:
    """The file, open for more; close it when done."""

    def __init__(self, path: Path, about: About) -> None:
        """Goes on with a file of the same, begins one that is not there. raises ConfigError for what is another"""
        self.path, self.chosen = path, dict[Key, Chosen]()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(self._file).st_size:
                found, self.chosen, size = read(path)
                if not found.same(about):
                    raise _of_another(path, found, about)
                os.ftruncate(self._file, size)  # a line that was not written whole is asked again
                os.lseek(self._file, 0, os.SEEK_END)
            else:
                os.write(self._file, msgspec.json.encode(about) + b"\n")
        except ConfigError:
            self.close()
            raise

    def add(self, found: Chosen) -> None:
        """Written at once: what was answered is not lost."""
        self.chosen[found.key] = found
        os.write(self._file, msgspec.json.encode(found) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Results:
    """raises ConfigError for files of another kind"""
    try:
        data = read_given(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", "results of `millrace eval`", "check the path") from error
    head, *lines = data[: data.rfind(b"\n") + 1].splitlines() or [b""]
    found, number = dict[Key, Chosen](), 1
    try:
        about = msgspec.json.decode(head, type=About)
        for line in lines:
            number += 1
            one = msgspec.json.decode(line, type=Chosen)
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
