"""Pages that commands write: one of ours is made anew, whatever else is there stays."""

from pathlib import Path

from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError
from millrace.report.page import is_millrace_page


def check_page(file: Path) -> None:
    """raises ConfigError where something else is"""
    try:
        if file.exists() and not (file.is_file() and is_millrace_page(file)):
            raise ConfigError(
                f"{file} is already there, and is no page of millrace", "a new file, or one that was written so",
                "name another; nothing was written",
            )  # fmt: skip
    except OSError as error:
        raise _unwritten(file, error) from error


def write_page(file: Path, page: str) -> int:
    """Its bytes. raises ConfigError, also where something else is"""
    check_page(file)
    content = page.encode()
    try:
        write_whole(file, content)
    except OSError as error:
        raise _unwritten(file, error) from error
    return len(content)


def _unwritten(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {file}: {error}", "a file in a folder that exists", "name another")
