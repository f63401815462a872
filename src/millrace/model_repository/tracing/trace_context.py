"""Parsing of the W3C headers `traceparent` and `tracestate`, over HTTP and gRPC.

Source: W3C Trace Context, level 1, sections 3.2 and 3.3. As specified there, invalid headers are ignored.
"""

import re
from dataclasses import dataclass

PARENT, STATE = "traceparent", "tracestate"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^,]*)?")  # a comma: repeated header
_MAX_STATE, _MAX_MEMBERS = 512, 32  # characters that must be propagated; list members
_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(rf"({_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Parent:
    """The client's span. is_sampled: whether it is recorded. state: `tracestate`, propagated unchanged"""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""


def parse_parent(parent: bytes | str | None, state: bytes | str | None) -> Parent | None:
    """Parse the two headers; None without a valid parent."""
    match = _FORM.fullmatch(_text(parent).strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED), _state_of(_text(state).strip()))


def _state_of(text: str) -> str:
    """Return a valid tracestate unchanged, otherwise "", because OpenTelemetry would log each invalid one."""
    if len(text) > _MAX_STATE:
        return ""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {member[1] for member in matches if member is not None}
    return text if len(keys) == len(members) <= _MAX_MEMBERS else ""


def _text(header: bytes | str | None) -> str:
    return header.decode("latin-1") if isinstance(header, bytes) else header or ""
