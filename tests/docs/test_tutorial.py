"""docs/tutorial.md and its notebook are one text, and their commands are commands. `make nightly` runs them."""

import json
import re
import shlex

import click
import pytest

from millrace.cli.main import cli
from tools.tutorial import NOTEBOOK, PAGE, Step, filled, notebook, script, steps, values, words

TEXT = PAGE.read_text()


def commands() -> list[list[str]]:
    """Every `millrace ...` of the page, as a shell would split it; variables have their values."""
    found = []
    for step in steps(TEXT):
        for line in step.commands.replace("\\\n", " ").splitlines():
            for name, value in values(TEXT).items():
                line = line.replace(f"${name}", value)
            if line.startswith("millrace "):
                found.append(shlex.split(re.split(r" [|>&]", line)[0])[1:])
    return found


def test_the_notebook_is_the_page() -> None:
    assert NOTEBOOK.read_text() == notebook(TEXT), "python -m tools.tutorial"
    book = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    bash = [cell.removeprefix("%%bash\n") + "\n" for cell in cells if cell.startswith("%%bash\n")]
    assert bash == [step.commands for step in steps(TEXT)][1:], "all but the values, which are %env"
    assert cells[0] == "%env MODEL=tiny\n%env MMLU=./mmlu\n%env PORT=8000\n%env OTHER=8001"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])


def test_every_command_of_the_page_is_one() -> None:
    asked = commands()
    assert len(asked) == TEXT.count("\nmillrace ") >= 10
    with click.Context(cli) as context:
        for name, *arguments in asked:
            command = cli.get_command(context, name)
            assert command is not None, name
            command.make_context(name, arguments, parent=context)  # parses, and runs nothing
        build = cli.get_command(context, "build")
        with pytest.raises(click.NoSuchOption):
            build and build.make_context("build", ["tiny", "-o", "x", "--trafic", "y"], parent=context)


def test_what_the_page_shows_is_there() -> None:
    shown = [step.shown for step in steps(TEXT) if step.shown.strip()]
    assert len(shown) == TEXT.count("```text") == 9, "no output is empty: python -m tools.tutorial --run --mmlu FOLDER"
    for picture in re.findall(r"\]\((tutorial/\S+)\)", TEXT):
        assert (PAGE.parent / picture).read_bytes().startswith(b"\x89PNG")
    for link in re.findall(r"\]\((\w+\.(?:md|ipynb))\)", TEXT):
        assert (PAGE.parent / link).is_file(), link


def test_a_page_becomes_a_script_and_shows_what_came() -> None:
    page = "A\n```sh\nexport MODEL=tiny   # or\n```\nB\n```sh\necho $MODEL\n```\n```text\nold\n```\nC\n"
    assert steps(page) == [Step("export MODEL=tiny   # or\n", ""), Step("echo $MODEL\n", "old\n")]
    assert "export MODEL='a b'   # or\n" in script(steps(page), {"MODEL": "a b"})
    assert filled(page, ["", "new"]) == page.replace("old", "new")
    assert words("tiny: built in 2.5 s\n  KV cache  5\n\n   1  2\n  ITL, ms 3") == ["tiny", "KV cache", "ITL, ms"]
