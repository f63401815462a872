"""What Triton's tests are run with: every model of the catalogue can be served, and results are counted."""

import ast
from pathlib import Path
from typing import Any

import pytest

from millrace.model_repository.config.problems import Level
from millrace.model_repository.repository.repository_reader import read_model
from tools.triton_tests.__main__ import functions, total
from tools.triton_tests.catalogue import SUITES, Run
from tools.triton_tests.repositories import FILES, Repository

RUNS = [pytest.param(run, id=f"{name}-{i}") for name, suite in SUITES.items() for i, run in enumerate(suite.runs[:1])]


@pytest.mark.parametrize("run", RUNS)
def test_its_models_have_no_faults(run: Run, tmp_path: Path) -> None:
    run.models(Repository(tmp_path))
    for folder in tmp_path.iterdir():
        read = read_model([tmp_path], folder.name, "")
        assert read is not None
        faults = [problem.what for problem in read.problems if problem.level is not Level.IGNORED]
        assert faults == [], folder.name


def test_every_file_of_a_model_is_used() -> None:
    used = Path(FILES).parent.joinpath("repositories.py").read_text()
    for file in FILES.glob("*.py"):
        ast.parse(file.read_text())
        assert f'"{file.stem}' in used or file.stem.endswith("_async") or f"{file.stem}.py" in used, file.name


def test_tests_are_found_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "a_test.py"
    file.write_text("class A:\n    def test_a(self): ...\n    async def test_b(self): ...\n    def other(self): ...\n")
    assert functions(file) == ["test_a", "test_b"]
    suites: dict[str, dict[str, Any]] = {
        "a": {"counts": {"pass": 2, "fail": 1}},
        "b": {"counts": {"pass": 5, "cannot run": 3}},
        "c": {"missing": True},
    }
    assert total(suites) == {"ran": 8, "pass": 7, "fail": 1, "cannot run": 3, "pass_percent": 87.5}
