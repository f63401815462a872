"""`millrace compress --advise`: rows, page, going on; and mistakes."""

import json
from pathlib import Path

import pytest

from millrace.compile.resolve_model import BUNDLED
from millrace.compress.presets import BATCH
from millrace.compress.report import method_trials
from tests.cli.conftest import Millrace
from tests.fuzz.originals import write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "c", width=64, inner=100)


def test_methods_side_by_side(
    millrace: Millrace, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What is there is not measured again; what this model cannot take is said, and the rest goes on."""
    monkeypatch.setattr(method_trials, "_TUNE_S", 0)
    monkeypatch.setattr(method_trials, "ROUNDS", 1)
    text, out = tmp_path / "half.txt", tmp_path / "out"
    whole = (BUNDLED / "calibration.txt").read_text()
    text.write_text(whole[: len(whole) // 2])
    asked = ("compress", source, "-o", out, "--advise", "--batch", 2)
    told = json.loads(millrace(*asked, "--presets", "int8-wo", "--json").out)
    (row,) = told["rows"]
    assert row["name"] == "int8-wo" and row["loss"]["kl"] >= 0 and row["loss"]["tokens"] > 100
    assert [p["work"][:11] for p in row["speed"]["paces"]] == ["prefill of ", "decode, alo", "decode, 2 a"]
    assert all(p["made"]["median"] > 0 for p in row["speed"]["paces"]) and set(told["advice"]) >= {"memory"}
    assert row["bytes"] < told["about"]["bytes_before"] and row["statistics"] == ""
    before = (out / "int8-wo.json").stat().st_mtime_ns
    (killed := out / ".methods.0123456789ab.search").mkdir()
    (killed / ".lock").touch()
    shown = millrace(*asked, "--presets", "int8-wo,int4-wo")
    assert shown.code == 0 and "not for this model" in shown.out and "100 inputs" in shown.out, shown.err
    assert "which to take" in shown.out and (out / "int8-wo.json").stat().st_mtime_ns == before
    names = {p.name for p in out.iterdir()}
    assert names == {"about.json", "advice.html", "int8-wo.json", "int4-wo.json"}, (
        "nothing else is left, nor what a killed run had"
    )
    given = ("--presets", "int8-wo,int8-sq", "--samples-from", text, "--samples", 2, "--json")
    rows = json.loads(millrace(*asked, *given).out)["rows"]
    assert rows[0] == row and rows[1]["statistics"] and rows[1]["statistics_s"] > 0
    millrace(*asked, "--presets", "int8-wo", "--calibration", text).assert_mistake("has figures of text")

    def never(*_: object) -> None:
        raise AssertionError("statistics are collected")

    monkeypatch.setattr(method_trials, "statistics_for", never)
    assert json.loads(millrace(*asked, *given).out)["rows"] == rows, "nothing is left to do"
    other = millrace(*asked[:-1], 3, "--presets", "int8-sq", "--samples-from", text, "--samples", 2)
    other.assert_mistake("has figures of batch 2", "name another folder")


def test_four_bits_are_measured_as_w4a8_too(
    millrace: Millrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of its own, of the loss and speed that `millrace build --precision w4a8` of that folder has."""
    monkeypatch.setattr(method_trials, "_TUNE_S", 0)
    monkeypatch.setattr(method_trials, "ROUNDS", 1)
    source, out = write_checkpoint(tmp_path / "c", width=64, inner=64), tmp_path / "out"
    asked = ("compress", source, "-o", out, "--advise", "--batch", 2, "--presets", "int4-wo")
    told = json.loads(millrace(*asked, "--json").out)
    own, eight = told["rows"]
    assert (own["precision"], eight["precision"]) == ("", "w4a8") and own["name"] == eight["name"] == "int4-wo"
    assert (own["loss"]["precision"], eight["loss"]["precision"]) == ("w4a16", "w4a8")
    assert own["speed"]["made_precision"].startswith("default w4a16")
    assert eight["speed"]["made_precision"].startswith("default w4a8")
    assert eight["bytes"] == own["bytes"] and eight["loss"]["kl"] != own["loss"]["kl"]
    assert {p.name for p in out.iterdir()} == {"about.json", "advice.html", "int4-wo.json", "int4-wo.w4a8.json"}
    (out / "int4-wo.w4a8.json").unlink()
    shown = millrace(*asked)
    assert shown.code == 0 and "int4-wo as w4a8" in shown.out, shown.err
    again = json.loads((out / "int4-wo.w4a8.json").read_text())
    assert again["loss"] == eight["loss"], "as of a folder of an older version, it is measured now"
    commands = [line.strip() for line in shown.out.partition("to make it")[2].splitlines()]
    made = next(line for line in commands if "--recipe int4-wo" in line).split()
    made[made.index("-o") + 1] = str(tmp_path / "made")
    millrace(*made[1:], "--no-evaluate")
    millrace("build", tmp_path / "made", "-o", tmp_path / "engine", "--precision", "w4a8", "--no-evaluate", "--tune", 0)
    manifest = json.loads((tmp_path / "engine" / "manifest.json").read_text())
    assert manifest["precision"]["default"] == "w4a8", "the command that is advised makes what was measured"


def test_help_says_what_a_batch_is_for_advice(millrace: Millrace) -> None:
    shown = " ".join(millrace("compress", "--help").out.split())
    said = shown.partition("--batch N")[2].partition("--advise Make")[0]
    assert f"With --advise, sequences of the large batch; default: {BATCH}." in said
    assert "must not exist, except for --measure and --advise" in shown


def test_mistakes(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    asked = ("compress", source, "-o", tmp_path / "out", "--advise")
    millrace(*asked[:-1], "--presets", "fp8").assert_mistake("no recipe is named", "--recipe int4-wo-mse")
    millrace(*asked, "--presets", "int4-w").assert_mistake("'int4-w'", "int4-wo")
    millrace(*asked, "--batch", 1).assert_mistake("--batch is 1", "2 to 1024")
    millrace(*asked).assert_mistake("--advise needs a text", "--samples-from")
    millrace(*asked, "--presets", "fp8", "--samples", 3).assert_mistake("--advise needs no statistics")
    assert not (tmp_path / "out").exists()
