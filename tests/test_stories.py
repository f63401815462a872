"""docs/stories.md names tests that exist, and each story's own tests stand on it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "stories.md").read_text(encoding="utf-8")


def named_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_page_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 10
    for path, name in named:
        assert name in named_in(ROOT / path), f"{path} has no {name}"


def test_every_test_of_the_page_carries_its_storys_number() -> None:
    for row in (line for line in PAGE.splitlines() if line.startswith("| P")):
        stories = {number.lower() for number in re.findall(r"P\d+", row.split("|")[1])}
        for name in re.findall(r"::test_(\w+)`", row):
            assert set(re.findall(r"p\d+(?=_)", name)) <= stories and name.split("_")[0] in stories, name


def test_every_issue_is_a_link() -> None:
    told = re.findall(r"[\w.-]+#\d+", PAGE)
    linked = re.findall(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/[\w.-]+/([\w.-]+)/issues/(\d+)\)", PAGE)
    assert len(told) == len(linked) > 10
    assert all((name, number) == (of, at) for name, number, of, at in linked)


def test_every_story_that_is_tested_is_told() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def (test_p\d+_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"{path.relative_to(ROOT)}::{name}`" in PAGE, f"docs/stories.md leaves out {name}"
