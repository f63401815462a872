"""A page's drawing as a picture, for slides and chats: by resvg, which is an extra, in the colours of the day.

resvg knows no variables of CSS; they are put in place of their names here. It draws text with the machine's fonts.
"""

import importlib.util
import re
from functools import cache
from pathlib import Path

from millrace.errors import ConfigError, MachineError

EXTRA = "millrace[png]"
ZOOM = 2.0  # pixels for each unit of the drawing: 2,160 across
_FAMILY = "DejaVu Sans"  # where it is there; else another that has the letters
_STYLE = Path(__file__).with_name("style.css")
_SVG = '<svg xmlns="http://www.w3.org/2000/svg" '


def check_png() -> None:
    """raises ConfigError where the extra is not installed, MachineError where there is no font"""
    if importlib.util.find_spec("resvg_py") is None:
        raise ConfigError("--png without resvg", f'pip install "{EXTRA}"', "install it, or take the page")
    if has_no_font():
        raise MachineError(
            "there is no font on this machine to draw text with",
            "one, like DejaVu",
            "apt-get install fonts-dejavu-core",
        )


def png(svg: str) -> bytes:
    """svg: as `Plot.svg` gives it"""
    return _rasterize(str.replace(svg, "<svg ", _SVG, 1))  # markup's own would escape what is put in


def _rasterize(svg: str) -> bytes:
    import resvg_py

    style, background = _style()
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg, style_sheet=style, background=background, zoom=ZOOM, sans_serif_family=_FAMILY
        )
    )


@cache
def _style() -> tuple[str, str]:
    """The style sheet's rules for drawings, and the colour behind them."""
    text = re.sub(r"/\*.*?\*/", "", _STYLE.read_text(encoding="utf-8"), flags=re.DOTALL)
    light = dict(re.findall(r"--(\w+):\s*([^;]+);", text[: text.index("@media")]))
    rules = re.sub(r"var\(--(\w+)\)", lambda match: light[match[1]], text[text.index("* {") :])
    return rules, light["back"]


@cache
def has_no_font() -> bool:
    """Whether a letter leaves no trace."""
    empty, letter = (f'{_SVG}viewBox="0 0 20 20"><text x="2" y="16">{says}</text></svg>' for says in ("", "M"))
    return _rasterize(empty) == _rasterize(letter)
