"""Figures in the documents name the result files that they are from, and these exist: generated tables, speeds in prose
and the picture."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import losses, readme
from benchmarks.page import PAGE
from benchmarks.record import RESULTS
from benchmarks.tensors import backend_page

FILE = re.compile(r"`([^`\s]+\.json)`")
RESULT = re.compile(r"`(?:benchmarks/results/)?([\w.-]+-20\d{6}T\d{6}Z-[0-9a-f]{7,8})(?:\.json)?`")
ROOT = readme.ROOT
PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_NUMBER = r"(?<![\w.-])\d[\d,.]*(?:\s(?:to|and)\s\d[\d,.]*)?"
_COUNT = "(?:two|three|four|five|six|seven|eight|nine|ten)"
SPEED = re.compile(
    rf"{_NUMBER}\s(?:x|times)\s(?:as\s(?:fast|many|much)|(?:the|that\sof)\s|faster|slower|`?[\w.-]*(?:llama|vllm|openvino|fastapi|"
    rf"triton|grpcio|onnx|ollama))|{_COUNT}(?:\sto\s{_COUNT})?\stimes\s(?:as\sfast|the\sspeed|faster|slower)|"
    rf"{_NUMBER}\s(?:tok/s|tokens/s|tokens\sa\ssecond|requests/s|chunks/s|inferences/s|GB/s|us|µs|ms|microseconds|milliseconds)\b|\bKL\s(?:of\s|is\s)?{_NUMBER}|perplexity\s(?:of\s|is\s)?{_NUMBER}",
    re.IGNORECASE,
)
# What a table measures, by its header.
MEASURED = re.compile(r"(?<![\w-])(?:us|µs|ms|tok/s|tokens/s|requests/s|GB/s|KL|perplexity)\b")
# A result: of benchmarks/results by its name, of the nightly parts by its path, or a page of --advise that is kept.
NAMED = re.compile(r"`(?:[\w./-]*/)?([\w.-]+\.json)`|\]\((advice/[\w.-]+\.html)\)")
# Paragraphs with such numbers that nobody measured, by how they begin.
NOT_MEASURED = {
    ("README.md", "On AVX2 without VNNI"): "measured by hand on a machine of that kind; there is no result file",
    ("bench.md", "`--goodput ttft:500"): "limits that a user asks for",
    ("bench.md", "`the 3 slowest took"): "a line of output, to be explained",
    ("bench.md", "`python -m tools.beside_aiperf`"): "times that the null server is set to",
    ("bench.md", "**Certified.**"): "the load that is intended",
    ("compress.md", "The words follow"): "a bound that is chosen",
    ("log.md", ""): "a diary of what was tried, by date and machine; its figures are claimed nowhere",
    ("performance.md", ""): "generated from the result files, row by row (above)",
    ("precision.md", "- of floats"): "computed by tests/tune/test_precision.py",
    ("repository.md", "A request is a span"): "the timeout of an exporter",
    ("size.md", "`--pp 2` cuts"): "a time that is assumed",
    ("size.md", "- **Waits** beside"): "published by others, in tests/size/test_answer.py",
    ("tutorial.md", "An engine for exactly that"): "how fast a recording is replayed",
    ("tutorial.md", "Where an interval holds 0"): "how fast a recording is replayed",
    ("tutorial.md", "How many users"): "limits that are asked for",
}
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


def paragraphs(document: str) -> Iterator[str]:
    """Prose: without blocks of output and tables; items of a list each by itself."""
    text = re.sub(r"^```.*?^```", "", document, flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n", text):
        prose = "\n".join(line for line in part.splitlines() if not line.lstrip().startswith(("|", "<!--")))
        yield from (item for item in re.split(r"\n(?=\s*(?:[-*] |\d+\. ))", prose) if item.strip())


def unnamed(document: str, existing: set[str]) -> list[str]:
    """Return the paragraphs with a measured speed that name no result, or one that does not exist."""
    found = []
    for paragraph in paragraphs(document):
        names = {name for pair in NAMED.findall(paragraph) for name in pair if name}
        if SPEED.search(paragraph) and not names & existing:
            found.append(" ".join(paragraph.split()))
    return found


def unnamed_tables(document: str, existing: set[str]) -> list[str]:
    """Return the headers of tables of measurements in sections that name no result."""
    found = []
    for section in sections(re.sub(r"^```.*?^```", "", document, flags=re.DOTALL | re.MULTILINE)):
        names = {name for pair in NAMED.findall(section) for name in pair if name}
        if not names & existing:
            headers = re.findall(r"^(\|.*\|)\n\|[-|: ]+\|$", section, re.MULTILINE)
            found += [header for header in headers if MEASURED.search(header)]
    return found


def results() -> set[str]:
    kept = [*RESULTS.glob("*.json"), *(ROOT / "tools" / "nightly" / "results").glob("*.json")]
    return {path.name for path in kept} | {f"advice/{path.name}" for path in (ROOT / "docs" / "advice").glob("*.html")}


def test_speeds_in_prose_name_a_result() -> None:
    existing, needed = results(), set[tuple[str, str]]()
    wrong = []
    for path in PROSE:
        for paragraph in unnamed(path.read_text(), existing):
            known = [key for key in NOT_MEASURED if key[0] == path.name and paragraph.startswith(key[1])]
            needed.update(known)
            wrong += [] if known else [f"{path.name}: {paragraph[:300]}"]
    assert not wrong, "name the result file, take the figure out, or say in NOT_MEASURED why it is none"
    assert needed >= {key for key in NOT_MEASURED if key[1]}, "an exception that is needed no more"


def test_tables_of_measurements_name_a_result() -> None:
    existing = results()
    wrong = [f"{path.name}: {header}" for path in PROSE for header in unnamed_tables(path.read_text(), existing)]
    assert not wrong, "name the result file in the table's section"


def test_the_table_of_backends_is_of_the_newest_run() -> None:
    text = backend_page.PAGE.read_text()
    assert backend_page.written(text) == text, "python -m benchmarks.tensors.backend_page"


@pytest.mark.parametrize(
    ("document", "n"),
    [
        ("# a\n| x | tok/s |\n|---|---|\n| 1 | 2 |\n", 1),
        ("# a\n`x.json`\n\n| x | tok/s |\n|---|---|\n| 1 | 2 |\n", 0),
        ("# a\n`x.json`\n# b\n| x | KL |\n|---|---|\n| 1 | 2 |\n", 1), ("# a\n| x | y |\n|---|---|\n| 1 ms | 2 |\n", 0),
    ],
)  # fmt: skip
def test_tables_without_a_result_are_seen(document: str, n: int) -> None:
    assert len(unnamed_tables(document, {"x.json"})) == n


@pytest.mark.parametrize(
    ("document", "n"),
    [
        ("It is 2.0 x llama.cpp here.", 1), ("It is 2.0 x llama.cpp (`x.json`).", 0), ("2.0 x llama.cpp (`y.json`)", 1),
        ("A prompt at 1,200 tok/s.", 1), ("16 users get 300\ntokens/s.", 1), ("A call costs 385 us of CPU", 1),
        ("Ready in 12.5 ms.\n\nSee `x.json`.", 1), ("- 3 ms\n- 4 ms `benchmarks/results/x.json`\n", 1),
        ("three to six times as fast", 1), ("0.6 times FastAPI's", 1), ("1.68 times the source's speed", 1),
        ("at a KL of 0.0029", 1), ("KL 0.46", 1), ("perplexity 12.3", 1), ("a page of 4 MB, 16 tokens, 3 times", 0),
        ("```\n12 ms\n```\n", 0), ("| 12 ms |\n", 0), ("`--itl-ms 50`", 0),
    ],
)  # fmt: skip
def test_speeds_without_a_result_are_seen(document: str, n: int) -> None:
    assert len(unnamed(document, {"x.json"})) == n


def test_the_picture_has_its_files_beside_it() -> None:
    text = readme.README.read_text()
    table, picture = generated(readme.README, readme.BEGIN, readme.END), f"docs/{readme.PICTURE.name}"
    (line,) = [line for line in table.splitlines() if picture in line]
    assert FILE.search(line) and set(FILE.findall(line)) <= {path.name for path in RESULTS.glob("*.json")}
    assert f"]({picture})" in text.split(readme.END)[1][:200]
    assert readme.PICTURE.read_text() == readme.picture(readme.newest()), "python -m benchmarks.readme"


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
