"""Templates of repeated requests: the bytes of HTTP head and JSON that stay the same, with holes.

Clients number their requests: the JSON's `id` and the header `x-request-id` differ each time, and the two lengths with
them. Pieces lie between these holes. A packet with the same pieces, and plain text or a number in each hole, is the
same request with other values, which is decided by comparing bytes, without parsing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.serve.http.request_bodies import FREE_BYTES
from millrace.serve.protocols.kserve.http.infer_request import HEADER, id_place

MAX_HEAD_BYTES = 4 << 10  # of a head
END = b"\r\n\r\n"
LENGTH, JSON_LENGTH, REQUEST_ID, ID = b"content-length", HEADER.lower().encode(), b"x-request-id", b"id"
# The values that holes may have; none contains its terminator. Other ids (escapes, beyond ASCII) belong to the pieces.
_HOLES = {
    LENGTH: re.compile(rb"[1-9][0-9]{0,8}"), JSON_LENGTH: re.compile(rb"0|[1-9][0-9]{0,8}"),
    REQUEST_ID: re.compile(rb"[!-~]+"), ID: re.compile(rb"[ !#-\[\]-~]+"),
}  # fmt: skip
_LINES = re.compile(
    rb"\r\n(" + b"|".join((LENGTH, JSON_LENGTH, REQUEST_ID)) + rb"):[ \t]*([!-~]+)(?=\r\n)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class FilledTemplate:
    """The head of one packet. end: its length; fixed: the bytes outside the holes for ids, and where; holes: positions

    The next packet mostly has the same length, and then the same lengths in its head, so nothing has to be parsed.
    """

    n_bytes: int  # of the packet
    end: int
    fixed: Sequence[tuple[int, bytes]]
    holes: Sequence[tuple[bytes, int, int]]

    def match(self, packet: bytes) -> dict[bytes, bytes] | None:
        """Return the values in the holes of a packet like this one; None if it differs."""
        if len(packet) != self.n_bytes:
            return None
        for at, piece in self.fixed:
            if not packet.startswith(piece, at):
                return None
        values = {}
        for hole, begin, end in self.holes:
            if _HOLES[hole].fullmatch(packet, begin, end) is None:
                return None
            values[hole] = packet[begin:end]
        return values


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """A template. pieces: one more than there are holes; n_json: bytes of the JSON's pieces"""

    pieces: tuple[bytes, ...]
    holes: tuple[bytes, ...]
    n_json: int

    def fill(self, packet: bytes) -> FilledTemplate | None:
        """Return the template filled with a packet's values; None if its head differs."""
        at, spans = 0, list[tuple[bytes, int, int]]()
        for piece, hole in zip(self.pieces, self.holes, strict=False):
            there = _HOLES[hole].match(packet, at + len(piece)) if packet.startswith(piece, at) else None
            if there is None:
                return None
            spans.append((hole, *there.span()))
            at = there.end()
        end = at + len(self.pieces[-1])
        if not packet.startswith(self.pieces[-1], at) or end > MAX_HEAD_BYTES:
            return None
        values = {hole: packet[begin:stop] for hole, begin, stop in spans}
        n_json = self.n_json + len(values.get(ID, b""))
        n_body = len(packet) - end + n_json
        if int(values[JSON_LENGTH]) != n_json or int(values[LENGTH]) != n_body or n_body > FREE_BYTES:
            return None
        holes = [span for span in spans if span[0] in (ID, REQUEST_ID)]
        begins, ends = [0, *(stop for _, _, stop in holes)], [*(begin for _, begin, _ in holes), end]
        fixed = [(begin, packet[begin:stop]) for begin, stop in zip(begins, ends, strict=True)]
        return FilledTemplate(len(packet), end, fixed, holes)


def head_of(packet: bytes, headers: Mapping[bytes, bytes]) -> RequestTemplate | None:
    """Return the template of a request that is all of `packet`; None if it cannot be remembered.

    headers: as parsed
    """
    at = packet.find(END) + len(END)
    lengths = [headers.get(name, b"") for name in (JSON_LENGTH, LENGTH)]
    if not all(_HOLES[LENGTH].fullmatch(length) or length == b"0" for length in lengths):
        return None
    end = at + int(lengths[0])
    if end > min(len(packet), MAX_HEAD_BYTES) or len(packet) - at != int(lengths[1]):
        return None
    lines = ((m[1].lower(), m) for m in _LINES.finditer(packet, 0, at))
    spans = [(m.start(2), m.end(2), name) for name, m in lines if headers.get(name) == m[2]]  # as the parser has it
    place = id_place(packet[at:end])
    if place is not None and _HOLES[ID].fullmatch(packet, at + place[0], at + place[1]):
        spans.append((at + place[0], at + place[1], ID))
    holes = tuple(hole for _, _, hole in spans)
    if not {LENGTH, JSON_LENGTH} <= set(holes):
        return None
    begins, ends = [0, *(stop for _, stop, _ in spans)], [*(begin for begin, _, _ in spans), end]
    pieces = tuple(packet[begin:stop] for begin, stop in zip(begins, ends, strict=True))
    n_id = sum(stop - begin for begin, stop, hole in spans if hole == ID)
    template = RequestTemplate(pieces, holes, end - at - n_id)
    return template if template.fill(packet) is not None else None
