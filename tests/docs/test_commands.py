"""Commands in README, docs and help texts: their options exist, and what curl asks is asked as the server takes it."""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from millrace.cli.bench import compare_options, infer_options, sweep_options
from millrace.cli.main import COMMANDS, cli
from millrace.cli.size import fit_options, verify_options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
HISTORY = ("log.md", "performance.md", "decisions/")  # what was so when it was written
BELOW = {
    ("bench", "compare"): compare_options.command, ("bench", "infer"): infer_options.command,
    ("bench", "sweep"): sweep_options.command, ("size", "fit"): fit_options.command,
    ("size", "verify"): verify_options.command,
}  # fmt: skip
DISTRIBUTIONS = {
    "yaml": "pyyaml",
}  # of a module whose package has another name
ENDS = {"|", "||", ">", "2>", "&", "&&", ";", "<", "...", "#"}


def named(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def lines(text: str) -> Iterator[str]:
    """Of blocks and of what stands between backticks, whole where a backslash parts them."""
    whole = re.sub(r"\s*\\\n\s*", " ", text)
    yield from re.findall(r"^[ $]*(?:\$ |    )?((?:millrace|curl) .*)$", whole, re.MULTILINE)
    yield from re.findall(r"`((?:millrace|curl) [^`]+)`", whole)


def words(line: str) -> list[str]:
    """Without what is said of it, behind two spaces or a #."""
    asked = re.split(r"\s{2,}", line)[0]
    try:
        found = shlex.split(asked, comments=True)
    except ValueError:  # a body that goes on in the next line, or prose
        found = asked.split()
    end = next((i for i, word in enumerate(found) if word in ENDS), len(found))
    return found[:end]


def unknown(given: Sequence[str]) -> list[str]:
    """Options of this command line that its command has not; what belongs to another one behind `--` is left out."""
    command = BELOW.get((given[1], given[2] if len(given) > 2 else "")) or named(given[1])
    known = {"--help", "-h", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
    known |= set(getattr(command, "aliases", {}))  # other tools' names
    given = given[: given.index("--")] if "--" in given else given
    return [word for word in given[2:] if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in known]


def of_pages() -> list[tuple[str, str]]:
    names = {page: str(page.relative_to(ROOT)) for page in PAGES}
    kept = [page for page in PAGES if not any(part in names[page] for part in HISTORY)]
    return [(names[page], line) for page in kept for line in lines(page.read_text())]


def test_options_that_pages_name_exist() -> None:
    commands = [(page, words(line)) for page, line in of_pages() if line.startswith("millrace ")]
    commands = [(page, given) for page, given in commands if len(given) > 1 and given[1] in COMMANDS]
    assert len(commands) > 60, "pages have commands, and they are found"
    wrong = [f"{page}: {shlex.join(given)}: {bad}" for page, given in commands if (bad := unknown(given))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [*COMMANDS, *BELOW], ids=str)
def test_examples_of_help_texts_can_be_asked(name: str | tuple[str, str]) -> None:
    command = BELOW[name] if isinstance(name, tuple) else named(name)
    told = [words(line) for line in lines(command.epilog or "") if line.startswith("millrace ")]
    assert told, "help has examples"
    assert not [shlex.join(given) for given in told if given[1] not in COMMANDS or unknown(given)]


def test_what_is_posted_below_v1_says_that_it_is_json() -> None:
    """/v1 takes nothing else (a page of a stranger can send forms, and cannot send this); /v2 and /api do."""
    posted = [(page, line) for page, line in of_pages() if re.search(r"^curl .*/v1/.* (-d|--data\S*) ", line)]
    posted += [(page, line) for page, line in of_pages() if re.search(r"^curl .* (-d|--data\S*) .*/v1/", line)]
    assert len(posted) > 2, "pages have such questions, and they are found"
    wrong = [f"{page}: {line}" for page, line in posted if "content-type: application/json" not in line.lower()]
    assert not wrong, "\n".join(wrong)


def test_an_extra_in_a_checkout_compiles_nothing() -> None:
    """Isolated builds have tools of their own, for which CMake compiles everything again."""
    found = [(page, line) for page in PAGES for line in re.findall(r"pip install [^`\n]*", page.read_text())]
    editable = [(page, line) for page, line in found if re.search(r"(^| )(-e|--editable)( |$)", line)]
    assert len(editable) > 5, "pages have such commands, and they are found"
    assert not [(page.name, line) for page, line in editable if "--no-build-isolation" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_packages_that_examples_import_are_named(page: Path) -> None:
    """What Python blocks import is in the core dependencies, or the page has the command that installs it."""
    text = page.read_text()
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    here = {"millrace", *sys.stdlib_module_names, *(re.split(r"[>=\[]", one)[0].lower() for one in core)}
    installed = " ".join(re.findall(r"pip install ([^`\n]*(?:`[^`\n]*)?)", text))
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for module in sorted(imported(block)):
            name = DISTRIBUTIONS.get(module, module)
            assert name in here or re.search(rf"\b{name}\b", installed), f"{page.name}: pip install {name}"


def imported(code: str) -> set[str]:
    """Return the first parts of the names of modules that a block imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}
