"""Digests of large files, cached next to the engines, so that a later start does not read the files again.

A file is read again if its inode, size, change time or modification time differs from the recorded one. Programs cannot
set the change time, so a weight that is changed in place is noticed even if the modification time is restored. It goes
unnoticed only if the clock was set back, or if the file system's times are coarser than `SETTLED_S`: a file changed
less than that before it was read is not recorded.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from millrace.checkpoint.checkpoint import SMALL_FILES, Checkpoint, content_identity
from millrace.checkpoint.files import FileState, Report, file_digest, unreadable
from millrace.checkpoint.tokenizer.tokenizer import read_files
from millrace.checkpoint.weights.safetensors import DigestOf, Tensors
from millrace.compile.settings import Progress
from millrace.engine.artifact.manifest import UNREADABLE
from millrace.engine.artifact.tactics import write_whole

SETTLED_S = 2.0  # the coarsest timestamps of file systems in use
MAX_ENTRIES, _LIMIT = 4096, 1 << 20  # files, and bytes of the table


class CachedDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: int
    modified_ns: int
    changed_ns: int
    digest: str


class FileDigests:
    """The table at `path`. If it is damaged or not writable, files are read again."""

    def __init__(self, path: Path, settled_s: float = SETTLED_S) -> None:
        self._path, self._settled_s = path, settled_s

    def digest(self, file: Path, state: FileState, report: Report | None = None) -> str:
        """Return the file's digest, by `file_digest` if it is not cached. raises CheckpointError"""
        try:
            key, before = _status(file)
            cached = self._table().get(key)
            as_seen = state == FileState(before["nbytes"], before["modified_ns"])
            if as_seen and cached is not None and cached == CachedDigest(**before, digest=cached.digest):
                return cached.digest
            now_ns = time.time_ns()
            result = file_digest(file, state, report)
            settled = now_ns - max(before["modified_ns"], before["changed_ns"]) >= self._settled_s * 1e9
            if settled and _status(file) == (key, before):
                self._add(key, CachedDigest(**before, digest=result))
        except OSError as error:
            raise unreadable(file, error) from error
        return result

    def _table(self) -> Mapping[str, CachedDigest]:
        try:
            if self._path.stat().st_size > _LIMIT:
                return {}
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, CachedDigest])
        except (OSError, *UNREADABLE):
            return {}

    def _add(self, key: str, entry: CachedDigest) -> None:
        """Add an entry and drop the oldest. If two processes write at once, one reads its file again next time."""
        table = [(k, v) for k, v in self._table().items() if k != key][1 - MAX_ENTRIES :]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, msgspec.json.encode(dict([*table, (key, entry)])))


def _status(file: Path) -> tuple[str, dict[str, int]]:
    status = file.stat()
    times = {"modified_ns": status.st_mtime_ns, "changed_ns": status.st_ctime_ns}
    return f"{status.st_dev}:{status.st_ino}", {"nbytes": status.st_size, **times}


def checkpoint_identity(checkpoint: Checkpoint, cache: Path | None, progress: Progress | None = None) -> str:
    """Return the identity of its whole content. Files that were read before and have not changed are not read again."""
    return checkpoint.identity(*_digests_and_report(checkpoint.tensors, cache, progress))


def folder_identity(folder: Path, tensors: Tensors, cache: Path | None, progress: Progress | None = None) -> str:
    """Return the identity of a checkpoint whose configuration is not read here, as `checkpoint_identity`."""
    digest = tensors.digest(*_digests_and_report(tensors, cache, progress))
    return content_identity(digest, read_files(folder, SMALL_FILES))


def _digests_and_report(tensors: Tensors, cache: Path | None, progress: Progress | None) -> tuple[DigestOf, Report]:
    done, total = 0, sum(file.stat().st_size for file in tensors.files)

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress("reading the checkpoint", done, total)

    return file_digest if cache is None else FileDigests(cache / "digests.json").digest, report
