"""docs/tutorial.md: its commands, run as they stand there, and the notebook that is made of it."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "tutorial.ipynb"
_FENCED = re.compile(r"^```(sh|text)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (\w+)=(\S+)", re.MULTILINE)
_PICTURE = re.compile(r"!\[(.*?)\]\(tutorial/(\S+)\)")
_MARK = "=== {} ==="


class StepFailedError(Exception):
    """A command of the page ended with another exit code than 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """A block of commands, and what the page shows of their output; "" where nothing."""

    commands: str
    shown: str


def steps(page: str) -> list[Step]:
    """In the page's order."""
    blocks = [(found[1], found[2]) for found in _FENCED.finditer(page)]
    found: list[Step] = []
    for kind, text in blocks:
        if kind == "sh":
            found.append(Step(text, ""))
        else:
            found[-1] = Step(found[-1].commands, text)
    return found


def values(page: str) -> dict[str, str]:
    """What a reader may change, with the page's own values."""
    return dict(_EXPORT.findall(page))


def script(page: Sequence[Step], given: Mapping[str, str]) -> str:
    """All steps for one shell, which ends with the first that fails; other values where `given` has some."""

    def value(found: re.Match[str]) -> str:
        return f"export {found[1]}='{given.get(found[1], found[2])}'"

    parts = [f"printf '\\n{_MARK.format(i)}\\n'\n{_EXPORT.sub(value, step.commands)}" for i, step in enumerate(page)]
    return "set -e -o pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "".join(parts)


def run(page: Sequence[Step], given: Mapping[str, str], folder: Path, environment: Mapping[str, str]) -> list[str]:
    """What each step wrote to stdout. raises StepFailedError"""
    ran = subprocess.run(
        ["bash", "-c", script(page, given)], cwd=folder, env=dict(environment), text=True, capture_output=True
    )
    if ran.returncode:
        raise StepFailedError(f"exit code {ran.returncode}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}")
    return [part.strip("\n") for part in re.split(r"^=== \d+ ===$", ran.stdout, flags=re.MULTILINE)[1:]]


def words(text: str) -> list[str]:
    """What a table's or a list's lines begin with, in their order: that stays when figures are others."""
    found = (re.match(r"\s*([A-Za-z][A-Za-z ,]*?)(?:  |:|\d|$)", line) for line in text.splitlines())
    return [match[1].strip() for match in found if match]


def filled(page: str, outputs: Sequence[str]) -> str:
    """The page with these outputs shown, where it shows any."""
    parts, number = [], -1
    at = 0
    for found in _FENCED.finditer(page):
        number += found[1] == "sh"
        if found[1] == "text":
            parts += [page[at : found.start(2)], outputs[number].rstrip("\n") + "\n"]
            at = found.end(2)
    return "".join([*parts, page[at:]])


def notebook(page: str) -> str:
    """Cells of text and of commands (%%bash), whose outputs and pictures are the reader's own."""
    cells: list[dict[str, Any]] = []
    at = 0
    for found in _FENCED.finditer(page):
        cells += _told(page[at : found.start()])
        at = found.end()
        if found[1] == "sh":
            cells.append(_code(_magic(found[2])))
    cells += _told(page[at:])
    for i, cell in enumerate(cells):
        cell["id"] = f"step-{i}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _magic(commands: str) -> str:
    """Cells of bash share nothing but the kernel's environment."""
    exported = _EXPORT.findall(commands)
    if exported:
        return "\n".join(f"%env {name}={value}" for name, value in exported)
    return "%%bash\n" + commands.rstrip("\n")


def _told(text: str) -> list[dict[str, Any]]:
    """Text; and a cell for each picture of it."""
    cells, at = [], 0
    for found in _PICTURE.finditer(text):
        cells += _markdown(text[at : found.start()])
        made = "sweep.png" if found[2] == "sweep.png" else f"load/{found[2]}"
        cells.append(_code(f'from IPython.display import Image\n\nImage("{made}")'))
        at = found.end()
    return cells + _markdown(text[at:])


def _markdown(text: str) -> list[dict[str, Any]]:
    if not text.strip():
        return []
    return [{"cell_type": "markdown", "metadata": {}, "source": _lines(text.strip("\n"))}]


def _code(text: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": _lines(text)}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
