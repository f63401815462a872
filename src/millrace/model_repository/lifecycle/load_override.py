"""Config and file overrides of a load request."""

import base64
import binascii
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.model_repository.request.status_code import Code, StatusError, invalid

PREFIX = "file:"  # prefix of a file parameter: file:1/model.onnx
Files = Mapping[str, bytes | str]  # by path below the model's folder; str values are base64
MAX_FILES, _MAX_NAME_BYTES = 1000, 255


@dataclass(frozen=True, slots=True)
class LoadOverride:
    """Overrides of a load. config: as the text of config.pbtxt. folder: None for the model's own folder"""

    config: bytes | None = None
    folder: "OverrideFolder | None" = None


class OverrideFolder:
    """A temporary folder with a model's override files, deleted after its last holder releases it."""

    def __init__(self, model: str, files: Files) -> None:
        """Write the files. raises StatusError"""
        if len(files) > MAX_FILES:
            raise invalid(f"{len(files)} files to load model '{model}' with, at most {MAX_FILES} are taken")
        for path in files:
            check_path(path)
        decoded = {path: _bytes(path, data) for path, data in files.items()}
        self._lock, self._n_holders = threading.Lock(), 1
        try:
            self.root = Path(tempfile.mkdtemp(prefix="millrace-load-"))
        except OSError as error:
            raise _write_error(model, error) from None
        self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)  # at exit in any case
        try:
            for path, data in decoded.items():
                file = self.root / model / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        except OSError as error:
            self.release()
            raise _write_error(model, error) from None

    def hold(self) -> None:
        with self._lock:
            self._n_holders += 1

    def release(self) -> None:
        """Release the folder, from any thread; the last release deletes it."""
        with self._lock:
            self._n_holders -= 1
            is_over = not self._n_holders
        if is_over:
            self._remove()


def check_path(path: str) -> None:
    """Check that a path stays below the model's folder. raises StatusError"""
    parts = path.split("/")
    if (
        any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME_BYTES for part in parts)
        or "\0" in path
        or "\\" in path
    ):
        raise invalid(f"'{PREFIX}{path:.200}' is no path below a model's folder, as 1/model.onnx is")
    if path == "config.pbtxt":
        raise invalid(f"'{PREFIX}{path}' is not taken: the configuration comes as the parameter 'config'")


def _bytes(path: str, data: bytes | str) -> bytes:
    """Decode the data of a file. raises StatusError"""
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"'{PREFIX}{path:.200}' is not base64: {error}") from None


def _write_error(model: str, error: OSError) -> StatusError:
    return StatusError(Code.INTERNAL, f"failed to write the files to load model '{model}' with: {error.strerror}")
