"""Log settings that Triton's clients can read and change while the server runs."""

import logging
from collections.abc import Mapping

from millrace.settings import LOGGER

FORMATS = ("default", "ISO8601")  # accepted; "default" is the format of --log-format, always with timestamps
Switch = bool | int | str


class LogSettings:
    """Settings of this package's log; before the first change they follow the logger's level."""

    def __init__(self) -> None:
        self._settings: dict[str, Switch] = {}

    def to_dict(self) -> dict[str, Switch]:
        level = logging.getLogger(LOGGER).getEffectiveLevel()
        return {
            "log_file": "", "log_info": level <= logging.INFO, "log_warning": level <= logging.WARNING,
            "log_error": level <= logging.ERROR, "log_verbose_level": int(level <= logging.DEBUG),
            "log_format": FORMATS[0], **self._settings,
        }  # fmt: skip

    def change(self, changes: Mapping[str, Switch]) -> None:
        """Change settings. changes: keys and value types as in `to_dict`"""
        self._settings = {**self.to_dict(), **changes}
        logger = logging.getLogger(LOGGER)
        logger.setLevel(logging.DEBUG if self._settings["log_verbose_level"] else logging.INFO)
        for handler in logger.handlers:  # a filter of the logger would not see records of child loggers
            handler.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written (logging.Filter protocol)."""
        name = next((name for level, name in _NAMES if record.levelno >= level), "log_verbose_level")
        return bool(self._settings[name])

    def close(self) -> None:
        for handler in logging.getLogger(LOGGER).handlers:
            handler.removeFilter(self)


_NAMES = ((logging.ERROR, "log_error"), (logging.WARNING, "log_warning"), (logging.INFO, "log_info"))
