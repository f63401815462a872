"""Lines of the text log: one for each record, whatever was written into it."""

import json
import logging
import re

import pytest

from millrace.serve.ops.logs import JsonFormatter, TextFormatter, escape

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ")
FORGED = "2026-01-01T00:00:00.000Z ERROR all is lost"


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("millrace.x", logging.WARNING, "x.py", 1, message, arguments, exc_info)


ODD = ["\n", "\r\n", "\x1b[2J", "\x07", "\x00", "\x85", "\u2028", "\u2029", "\u202e", "\u2066", "\x9b31m", "\udc80"]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_name_forges_no_line(odd: str) -> None:
    text = TextFormatter().format(record("loaded %s, version 1", f"m{odd}{FORGED}"))
    assert len(text.splitlines()) == 1 and LINE.match(text)
    assert text.isprintable() and FORGED in text, "it can be read all the same"
    assert json.loads(JsonFormatter().format(record("loaded %s", f"m{odd}")))["message"] == f"loaded m{odd}"


def test_what_can_be_printed_stays_as_it_is() -> None:
    for text in ("model 'é☃' \\n is there", "a\tb", "日本語 🙂"):
        assert escape(text) == text


def test_an_exceptions_words_forge_no_line() -> None:
    try:
        raise ValueError(f"first\n{FORGED}\n\x1b[31m")
    except ValueError as error:
        lines = TextFormatter().format(record("a bug", error=error)).splitlines()
    assert [bool(LINE.match(line)) for line in lines] == [True, *[False] * (len(lines) - 1)]
    assert any(FORGED in line for line in lines[1:]) and all(line.isprintable() for line in lines)
