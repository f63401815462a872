"""`millrace convert`, and what points to it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from tests.cli.conftest import Millrace

torch = pytest.importorskip("torch", reason="the independent truth")
safetensors = pytest.importorskip("safetensors.torch", reason="the independent truth")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """`tiny` with weights of PyTorch."""
    tiny = BUNDLED / "tiny"
    folder = Path(shutil.copytree(tiny, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors")))
    torch.save(safetensors.load_file(tiny / "model.safetensors") | {"step": 3}, folder / "pytorch_model.bin")
    return folder


def test_a_folder(millrace: Millrace, old: Path, tmp_path: Path) -> None:
    result = millrace("convert", old, "-o", tmp_path / "new")
    assert result.code == 0 and "47, 7.6 MiB" in result.out and "model.safetensors" in result.out
    assert "not in the result, because they are not tensors: step (int)" in result.err
    source, written = Checkpoint.open(BUNDLED / "tiny"), Checkpoint.open(tmp_path / "new")
    assert source.config == written.config and source.files == written.files
    assert all((source.tensors.load(name) == written.tensors.load(name)).all() for name in source.tensors)


def test_json(millrace: Millrace, old: Path, tmp_path: Path) -> None:
    result = millrace("convert", old, "-o", tmp_path / "new", "--format", "hf", "--json")
    assert result.err == ""
    report = json.loads(result.out)
    assert report.pop("bytes") == sum(info.nbytes for info in Checkpoint.open(tmp_path / "new").tensors.values())
    assert report == {
        "folder": str(tmp_path / "new"), "format": "hf", "source": str(old), "tensors": 47,
        "weights": ["model.safetensors"], "not_tensors": ["step (int)"], "not_copied": [],
        "copied": sorted(p.name for p in old.iterdir() if p.suffix != ".bin"),
    }  # fmt: skip


def test_mistakes(millrace: Millrace, old: Path, built_tiny: Path, tmp_path: Path) -> None:
    millrace("convert", old).assert_mistake("--output")
    millrace("convert", old, "-o", old).assert_mistake("is already there")
    millrace("convert", old, "-o", tmp_path / "new", "--format", "gguf").assert_mistake("gguf")
    millrace("convert", "tiny", "-o", tmp_path / "new").assert_mistake("safetensors already", "nothing to convert")
    millrace("convert", built_tiny, "-o", tmp_path / "new").assert_mistake("is an engine")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(64))
    millrace("convert", tmp_path / "a.gguf", "-o", tmp_path / "new").assert_mistake("is a GGUF file")
    assert not (tmp_path / "new").exists()


def test_a_pickle_that_calls_is_refused_and_never_run(millrace: Millrace, old: Path, tmp_path: Path) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'touched'}",)

    torch.save({"w": torch.ones(2), "x": Call()}, old / "pytorch_model.bin")
    millrace("convert", old, "-o", tmp_path / "new").assert_mistake(
        "names posix.system", "nothing of the file was exec"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_other_commands_point_to_it(millrace: Millrace, old: Path, engine: Path, tmp_path: Path) -> None:
    advice = f"millrace convert {old} -o"
    millrace("build", old, "-o", tmp_path / "engine").assert_mistake(advice)
    millrace("serve", old).assert_mistake(advice)
    millrace("generate", old, "-p", "Once").assert_mistake(advice)
    result = millrace("doctor", old)
    assert result.code == 0 and f"Convert it first: {advice}" in result.err
    assert json.loads(millrace("doctor", old, "--json").out)["implementation"] is None
    (engine / "manifest.json").write_text("{}")
    assert "Nothing here runs it" in millrace("doctor", engine).err, "a damaged engine is no checkpoint of PyTorch"
