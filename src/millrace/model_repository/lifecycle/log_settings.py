"""What of the log is written, as Triton's clients look it up and change it while the server runs."""

import logging
from collections.abc import Mapping

from millrace.settings import LOGGER

FORMATS = ("default", "ISO8601")  # lines have times of the second anyway; the first is what --log-format says
Switch = bool | int | str


class LogSwitches:
    """Of the process's log of this package, which somebody else writes; until they change it, as its level has it."""

    def __init__(self) -> None:
        self._said: dict[str, Switch] = {}

    def told(self) -> dict[str, Switch]:
        level = logging.getLogger(LOGGER).getEffectiveLevel()
        return {
            "log_file": "", "log_info": level <= logging.INFO, "log_warning": level <= logging.WARNING,
            "log_error": level <= logging.ERROR, "log_verbose_level": int(level <= logging.DEBUG),
            "log_format": FORMATS[0], **self._said,
        }  # fmt: skip

    def change(self, said: Mapping[str, Switch]) -> None:
        """said: some of what is told, of its types"""
        self._said = {**self.told(), **said}
        logger = logging.getLogger(LOGGER)
        logger.setLevel(logging.DEBUG if self._said["log_verbose_level"] else logging.INFO)
        for handler in logger.handlers:  # a filter of the logger would not see what comes from those below it
            handler.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """What handlers ask of each line."""
        name = next((name for level, name in _NAMES if record.levelno >= level), "log_verbose_level")
        return bool(self._said[name])

    def close(self) -> None:
        for handler in logging.getLogger(LOGGER).handlers:
            handler.removeFilter(self)


_NAMES = ((logging.ERROR, "log_error"), (logging.WARNING, "log_warning"), (logging.INFO, "log_info"))
