"""gzip and deflate of bodies, bounded: what is small on the wire may be large in memory."""

import zlib

from millrace.serve.inference.status import Code, StatusError, invalid

CODINGS = {"gzip": 31, "deflate": 15}  # zlib's window bits
_QUICK = 1  # a level that costs about what it saves on a local network


def too_large(what: str, n: object, most: int) -> StatusError:
    return invalid(
        f"{what} of {n} bytes exceeds the maximum allowed input size of {most} bytes. Use --http-max-input-size to "
        "increase the limit."
    )


def decoded(body: bytes, coding: str, most: int) -> bytes:
    """coding: of the header Content-Encoding. raises StatusError"""
    if coding in ("", "identity"):
        return body
    if coding not in CODINGS:
        raise StatusError(Code.UNSUPPORTED, "Unsupported compression type")
    reader = zlib.decompressobj(CODINGS[coding])
    try:
        found = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise invalid(f"failed to decompress the {coding} body: {error}") from None
    if len(found) > most:
        raise too_large("decompressed request JSON size", f"more than {most}", most)
    if not reader.eof:
        raise invalid(f"failed to decompress the {coding} body: it ends too early")
    return found


def chosen(accepted: str) -> str:
    """Of the header Accept-Encoding: the one with the largest weight, the first of several; "identity": none."""
    best, most = "identity", 0.0
    for part in accepted.split(","):
        name, _, weight = part.strip().partition(";q=")
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            continue
        if value > most and (name in CODINGS or name == "identity"):
            best, most = name, value
    return best


def encoded(body: bytes, coding: str) -> bytes:
    """coding: one of CODINGS"""
    writer = zlib.compressobj(_QUICK, zlib.DEFLATED, CODINGS[coding])
    return writer.compress(body) + writer.flush()
