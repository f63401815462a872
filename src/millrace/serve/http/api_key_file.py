"""A file of API keys: one key per line, followed by its name and its limits.

sk-2f8c...   name=web  requests_per_minute=60  tokens_per_minute=20000  concurrent=4
sk-91d0...   name=operator  role=admin
"""

import codecs
import logging
import re
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millrace.errors import ConfigError, nearest
from millrace.settings import read_bounded

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")
_MAX_BYTES, _MAX_LIMIT = 1 << 20, 10**9
log = logging.getLogger(__name__)
_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key. name: "" if the file has none; limits: those of LIMITS that are set
    is_admin: the key sees the requests of all keys, and may change every model
    """

    secret: bytes = field(repr=False)
    name: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    is_admin: bool = False


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file, one per line; empty lines and lines beginning with # are skipped. raises ConfigError"""
    try:
        data = read_bounded(path, _MAX_BYTES)
        if data.startswith(
            (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        ):  # it would be part of the first key
            raise ConfigError(
                f"{path} begins with a byte order mark", "UTF-8 without one", 'save it as "UTF-8", not "UTF-8 with BOM"'
            )
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes", "one key a line", "name another file")
        lines = data.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys of {path}: {error}", "a text file", "name another file") from None
    keys = [
        _key(f"line {i} of {path}", *line.split())
        for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")
    ]  # fmt: skip
    if not keys:
        raise ConfigError(f"{path} holds no API key", "one key a line", "add a key, or start without the file")
    names = Counter(key.name for key in keys if key.name)
    twice = [name for name, n in names.items() if n > 1]
    if twice:
        raise ConfigError(f"{path} has the name {twice[0]} twice", "a name of its own for each key", "rename one")
    return tuple(keys)


def _key(location: str, secret: str, *words: str) -> ApiKey:
    """Parse a line. Errors never contain the key. raises ConfigError"""
    name, limits, is_admin = "", dict[str, int](), False
    for word in words:
        what, _, value = word.partition("=")
        if what == "name" and _NAME.fullmatch(value):
            name = value
        elif what in LIMITS and value.isascii() and value.isdigit() and 0 < int(value) <= _MAX_LIMIT:
            limits[what] = int(value)
        elif what == "role" and value in ("admin", "user"):
            is_admin = value == "admin"
        elif what == "role":
            raise ConfigError(f"{location}: role is '{value:.40}'", "admin or user", "correct it")
        elif what in ("name", *LIMITS):
            expected = "letters, digits, _, . or -" if what == "name" else f"a number from 1 to {_MAX_LIMIT}"
            raise ConfigError(f"{location}: {what} is '{value:.40}'", expected, "correct it")
        else:
            raise ConfigError(
                f"{location} has something behind its key that is no setting", nearest(what, ("name", "role", *LIMITS)),
                "a key has no spaces; write settings as name=web requests_per_minute=60",
            )  # fmt: skip
    return ApiKey(secret.encode(), name, limits, is_admin)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of a key file. stamp: differs once the file changes; empty for what can be read only once"""

    path: Path
    keys: tuple[ApiKey, ...] = field(repr=False)
    stamp: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "KeyFile":
        """Read a key file. raises ConfigError"""
        stamp = stamp_of(path)  # before it is read: what changes meanwhile is seen later
        keys = read_keys(path)
        if stamp and is_readable_by_all(path):
            log.warning("%s can be read by every user of this machine: chmod 600 %s", path, path)
        return cls(path, keys, stamp)


def is_readable_by_all(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def stamp_of(path: Path) -> tuple[int, ...]:
    try:
        file_stat = path.stat()
    except OSError:
        return (-1,)
    return (file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino) if stat.S_ISREG(file_stat.st_mode) else ()
