"""Offline pages: a single HTML file without network access or scripts, with a light and a dark theme.

A page is a template next to the code that uses it and extends `page.html`; all values are escaped.
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
_HEAD_BYTES = 1024  # the mark lies within them


def render(template: Path, **values: object) -> str:
    """Render a page. `template` extends `page.html` and fills its blocks `title` and `body`; it may use all `values`.

    The page's content security policy allows only its style sheet, by digest: no script, no image, no font.
    """
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    page = _pages(template.parent).get_template(template.name)
    return page.render(style=style, policy=policy, generator=_GENERATOR, **values)


@cache
def _pages(folder: Path) -> Environment:
    """Return the template environment, cached because compiling templates is slow."""
    return Environment(
        loader=FileSystemLoader([folder, _HERE]), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def is_millrace_page(path: Path) -> bool:
    """Return whether the file is a page written by millrace, which may be overwritten. raises OSError"""
    with path.open("rb") as file:
        return _MARK in file.read(_HEAD_BYTES)
