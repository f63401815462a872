"""Log formats: text for people, JSON for machines. `http_request.py` defines the line of a request."""

import json
import logging
import re
import time
from functools import lru_cache
from typing import Literal

from millrace.serve.http.http_request import LOG_ATTRIBUTE, BatchedRequestLogs, RequestLog
from millrace.settings import LOGGER

# Control characters, ends of lines and paragraphs, marks of text direction, lone surrogates.
_ODD = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class RateLimitedLog:
    """Log of warnings that clients can trigger: each text at most once in `every_s`, with the number suppressed."""

    def __init__(self, log: logging.Logger, every_s: float = 10.0) -> None:
        self._log, self._every_s = log, every_s
        self._quiet: dict[str, tuple[float, int]] = {}  # text to (until when nothing is said, how many were not)

    def warn(self, text: str) -> None:
        """Log a warning. text: one of a few constant texts, without anything that a client wrote"""
        now_s = time.monotonic()
        until_s, n_unsaid = self._quiet.get(text, (0.0, 0))
        if now_s < until_s:
            self._quiet[text] = (until_s, n_unsaid + 1)
            return
        self._quiet[text] = (now_s + self._every_s, 0)
        self._log.warning("%s%s", text, f" ({n_unsaid} more since the last such line)" if n_unsaid else "")


class TextFormatter(logging.Formatter):
    """Formatter of lines such as `2026-01-31T12:00:00Z INFO POST /v1/completions status=200 request_id=...`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = getattr(record, LOG_ATTRIBUTE, None)
        if isinstance(entry, BatchedRequestLogs):
            return _text(record.levelname, entry)
        line = f"{_time(record.created)} {record.levelname} {escape(record.getMessage())}"
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).split("\n")  # whose messages, too, come from outside
        return "\n".join((line, *(f"  {escape(trace_line)}" for trace_line in trace)))


def escape(text: str) -> str:
    """Escape line ends and control characters that affect a terminal: `\\n`, `\\x1b`, `\\u2028`."""
    return _ODD.sub(lambda odd: odd[0].encode("unicode_escape").decode(), text)


def _text(level: str, lines: BatchedRequestLogs) -> str:
    """Format lines as RequestLog does, in a fifth of the time."""
    texts, second_s, second = [], -1, ""
    for at_s, method, path, request_id, status, total_ms, error in lines:
        if not 0 <= at_s - second_s < 1:
            second_s = int(at_s)
            second = _second(second_s)
        begin = f"{second}.{int((at_s - second_s) * 1000):03d}Z {level} "
        if error:
            texts.append(begin + str(RequestLog(method, path, request_id, status, total_ms, error=error)))
        else:
            texts.append(f"{begin}{method} {path} request_id={request_id} status={status} total_ms={total_ms:.1f}")
    return "\n".join(texts)


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line, with the fields of a request as keys."""

    def format(self, record: logging.LogRecord) -> str:
        entry = getattr(record, LOG_ATTRIBUTE, None)
        if isinstance(entry, BatchedRequestLogs):
            return "\n".join(json.dumps(self._head(record, at_s) | event.to_dict()) for at_s, event in entry.entries())
        line = self._head(record, record.created)
        line |= entry.to_dict() if isinstance(entry, RequestLog) else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)

    def _head(self, record: logging.LogRecord, at_s: float) -> dict[str, object]:
        return {"time": _time(at_s), "level": record.levelname.lower(), "logger": record.name}


class Logging:
    """Context manager that sends this package's log to stderr, and restores the configuration afterwards."""

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
        if name != LOGGER or logger.level == logging.NOTSET:  # keep a level that the program has set, such as DEBUG
            logger.setLevel(level)


def _time(at_s: float) -> str:
    return f"{_second(int(at_s))}.{int(at_s % 1 * 1000):03d}Z"


@lru_cache(2)
def _second(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
