"""Every mistake that a caller can make ends in one of these: what was wrong, what was expected, how to mend it."""

import difflib
from collections.abc import Callable, Collection, Iterable

# Bytes, in UTF-8, of each part of a message; of what is longer the middle is left out.
LONGEST, _HEAD, _TAIL = 1000, 600, 390


def sanitize(text: str) -> str:
    """`text` as it may be shown: what came from a file or a client cannot steer a terminal, nor fill a screen or a log.

    It is one line; what is not printable is escaped (\\n, \\x1b, \\u202e, \\ud800). Once is as good as twice.
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

    def __init__(self, what: str, expected: str, mend: str) -> None:
        """Each part may hold what came from outside, as it is: here it becomes `sanitize`."""
        self.what, self.expected, self.mend = sanitize(what), sanitize(expected), sanitize(mend)
        super().__init__(self.what, self.expected, self.mend)  # all in args, so it survives pickling between processes

    def reworded(self, reword: Callable[[str], str]) -> None:
        """Says it in the caller's own words, such as arguments instead of flags."""
        self.args = tuple(reword(a) if isinstance(a, str) else a for a in self.args)
        self.what, self.expected, self.mend = map(reword, (self.what, self.expected, self.mend))

    def __str__(self) -> str:
        return f"{self.what}\n  expected: {self.expected}\n  to mend:  {self.mend}"


class CheckpointError(MillraceError):
    """The model's files are missing, damaged, contradictory or of an architecture that is not supported."""


class HubError(MillraceError):
    """A hub id cannot be resolved or downloaded."""


class ConfigError(MillraceError):
    """A setting of ours (flag, argument, environment variable) is unknown or out of range."""


class GraphError(MillraceError):
    """A model written by the user is not a legal graph: wrong shapes, unknown operators, cycles."""


class EngineError(MillraceError):
    """An engine folder is damaged, of another format version, or not an engine at all."""


class MachineError(MillraceError):
    """This machine lacks an instruction set or the memory that was asked for (HTTP 503, where a request needs it)."""


class RequestError(MillraceError):
    """One request is wrong (HTTP 400 or 422); nobody else's is touched. `param` names the field where known."""

    def __init__(self, what: str, expected: str, mend: str, param: str | None = None) -> None:
        super().__init__(what, expected, mend)
        self.args = (self.what, self.expected, self.mend, param)
        self.param = param


class ContextError(RequestError):
    """Prompt and answer are longer together than the context (HTTP 400, `context_length_exceeded`)."""


class BusyError(MillraceError):
    """The queue is full or the server is draining (HTTP 429 or 503); come back in `retry_after_s`."""

    def __init__(self, what: str, expected: str, mend: str, retry_after_s: float = 1.0) -> None:
        super().__init__(what, expected, mend)
        self.args = (self.what, self.expected, self.mend, retry_after_s)
        self.retry_after_s = retry_after_s


def engine_stopped_error(reason: str) -> BusyError:
    """reason: "" where the loop is only being closed"""
    what = f"the engine has stopped: {reason or 'it is being closed'}"
    return BusyError(what, "a running engine", "restart it; its log says more" if reason else "ask again when it runs")


def check_names(names: Iterable[object], valid_names: Collection[str], where: str, param: str) -> None:
    """What a client may name in `where`, of its field `param`. raises RequestError for the first that is not known"""
    for name in names:
        if name not in valid_names:
            raise RequestError(
                f"{where} has no {name!r:.60}", nearest(str(name), valid_names), f"correct {param}", param
            )


# Characters of a name, and names: comparing takes long with many of either.
_COMPARED, _MAX_COMPARED = 200, 4000
_ALIKE = 0.75  # of 1, as difflib measures it: a letter or two; with less, advice points at what was not meant


def close_matches(name: str, valid_names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, to suggest it in an error.

    Whether a field of a request is refused at all is a stricter question: `serve/http/unknown_fields.py`.
    """
    folded = {n.casefold(): n for n in sorted(valid_names)[:_MAX_COMPARED]}
    close = difflib.get_close_matches(name[:_COMPARED].casefold(), folded, n=1, cutoff=_ALIKE)
    return folded[close[0]] if close else None


def nearest(name: str, valid_names: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """`did you mean "top_p"?`, or a short list of what is known. listed: the list, where not all need a mention"""
    names = sorted(valid_names)
    meant = close_matches(name, names)
    if meant is not None:
        return f'did you mean "{meant}"?'
    names = names if listed is None else sorted(listed)
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"one of: {shown}"


def mib(nbytes: float) -> str:
    """As errors say memory."""
    if nbytes < 1 << 10:
        return f"{nbytes:.0f} B"
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:g} KiB"
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 10 << 30 else f"{nbytes / (1 << 20):.0f} MiB"
