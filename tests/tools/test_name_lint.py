"""Forms in which a name is defined: the lint sees each of them."""

import ast

import pytest

from tools.name_lint import check_allowed, check_classes, check_names


def refused(source: str, path: str = "serve/app.py") -> list[str]:
    return [word for word, _ in check_names({path: ast.parse(source)})]


@pytest.mark.parametrize(
    "source",
    [
        "class StepTold: pass", "class BroughtFolder: pass", "class How: pass", "def of(): pass", "def one(): pass",
        "def f(of): pass", "def f(*, one): pass", "class A:\n    of: str", "class A:\n    why: str",
        "class A:\n    most: int", "class A:\n    one: int", "class A(Structured):\n    told: int", "turns = named",
        "named = 1", "for each in a: pass", "every = 1", "some = [1]", "told = 1", "told2 = 1", "kept_pages = 1",
        "match a:\n    case {**told}: pass", "match a:\n    case [*told]: pass", "match a:\n    case 1 as told: pass",
        'A = NamedTuple("A", [("told", int)])', 'A = typing.NamedTuple("A", [("told", int)])',
        'A = namedtuple("A", "told b")', 'A = namedtuple("A", ["told"])', 'setattr(self, "asked", 1)', "a.asked = 1",
        "import a as told", "with a as told: pass", "(told := 1)", "lambda told: 1",
        "try: pass\nexcept E as told: pass",
    ],
)  # fmt: skip
def test_a_vague_name_is_refused(source: str) -> None:
    assert len(refused(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class Threshold: pass", "class A(msgspec.Struct):\n    of: str", "class A(Struct):\n    told: int",
        "number_of_rows = 1", "for one in a: pass", "def f(most_rows): pass", "skeptic = unheld = 1", "a.b.told",
    ],
)  # fmt: skip
def test_other_names_are_accepted(source: str) -> None:
    assert refused(source) == []


@pytest.mark.parametrize("path", ["serve/told.py", "told/app.py", "serve/what_was_told.py"])
def test_files_and_folders_are_names(path: str) -> None:
    assert refused("", path) == ["told"]


def test_an_allowance_only_shrinks() -> None:
    vague = [("what", "a:1"), ("what", "a:2")]
    assert check_allowed(vague, {"what": 2}) == []
    assert check_allowed(vague, {"what": 1}) == check_allowed(vague, {}) == ["a:1", "a:2"]
    assert "lower it" in check_allowed(vague, {"what": 3})[0]


def test_two_classes_of_one_name_are_refused() -> None:
    same = {name: ast.parse("class _Answer: pass") for name in ("a.py", "b.py")}
    assert check_classes(same) == ["b.py:1: class _Answer is also a.py:1"]
    assert check_classes({"a.py": ast.parse("class A:\n    class B: pass\nclass C:\n    class B: pass")}) == []
