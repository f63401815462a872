"""Reads text files to measure on: bounded, UTF-8, not empty."""

from pathlib import Path

from millrace.errors import ConfigError
from millrace.settings import read_bounded


def read_text(file: str | Path, option: str, max_bytes: int, expected: str) -> str:
    """Read a text. option: the flag of the file; expected: kind of text. raises ConfigError if invalid or too long"""
    try:
        data = read_bounded(Path(file), max_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {option} {file}: {error}", "a text file", "check the path") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{option} {file} has more than {max_bytes >> 20} MiB", expected, "give a part of it")
    try:
        content = data.decode("utf-8-sig")  # some programs write a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option} {file} is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}", "UTF-8 text",
            "convert it with iconv",
        ) from None  # fmt: skip
    if not content.strip():
        raise ConfigError(f"{option} {file} is empty", expected, "fill it, or name another file")
    return content
