"""HTML pages written by commands: our own pages are overwritten, other files are kept."""

from pathlib import Path

from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError
from millrace.report.page import is_millrace_page


def check_page(file: Path) -> None:
    """Refuse to overwrite a file that is not one of our pages. raises ConfigError"""
    try:
        if file.exists() and not (file.is_file() and is_millrace_page(file)):
            raise ConfigError(
                f"{file} is already there, and is no page of millrace", "a new file, or one that was written so",
                "name another; nothing was written",
            )  # fmt: skip
    except OSError as error:
        raise _unwritten(file, error) from error


def write_page(file: Path, page: str) -> int:
    """Write a page and return its bytes. raises ConfigError"""
    check_page(file)
    content = page.encode()
    try:
        write_whole(file, content)
    except OSError as error:
        raise _unwritten(file, error) from error
    return len(content)


def _unwritten(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {file}: {error}", "a file in a folder that exists", "name another")
