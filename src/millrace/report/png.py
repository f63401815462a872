"""Renders a plot as PNG with resvg (an optional extra), in the light theme.

resvg does not support CSS variables, so they are substituted here. It draws text with the machine's fonts.
"""

import importlib.util
import re
from functools import cache
from pathlib import Path

from millrace.errors import ConfigError, MachineError

EXTRA = "millrace[png]"
ZOOM = 2.0  # pixels per unit of the plot: 2,160 wide
_FAMILY = "DejaVu Sans"  # if installed; otherwise another font
_STYLE = Path(__file__).with_name("style.css")
_SVG = '<svg xmlns="http://www.w3.org/2000/svg" '


def check_png() -> None:
    """Check that PNG export works. raises ConfigError without the extra, MachineError without a font"""
    if importlib.util.find_spec("resvg_py") is None:
        raise ConfigError("--png without resvg", f'pip install "{EXTRA}"', "install it, or take the page")
    if has_no_font():
        raise MachineError(
            "there is no font on this machine to draw text with",
            "one, like DejaVu",
            "apt-get install fonts-dejavu-core",
        )


def png(svg: str) -> bytes:
    """Render `Plot.svg` output as PNG."""
    return _rasterize(str.replace(svg, "<svg ", _SVG, 1))  # Markup.replace would escape the new text


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
    """Return the style sheet's rules for plots, and the background colour."""
    text = re.sub(r"/\*.*?\*/", "", _STYLE.read_text(encoding="utf-8"), flags=re.DOTALL)
    light = dict(re.findall(r"--(\w+):\s*([^;]+);", text[: text.index("@media")]))
    rules = re.sub(r"var\(--(\w+)\)", lambda match: light[match[1]], text[text.index("* {") :])
    return rules, light["back"]


@cache
def has_no_font() -> bool:
    """Return whether no font is available (a rendered letter leaves no pixels)."""
    empty, letter = (f'{_SVG}viewBox="0 0 20 20"><text x="2" y="16">{says}</text></svg>' for says in ("", "M"))
    return _rasterize(empty) == _rasterize(letter)
