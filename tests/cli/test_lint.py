"""`millrace lint`, on the repository of docs/repository.md."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace

PAGE = (Path(__file__).parents[2] / "docs" / "repository.md").read_text()
FILES = dict(re.findall(r"^`(models/[\w/.]+)`\n\n```protobuf\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
MODEL = "class TritonPythonModel:\n    def execute(self, requests): ...\n"
SHOWN = re.findall(r"^    \$ millrace lint models\n((?:    .*\n|\n(?=    ))*)", PAGE, re.MULTILINE)


def page(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in ("models/digits/1/model.onnx", "models/digits/3/model.onnx", "models/add_sub/1/model.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(MODEL if name.endswith(".py") else "")
    return root


def test_the_page_shows_what_it_says(millrace: Millrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(page(tmp_path))
    result = millrace("lint", "models")
    (shown,) = SHOWN
    lines = [line.removeprefix("    ") for line in shown.rstrip("\n").split("\n")]
    assert result.code == 2 and result.err.strip() == lines[-1]
    assert [line for line in result.out.split("\n") if line] == [line for line in lines[:-1] if line]


def test_for_programs(millrace: Millrace, tmp_path: Path) -> None:
    result = millrace("lint", page(tmp_path) / "models", "--json")
    (repository,) = json.loads(result.out)
    by_name = {m["name"]: m for m in repository["models"]}
    assert result.code == 2 and result.err == ""
    assert by_name["add_sub"]["servable"] and by_name["add_sub"]["backend"] == "python"
    digits = by_name["digits"]
    assert not digits["servable"] and digits["versions"] == [1, 3] and digits["served"] == [3]
    first = digits["problems"][0]
    assert (first["level"], first["line"], first["column"]) == ("error", 2, 1) and "max_batch_size" in first["expected"]


def test_what_is_right(millrace: Millrace, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    result = millrace("lint", tmp_path)
    assert result.code == 0 and "1 of 1 models can be served; no remarks" in result.err
    millrace("lint", tmp_path / "none").assert_mistake("none is no folder")
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "identity"')
    one = millrace("lint", tmp_path / "m")
    one.assert_mistake("m is the folder of one model", "expected: the model repository", f"say {tmp_path}")
    millrace("lint", tmp_path, "--model-config-name", "../x").assert_mistake("--model-config-name ../x")


@pytest.mark.parametrize(("config", "file", "code", "batches"), [
    ('backend: "python"', "model.py", "def auto_complete_config(c): c.set_max_batch_size(4)", "as its backend finds"),
    ('backend: "python"', "model.py", "def execute(self, requests): ...", "none: its shapes are whole"),
    ('backend: "python" max_batch_size: 2', "model.py", "def auto_complete_config(c): ...", "up to 2"),
    ('backend: "onnxruntime"', "model.onnx", "", "as its backend finds"),
    ('backend: "onnxruntime" input { name: "x" data_type: TYPE_FP32 dims: 1 }', "model.onnx", "", "none: its shapes"),
    ('backend: "identity"', "x", "", "none: its shapes are whole"),
])  # fmt: skip
def test_batches_that_a_load_may_find(
    millrace: Millrace, tmp_path: Path, config: str, file: str, code: str, batches: str
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / file).write_text(code)
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    (line,) = (one for one in millrace("lint", tmp_path).out.splitlines() if one.strip().startswith("batches"))
    assert line.split(None, 1)[1].startswith(batches)


def test_a_backend_that_nobody_has(millrace: Millrace, tmp_path: Path) -> None:
    """A load would be refused; a third party's, which an entry point names, is one."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    sides = "".join(f'{side} {{ name: "X" data_type: TYPE_FP32 dims: 1 }}\n' for side in ("input", "output"))
    (tmp_path / "m" / "config.pbtxt").write_text(sides + ' backend: "onxruntime"\n')
    result = millrace("lint", tmp_path)
    assert result.code == 2 and "0 of 1 models can be served; 1 error" in result.err
    assert "m/config.pbtxt:3:2: error: unable to find backend 'onxruntime'" in result.out
    assert 'did you mean "onnxruntime"?' in result.out


def test_what_a_file_says_cannot_steer_a_terminal(millrace: Millrace, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    text = "backend: '\\033[31m' input { name: '\\033]0;x\\007' data_type: TYPE_FP32 dims: 1 }"
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    result = millrace("lint", tmp_path)
    assert "\x1b" not in result.out and "\x07" not in result.out and "\\x1b[31m" in result.out


@pytest.mark.parametrize(("code", "where", "what"), [
    ("class TritonPythonModel:\n    def execute(self requests): ...\n", "model.py:2:22", "SyntaxError: "),
    ("def f(:\n", "model.py:1:", "SyntaxError: "),
    ("import numpy\nclass Model: ...\n", "model.py", "it has no class TritonPythonModel"),
    ("", "model.py", "it has no class TritonPythonModel"),
    ("# class TritonPythonModel:\n", "model.py", "it has no class TritonPythonModel"),
    ("x = 1\0\n", "model.py", "null bytes"),
    ("x = " + "(" * 5000, "model.py", ""),
])  # fmt: skip
def test_code_that_cannot_be_loaded(millrace: Millrace, tmp_path: Path, code: str, where: str, what: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(code)
    result = millrace("lint", tmp_path)
    assert result.code == 2 and "0 of 1 models can be served; 1 error" in result.err, result.err
    line = next(one for one in result.out.splitlines() if "error: " in one)
    assert f"m/1/{where}" in line and what in line


@pytest.mark.parametrize("code", [
    "from base import TritonPythonModel", "from base import Model as TritonPythonModel", "from base import *",
    "if True:\n    class TritonPythonModel: ...", "TritonPythonModel = type('M', (), {})",
    "globals()['TritonPythonModel'] = object", r"class TritonPythonModel: pattern = '\d'",
])  # fmt: skip
def test_code_that_has_the_class_in_another_way(millrace: Millrace, tmp_path: Path, code: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(code)
    assert "1 of 1 models can be served" in millrace("lint", tmp_path).err


def test_code_of_another_environment_is_not_judged(millrace: Millrace, tmp_path: Path) -> None:
    """It may have a Python whose syntax is newer."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("class TritonPythonModel[")
    environment = 'key: "EXECUTION_ENV_PATH" value { string_value: "/opt/env" }'
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "python" parameters {{ {environment} }}')
    assert "1 of 1 models can be served" in millrace("lint", tmp_path).err
