"""Every generated table of figures in the documents names the result files that it is from, and these exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import losses, readme
from benchmarks.page import PAGE
from benchmarks.record import RESULTS

FILE = re.compile(r"`([^`\s]+\.json)`")
RESULT = re.compile(r"`(?:benchmarks/results/)?([\w.-]+-20\d{6}T\d{6}Z-[0-9a-f]{7,8})(?:\.json)?`")
RUN = re.compile(r"\) in (\d+)(?=;| \|)")  # of a run in the list behind a table of speeds


def sections(document: str) -> Iterator[str]:
    """Split at headings of any level."""
    yield from re.split(r"^(?=#+ )", document, flags=re.MULTILINE)


def files_of(row: str, section: str) -> list[str]:
    """Return the result files that a table's row names: itself, by the number of a run, or around its table."""
    own = FILE.findall(row)
    if own:
        return own
    runs = RUN.findall(row)
    if runs:
        legend = {n: FILE.findall(line) for n, line in re.findall(r"^(\d+)\. (.*)$", section, re.MULTILINE)}
        return [file for n in runs for file in legend.get(n) or [f"no file of run {n}"]]
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("|"))
    return FILE.findall(prose)


def faults(document: str, existing: set[str]) -> list[str]:
    """Return the rows with figures that name no result file, or one that does not exist."""
    found = []
    for section in sections(document):
        for row in (line for line in section.splitlines() if line.startswith("|") and re.search(r"\d", line)):
            files = files_of(row, section)
            if not files or not set(files) <= existing:
                found.append(f"{row}: {files}")
    return found


def generated(path: Path, begin: str, end: str) -> str:
    return path.read_text().split(begin)[1].split(end)[0]


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(PAGE.read_text(), id="performance"),
        pytest.param(generated(readme.README, readme.BEGIN, readme.END), id="readme"),
        pytest.param(generated(losses.DOCUMENT, losses.BEGIN, losses.END), id="compress"),
    ],
)
def test_every_figure_names_a_result_file_that_exists(document: str) -> None:
    assert FILE.search(document)
    assert faults(document, {path.name for path in RESULTS.glob("*.json")}) == []


def test_result_files_that_documents_name_exist() -> None:
    existing = {path.stem for path in RESULTS.glob("*.json")}
    named = {
        (path.name, name)
        for path in (readme.README, *PAGE.parent.rglob("*.md"))
        for name in RESULT.findall(path.read_text())
    }
    assert named and {(document, name) for document, name in named if name not in existing} == set()


@pytest.mark.parametrize(
    ("document", "n_faults"),
    [
        ("# a\n\n`x.json`\n\n| what | n |\n|---|---|\n| a | 1 |\n", 0),
        ("# a\n\n`x.json`\n\n# b\n\n| what | n |\n|---|---|\n| a | 1 |\n| b | none |\n", 1),
        ("| a | 1 | `x.json` |\n| b | 2 | `y.json` |\n", 1),
        ("| a | 1 (1-2) in 1; 2 (2-2) in 2 |\n\n1. alone: `x.json`\n2. alone: `x.json`\n", 0),
        ("| a | 1 (1-2) in 1; 2 (2-2) in 2 |\n\n1. alone: `x.json`\n2. alone\n", 1),
        ("| a | 1 (1-2) in 1; 2 (2-2) in 3 |\n\n1. alone: `x.json`\n", 1),
    ],
)
def test_figures_without_a_file_are_seen(document: str, n_faults: int) -> None:
    assert len(faults(document, {"x.json"})) == n_faults
