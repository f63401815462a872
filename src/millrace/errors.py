"""Errors that callers can cause. Each says what was wrong, what was expected, and how to fix it."""

import difflib
from collections.abc import Callable, Collection, Iterable

# Maximum length of each part of a message, in bytes of UTF-8; the middle of a longer one is left out.
LONGEST, _HEAD, _TAIL = 1000, 600, 390


def sanitize(text: str) -> str:
    """Return text from a file or a client in a form that is safe to show in a terminal or a log.

    One line; characters that are not printable are escaped (\\n, \\x1b, \\u202e, \\ud800), and the middle of a long
    text is left out. Idempotent.
    """
    short = _shortened(text)
    return short if short.isprintable() else _shortened("".join(map(_escaped, short)))


def _shortened(text: str) -> str:
    if len(text) <= LONGEST // 4 or (len(text) <= LONGEST and len(_utf8(text)) <= LONGEST):
        return text
    head, tail = _utf8(text[:LONGEST]), _utf8(text[-LONGEST:])
    end, begin = min(_HEAD, len(head)), max(len(tail) - _TAIL, 0)
    while end < len(head) and head[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    while begin < len(tail) and tail[begin] & 0xC0 == 0x80:
        begin += 1
    return f"{_text(head[:end])} ... {_text(tail[begin:])}"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _escaped(c: str) -> str:
    return c if c.isprintable() else c.encode("unicode_escape").decode("ascii")


class MillraceError(Exception):
    """A caller's mistake or a machine's limit; the command line prints it and exits with 2."""

    def __init__(self, what: str, expected: str, fix: str) -> None:
        """Sanitize each part: it may quote a file or a client."""
        self.what, self.expected, self.fix = sanitize(what), sanitize(expected), sanitize(fix)
        super().__init__(self.what, self.expected, self.fix)  # all in args, so it survives pickling between processes

    def reworded(self, reword: Callable[[str], str]) -> None:
        """Reword all parts in the caller's terms, such as arguments instead of flags."""
        self.args = tuple(reword(a) if isinstance(a, str) else a for a in self.args)
        self.what, self.expected, self.fix = map(reword, (self.what, self.expected, self.fix))

    def __str__(self) -> str:
        return f"{self.what}\n  expected: {self.expected}\n  to fix:   {self.fix}"


class CheckpointError(MillraceError):
    """The model's files are missing, damaged, contradictory or of an architecture that is not supported."""


class HubError(MillraceError):
    """A hub id cannot be resolved or downloaded."""


class ConfigError(MillraceError):
    """A setting (flag, argument, environment variable) is unknown or out of range."""


class GraphError(MillraceError):
    """A model written by the user is not a legal graph: wrong shapes, unknown operators, cycles."""


class EngineError(MillraceError):
    """An engine folder is damaged, of another format version, or not an engine at all."""


class MachineError(MillraceError):
    """This machine lacks an instruction set or the memory that is needed (HTTP 503, if a request needs it)."""


class RequestError(MillraceError):
    """One request is wrong (HTTP 400 or 422); other requests are not affected. `param` names the field, if known."""

    def __init__(self, what: str, expected: str, fix: str, param: str | None = None) -> None:
        super().__init__(what, expected, fix)
        self.args = (self.what, self.expected, self.fix, param)
        self.param = param


class ContextError(RequestError):
    """Prompt and answer together are longer than the context (HTTP 400, `context_length_exceeded`)."""


class BusyError(MillraceError):
    """The queue is full or the server is draining (HTTP 429 or 503); retry after `retry_after_s`."""

    def __init__(self, what: str, expected: str, fix: str, retry_after_s: float = 1.0) -> None:
        super().__init__(what, expected, fix)
        self.args = (self.what, self.expected, self.fix, retry_after_s)
        self.retry_after_s = retry_after_s


def engine_stopped_error(reason: str) -> BusyError:
    """Return the error for requests to an engine that has stopped. reason: "" if its loop is only being closed"""
    what = f"the engine has stopped: {reason or 'it is being closed'}"
    return BusyError(what, "a running engine", "restart it; its log says more" if reason else "ask again when it runs")


def check_names(names: Iterable[object], valid_names: Collection[str], where: str, param: str) -> None:
    """Check names that a client sent in its field `param`. raises RequestError for the first one that `where` lacks"""
    for name in names:
        if name not in valid_names:
            raise RequestError(
                f"{where} has no {name!r:.60}", nearest(str(name), valid_names), f"correct {param}", param
            )


# Maximum characters of a name, and number of names, that are compared: it takes long with many of either.
_COMPARED, _MAX_COMPARED = 200, 4000
_ALIKE = 0.75  # difflib's ratio, at most 1: a letter or two differ; with a lower bound, suggestions would be wrong


def close_matches(name: str, valid_names: Iterable[str]) -> str | None:
    """Return the valid name that was probably meant, to suggest it in an error.

    Whether a request with an unknown field is refused is decided more strictly in `serve/http/unknown_fields.py`.
    """
    folded = {n.casefold(): n for n in sorted(valid_names)[:_MAX_COMPARED]}
    close = difflib.get_close_matches(name[:_COMPARED].casefold(), folded, n=1, cutoff=_ALIKE)
    return folded[close[0]] if close else None


def nearest(name: str, valid_names: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """Return `did you mean "top_p"?`, or a short list of the valid names.

    listed: names for that list, if it should not contain all valid names
    """
    names = sorted(valid_names)
    meant = close_matches(name, names)
    if meant is not None:
        return f'did you mean "{meant}"?'
    names = names if listed is None else sorted(listed)
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"one of: {shown}"


def mib(nbytes: float) -> str:
    """Format a number of bytes for an error: 300 B, 4 KiB, 12 MiB, 20.0 GiB."""
    if nbytes < 1 << 10:
        return f"{nbytes:.0f} B"
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:g} KiB"
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 10 << 30 else f"{nbytes / (1 << 20):.0f} MiB"
