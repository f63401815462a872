"""The log: one line a request, without its text; as text for people or JSON for machines."""

import json
import logging
import re
import time
from dataclasses import dataclass, fields
from typing import Literal

LOGGER = "millrace"
ACCESS = "millrace.serve.access"
_PLAIN = re.compile(r"[!-~]+")
_REQUEST = "request"  # attribute of a LogRecord that carries a RequestLog
QUIET_PATHS = ("/health", "/v1/health/", "/metrics", "/v1/metrics")  # asked every few seconds: logged at DEBUG


@dataclass(slots=True)
class RequestLog:
    """Everything that is known of one request but its text; None: does not apply."""

    method: str
    path: str  # as it was sent, percent signs and all, so that it cannot break the line
    request_id: str
    status: int | None = None
    total_ms: float | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    finish_reason: str | None = None
    ignored: str | None = None  # fields that change nothing here
    error: str | None = None  # why it was refused, in short

    def known(self) -> dict[str, object]:
        """Rounded, and without what does not apply."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {k: round(v, 1) if isinstance(v, float) else v for k, v in values if v is not None}

    def __str__(self) -> str:
        rest = (f"{key}={_quoted(value)}" for key, value in self.known().items() if key not in ("method", "path"))
        return " ".join((self.method, self.path, *rest))


def _quoted(value: object) -> object:
    """What clients write stays one value on one line: quoted where it has white space, control characters escaped."""
    return json.dumps(value) if isinstance(value, str) and not _PLAIN.fullmatch(value) else value


def log_request(entry: RequestLog) -> None:
    quiet = entry.path.startswith(QUIET_PATHS) and (entry.status or 0) < 400
    level = logging.DEBUG if quiet else logging.INFO
    logging.getLogger(ACCESS).log(level, "%s", entry, extra={_REQUEST: entry})


class Seldom:
    """Warnings that strangers could multiply: each text at most once in `every_s`, with how many it stands for."""

    def __init__(self, log: logging.Logger, every_s: float = 10.0) -> None:
        self._log, self._every_s = log, every_s
        self._quiet: dict[str, tuple[float, int]] = {}  # text to (until when nothing is said, how many were not)

    def warn(self, text: str) -> None:
        """`text` is one of a few: nothing that a client wrote."""
        now_s = time.monotonic()
        until_s, n_unsaid = self._quiet.get(text, (0.0, 0))
        if now_s < until_s:
            self._quiet[text] = (until_s, n_unsaid + 1)
            return
        self._quiet[text] = (now_s + self._every_s, 0)
        self._log.warning("%s%s", text, f" ({n_unsaid} more since the last such line)" if n_unsaid else "")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00Z INFO POST /v1/completions status=200 request_id=...`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line; the fields of a request are keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        entry = getattr(record, _REQUEST, None)
        line |= entry.known() if isinstance(entry, RequestLog) else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Logging:
    """`with Logging("json"):` sends this package's log to stderr, and puts everything back afterwards."""

    def __init__(self, form: Literal["text", "json"]) -> None:
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
        self._levels: dict[str, int] = {}

    def __enter__(self) -> None:
        ours = logging.getLogger(LOGGER)
        self._set_level(LOGGER, logging.INFO)
        # uvicorn reports what a closed connection looks like from below; the edge has said it better by then
        self._set_level("uvicorn.error", logging.CRITICAL)
        ours.addHandler(self._handler)

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger(LOGGER).removeHandler(self._handler)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def _set_level(self, name: str, level: int) -> None:
        logger = logging.getLogger(name)
        self._levels[name] = logger.level
        if name != LOGGER or logger.level == logging.NOTSET:  # whoever asked for DEBUG gets it
            logger.setLevel(level)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
