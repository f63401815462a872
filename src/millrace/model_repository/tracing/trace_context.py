"""Which trace a client's request belongs to: W3C's headers `traceparent` and `tracestate`, over HTTP and gRPC.

Source: W3C Trace Context, level 1, sections 3.2 and 3.3. What is wrong is as though it was not there, as is said there.
"""

import re
from dataclasses import dataclass

PARENT, STATE = "traceparent", "tracestate"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^,]*)?")  # a comma: it came twice
_MOST_STATE, _MOST_MEMBERS = 512, 32  # characters, which whoever passes it on must keep; vendors
_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(rf"({_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Parent:
    """The span that a client asks from. is_sampled: it is recorded. state: `tracestate`, to be passed on as it is"""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""


def parent_of(parent: bytes | str | None, state: bytes | str | None) -> Parent | None:
    """By the two headers."""
    found = _FORM.fullmatch(_text(parent).strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED), _state_of(_text(state).strip()))


def _state_of(text: str) -> str:
    """As it is; "" where it is wrong, and goes nowhere: OpenTelemetry would tell the log of each."""
    if len(text) > _MOST_STATE:
        return ""
    members = [member for one in text.split(",") if (member := one.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {member[1] for member in found if member is not None}
    return text if len(keys) == len(members) <= _MOST_MEMBERS else ""


def _text(header: bytes | str | None) -> str:
    return header.decode("latin-1") if isinstance(header, bytes) else header or ""
