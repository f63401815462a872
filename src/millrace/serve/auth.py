"""API keys: who may ask. Compared in constant time, and with every key, so that the time tells nothing."""

import codecs
import hmac
from pathlib import Path

from starlette.types import Scope

from millrace.errors import ConfigError
from millrace.serve.errors import HttpError
from millrace.serve.wire import header

_BEARER = b"bearer "
_MAX_BYTES = 1 << 20


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and lines that begin with # are skipped. raises ConfigError"""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
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
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key", "one key a line", "add a key, or start without the file")
    return keys


class Keys:
    """`Authorization: Bearer <key>`, for the routes that are protected."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, scope: Scope) -> None:
        """raises HttpError with 401"""
        if not self._keys:
            return
        given = header(scope, b"authorization") or b""
        token = given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else b""
        if not any([hmac.compare_digest(token, key) for key in self._keys]):  # a list: all of them, always
            what = "the API key is wrong" if given else "the API key is missing"
            error = HttpError(
                401, "invalid_api_key", what, "Authorization: Bearer <key>", "send a key that the server was given"
            )
            error.headers["www-authenticate"] = "Bearer"
            raise error
