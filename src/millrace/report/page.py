"""Offline pages: one HTML file that needs no network, runs no script, and looks well by day and by night.

A page is a template beside its user that extends `page.html` here; what goes into it is escaped, whoever named it.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import millrace

_HERE = Path(__file__).parent
_GENERATOR = f'<meta name="generator" content="millrace {millrace.__version__}">'
_MARK = b'<meta name="generator" content="millrace '
_HEAD_BYTES = 1024  # where the mark stands


def render(template: Path, **values: object) -> str:
    """The whole page. `template` extends `page.html` and fills its blocks `title` and `body`; it may use all `values`.

    The page's policy lets a browser use its one style sheet, by digest, and nothing else: no script, no image, no font.
    """
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    page = _pages(template.parent).get_template(template.name)
    return page.render(style=style, policy=policy, generator=_GENERATOR, **values)


@cache
def _pages(folder: Path) -> Environment:
    """Which keeps what it has compiled of templates: that takes longer than to fill them in."""
    return Environment(
        loader=FileSystemLoader([folder, _HERE]), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def is_millrace_page(path: Path) -> bool:
    """Whether the file is a page that was made here, and so may be made again. raises OSError"""
    with path.open("rb") as file:
        return _MARK in file.read(_HEAD_BYTES)
