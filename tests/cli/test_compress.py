"""`millrace compress`: plan, folder, report; and its mistakes."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace
from tests.fuzz.originals import write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), width=256, inner=192)


def test_a_dry_run_writes_nothing(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    shown = millrace("compress", source, "-o", tmp_path / "out", "--recipe", "int4-wo", "--dry-run")
    assert shown.code == 0 and not (tmp_path / "out").exists()
    for said in ("nothing was written", "7 linear layers", "lm_head left as floats", "about", "4.167 a weight"):
        assert said in shown.out, shown.out
    assert "1 matrices of 192 inputs have groups of 64" in shown.err and "1 matrices of 64 inputs" in shown.err
    told = json.loads(
        millrace("compress", source, "-o", tmp_path / "out", "--recipe", "int4-wo", "--dry-run", "--json").out
    )
    assert told["kept"] == ["lm_head"] and told["memory_bytes"] > 0 and told["bytes_after"] < told["bytes_before"]


def test_the_whole_way(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    """More bits lose less; the folder runs like any other checkpoint and cannot be compressed again."""
    losses = {}
    for recipe in ("int4-wo", "int8-wo"):
        out = tmp_path / recipe
        told = json.loads(millrace("compress", source, "-o", out, "--recipe", recipe, "--json").out)
        assert told["loss"]["tokens"] > 100 and told["worst"] and told["bytes_after"] < told["bytes_before"]
        assert json.loads((out / "compression.json").read_text())["loss"] == told["loss"]
        losses[recipe] = told["loss"]
    assert 0 <= losses["int8-wo"]["kl"] < losses["int4-wo"]["kl"] and losses["int8-wo"]["precision"] == "w8a16"
    shown = millrace("compress", source, "-o", tmp_path / "fp8", "--recipe", "fp8", "--no-evaluate")
    assert shown.code == 0 and "not measured: --no-evaluate" in shown.out and "found right" in shown.out
    ran = millrace("generate", tmp_path / "int4-wo", "-p", "the", "--max-tokens", "2", "--tune", "0")
    assert ran.code == 0 and "rounded again" not in ran.err
    again = millrace("compress", tmp_path / "int4-wo", "-o", tmp_path / "x", "--recipe", "fp8")
    again.assert_mistake("compressed already")


def test_mistakes(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    (tmp_path / "newer.json").write_text('{"version": 9}')
    (tmp_path / "short.txt").write_text("a mill")
    asked = ("compress", source, "-o", tmp_path / "out")
    millrace(*asked, "--recipe", "int4-w").assert_mistake('did you mean "int4-wo"')
    millrace(*asked, "--recipe", tmp_path / "newer.json").assert_mistake("version 9", "update Millrace")
    millrace("compress", source, "-o", source, "--recipe", "fp8").assert_mistake("already there")
    millrace(*asked, "--recipe", "fp8", "--no-evaluate", "--calibration", "x").assert_mistake("nothing is measured")
    millrace(*asked, "--recipe", "fp8", "--calibration", tmp_path / "none.txt").assert_mistake("none.txt")
    short = millrace(*asked, "--recipe", "fp8", "--calibration", tmp_path / "short.txt")
    short.assert_mistake("short.txt")
    assert not (tmp_path / "out").exists(), "a text that is too short is said before anything is written"
