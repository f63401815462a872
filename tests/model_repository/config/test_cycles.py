"""Ensembles that need themselves, in repositories of thousands."""

import random
from pathlib import Path
from typing import Any

import pytest

from millrace.model_repository.repository import multi_repository
from millrace.model_repository.repository.cycles import find_cycles
from tests.support.ensembles import ensemble


def reached(needs: dict[int, list[int]], one: int) -> set[int]:
    """By one need or more, one after the other."""
    found, left = set[int](), list(needs[one])
    while left:
        if (new := left.pop()) not in found:
            found.add(new)
            left.extend(needs[new])
    return found


@pytest.mark.parametrize("seed", range(200))
def test_rings_beside_a_walk_from_each(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 12)
    needs = {one: [draw.randrange(n) for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))] for one in range(n)}
    reach = {one: reached(needs, one) for one in needs}
    found = find_cycles(needs)
    assert set(found) == {one for one in needs if one in reach[one]}
    assert all(one in needs[by] and by in reach[one] | {one} for one, by in found.items())


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_row_of_20_000(is_closed: bool) -> None:
    """A walk from each would take minutes, and one by calls of functions more of them than Python has."""
    n = 20_000
    needs = {one: [(one + 1) % n] for one in range(n)} | ({} if is_closed else {n - 1: []})
    assert find_cycles(needs) == ({one: (one - 1) % n for one in range(n)} if is_closed else {})


def test_a_repository_is_looked_through_once_for_all_of_its_ensembles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of its models, and the files of one that they all have as a step."""
    made, read = list[int](), list[str]()

    class Counted(multi_repository.ModelLookup):
        def __init__(self, models: Any) -> None:
            made.append(len(models))
            super().__init__(models)

    def reads(path: Path, most: int) -> bytes:
        read.append(path.name)
        return b""

    monkeypatch.setattr(multi_repository, "ModelLookup", Counted)
    monkeypatch.setattr(multi_repository, "read_bounded", reads)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").touch()
    ends = "input { name: 'a' data_type: TYPE_INT32 dims: 1 } output { name: 'b' data_type: TYPE_INT32 dims: 1 }"
    (tmp_path / "m" / "config.pbtxt").write_text(f"backend: 'python' {ends}")
    steps = [("m", {"a": "A"}, {"b": "B"})]
    for i in range(9):
        (tmp_path / f"e{i}" / "1").mkdir(parents=True)
        (tmp_path / f"e{i}" / "config.pbtxt").write_text(ensemble(["A"], ["B"], steps, max_batch=0, dims="1"))
    (found,) = multi_repository.read_repositories([tmp_path])
    assert [model.problems for model in found.models] == [[]] * 10
    assert (made, read) == ([10], ["model.py"])
