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


def test_every_story_that_is_tested_is_told() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in named_in(path):
            if re.match(r"test_p\d+_", name):
                assert f"{path.relative_to(ROOT)}::{name}`" in PAGE, f"docs/stories.md leaves out {name}"
