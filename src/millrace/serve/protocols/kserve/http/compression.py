"""gzip and deflate of bodies, with a bound on the decompressed size."""

import zlib

from millrace.model_repository.request.status_code import Code, StatusError, invalid

CODINGS = {"gzip": 31, "deflate": 15}  # zlib's window bits
PIECE, _AT_A_TIME = 1 << 20, 1 << 16  # bytes that come out, and that go in
_QUICK = 1  # a level that costs about what it saves on a local network


def too_large(what: str, n: object, limit: int) -> StatusError:
    return invalid(
        f"{what} of {n} bytes exceeds the maximum allowed value of {limit} bytes. Use --http-max-input-size to "
        "increase the limit."
    )


def load_too_large(n: object, limit: int) -> StatusError:
    """Return the error of a load request that is too large."""
    return invalid(
        f"request JSON size of {n} bytes exceeds the maximum allowed input size. It is {limit} bytes: use "
        "--http-max-input-size to increase the limit."
    )


def raw_too_large(n: object, limit: int) -> StatusError:
    """Return the error of a raw binary request that is too large."""
    return invalid(
        f"Raw input has a byte_size ({n} bytes) that exceeds the maximum allowed value of {limit} bytes. Use "
        "--http-max-input-size to increase the limit."
    )


class BodyDecompressor:
    """Decompressor of a body, piece by piece, so that its size can be counted as it grows."""

    def __init__(self, body: bytes, coding: str, limit: int) -> None:
        """coding: the value of Content-Encoding. raises StatusError for an unknown one"""
        if coding not in CODINGS:
            raise StatusError(Code.UNSUPPORTED, "Unsupported compression type")
        self._body, self._coding, self._limit = memoryview(body), coding, limit
        self._reader = zlib.decompressobj(CODINGS[coding])
        self._n_read = self._n_written = 0

    @property
    def is_done(self) -> bool:
        return self._reader.eof

    def piece(self) -> bytes:
        """Return the next piece, of at most PIECE bytes. raises StatusError"""
        parts: list[bytes] = []
        room = PIECE
        while room and not self._reader.eof:
            data: bytes | memoryview = self._reader.unconsumed_tail
            if not data:
                data = self._body[self._n_read : self._n_read + _AT_A_TIME]
                self._n_read += len(data)
            try:
                part = self._reader.decompress(data, room)
            except zlib.error as error:
                raise self._broken(str(error)) from None
            if not part and not data and not self._reader.eof:
                raise self._broken("it ends too early")
            parts.append(part)
            room -= len(part)
        self._n_written += PIECE - room
        if self._n_written > self._limit:
            raise too_large("decompressed request JSON size", f"more than {self._limit}", self._limit)
        if self._reader.eof and (self._reader.unused_data or self._n_read < len(self._body)):
            raise self._broken("there are bytes after its end")
        return b"".join(parts)

    def _broken(self, reason: str) -> StatusError:
        return invalid(f"failed to decompress the {self._coding} body: {reason}")


def choose_coding(accepted: str) -> str:
    """Return the coding of Accept-Encoding with the largest weight, the first of several; "identity": none."""
    best, best_weight = "identity", 0.0
    for part in accepted.split(","):
        name, _, weight = part.strip().partition(";q=")
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            continue
        if value > best_weight and (name in CODINGS or name == "identity"):
            best, best_weight = name, value
    return best


def compress(body: bytes, coding: str) -> bytes:
    """Compress a body. coding: one of CODINGS"""
    writer = zlib.compressobj(_QUICK, zlib.DEFLATED, CODINGS[coding])
    return writer.compress(body) + writer.flush()
