"""Results that are kept: gone on with after any end, and of nothing else than what is asked."""

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from millrace.errors import ConfigError
from millrace.evaluate.kept import About, Chosen, Kept, read

ABOUT = About("m", "engine-1", "default w8a8", "mmlu, lm-eval, 5 shots", "data-1")
SOME = [Chosen("law", i, i % 4, 0, [-0.5, -1.0, -2.0, -3.25], cut=i == 2) for i in range(3)]


def written(path: Path) -> Path:
    with closing(Kept(path, ABOUT, Chosen)) as kept:
        for one in SOME:
            kept.add(one)
    return path


def test_what_was_added_is_found_again(tmp_path: Path) -> None:
    path = written(tmp_path / "deeper" / "results.jsonl")
    with closing(Kept(path, replace(ABOUT, model="another name"), Chosen)) as kept:
        assert kept.records == {one.key: one for one in SOME}
    assert [one.right for one in SOME] == [True, False, False]


def test_wherever_a_line_was_cut_the_others_are_there(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    path, head = tmp_path / "cut", whole.index(b"\n") + 1
    for size in range(head, len(whole)):
        path.write_bytes(whole[:size])
        n = whole[:size].count(b"\n") - 1
        with closing(Kept(path, ABOUT, Chosen)) as kept:
            assert list(kept.records) == [one.key for one in SOME[:n]]
            kept.add(SOME[n])
        assert list(read(path, Chosen).records.values()) == SOME[: n + 1]


@pytest.mark.parametrize("field", ["engine", "precision", "task", "data"])
def test_results_of_something_else(tmp_path: Path, field: str) -> None:
    path = written(tmp_path / "results")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"has results of the {field} .*\n.*'other'"):
        Kept(path, replace(ABOUT, **{field: "other"}), Chosen)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "line"), [(b"hello\n", 1), (b'{"model": 1}\n', 1), (b"\n", 1), (b"no line", 1), (b"\xff\xfe\n", 1)]
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"notes:{line} is no line of results"):
        Kept(path, ABOUT, Chosen)
    assert path.read_bytes() == content, "a file of somebody else's is left as it is"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "results")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"group": 3}\n', *lines[2:]]))
    with pytest.raises(ConfigError, match="results:3 is no line of results"):
        read(path, Chosen)
