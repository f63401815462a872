"""Drawings as pictures, read back by a decoder of PNG that is written here: sizes, colours, and letters."""

import importlib.util
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import resvg_py

from millrace.errors import ConfigError, MachineError
from millrace.report import png as drawing
from millrace.report.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Plot
from millrace.report.png import ZOOM, check_png, has_no_font, png

BLUE, ORANGE, WHITE = (0x3D, 0x7F, 0xC4), (0xD0, 0x74, 0x3C), (0xFF, 0xFF, 0xFF)  # of the style sheet, by day
needs_font = pytest.mark.skipif(has_no_font(), reason="no font here")
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def pixels(data: bytes) -> Pixels:
    """(height, width, 4) of an eight-bit RGBA file."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body = 8, b""
    while at < len(data):
        (n,), kind = struct.unpack_from(">I", data, at), data[at + 4 : at + 8]
        part = data[at + 8 : at + 8 + n]
        assert struct.unpack_from(">I", data, at + 8 + n)[0] == zlib.crc32(kind + part)
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack_from(">IIBB", part)
            assert (depth, colour) == (8, 6)
        body += part if kind == b"IDAT" else b""
        at += 12 + n
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + 4 * width)
    found = np.zeros((height, 4 * width), np.uint8)
    above = np.zeros(4 * width, np.uint8)
    for y, line in enumerate(lines):
        found[y] = above = _unfiltered(int(line[0]), line[1:], above)
    return found.reshape(height, width, 4)


def _unfiltered(kind: int, line: Any, above: Any) -> Any:
    if kind == 2:
        return line + above
    if kind == 1:
        return np.cumsum(line.reshape(-1, 4), axis=0, dtype=np.uint8).reshape(-1)
    out = line.astype(np.int64)
    for x in range(len(out)):
        left, up = (int(out[x - 4]) if x >= 4 else 0), int(above[x])
        corner = int(above[x - 4]) if x >= 4 else 0
        if kind == 3:
            out[x] = (out[x] + (left + up) // 2) % 256
        elif kind == 4:
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda v: abs(guess - v))
            out[x] = (out[x] + nearest) % 256
    return out.astype(np.uint8)


def plot() -> Plot:
    return Plot(Axis("", 0, 10, ("",)), Axis("", 0, 10, ("",)))


def at(x: float, y: float) -> tuple[int, int]:
    """Row and column of a point of the data."""
    across = LEFT + x / 10 * (WIDTH - RIGHT - LEFT)
    down = HEIGHT - BOTTOM - y / 10 * (HEIGHT - BOTTOM - TOP)
    return round(ZOOM * down), round(ZOOM * across)


def test_shapes_are_where_the_data_is_in_the_colours_of_the_day() -> None:
    drawn = plot()
    drawn.box((1, 2), (4, 8), 0)
    drawn.line([6, 9], [5, 5], 1)
    found = pixels(png(drawn.svg("x")))
    assert found.shape == (ZOOM * HEIGHT, ZOOM * WIDTH, 4)
    for x, y, colour in ((1.1, 2.2, BLUE), (3.9, 7.8, BLUE), (7.5, 5, ORANGE), (5, 8, WHITE), (5, 2, WHITE)):
        assert tuple(found[at(x, y)][:3]) == colour, (x, y)


@needs_font
def test_text_is_drawn() -> None:
    bare, lettered = plot(), plot()
    lettered.text(5, 5, "mill")
    difference = np.argwhere((pixels(png(bare.svg("x"))) != pixels(png(lettered.svg("x")))).any(axis=2))
    row, column = at(5, 5)
    assert len(difference) > 50 and abs(difference.mean(axis=0) - (row - 18, column + 30)).max() < 40


@needs_font
def test_a_machine_without_fonts_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As resvg draws there: no letter leaves a trace."""
    check_png()
    bytes_of = resvg_py.svg_to_bytes
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda **more: bytes_of(**more, skip_system_fonts=True))
    drawing.has_no_font.cache_clear()
    with pytest.raises(MachineError, match="fonts-dejavu-core"):
        check_png()
    drawing.has_no_font.cache_clear()


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_png()
    assert 'pip install "millrace[png]"' in str(caught.value)
