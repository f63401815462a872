"""What a precision costs, as commands say it: measured before a build, kept in the engine, and not measured again."""

import json
import os
import shutil
from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile import builder
from millrace.compile.builder import Builder, build_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.manifest import read_manifest
from millrace.evaluate import calibration
from millrace.tune.precision import AccuracySelector
from millrace.tune.precision_selector import precision_selector
from tests.cli.conftest import Millrace
from tests.support.checkpoints import random_encoder

ASK = ("-p", "Hi", "--max-tokens", "1", "--tune", "0")
SHORT = ("--max-context", "64", "--tune", "0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TOKENS", 192)


def test_a_lossy_precision_is_obeyed_and_its_accuracy_shown(millrace: Millrace, tmp_path: Path) -> None:
    out = tmp_path / "e"
    built = millrace("build", "tiny", "-o", out, "--precision", "w4a8", *SHORT)
    assert (
        built.code == 0
        and "w4a8 g128, lm_head w8a8: KL 0." in built.out
        and "of the bundled text, compared with fp32" in built.out
    )
    assert "measuring fp32, the reference, piece by piece ..." in built.err
    m = read_manifest(out)
    assert (
        m.precision["default"] == "w4a8"
        and m.evaluation.chosen_loss
        and m.evaluation.chosen_loss.kl
        and m.evaluation.tokens
    )
    assert m.evaluation.summary in millrace("inspect", out).out
    shown = json.loads(millrace("inspect", out, "--json").out)["evaluation"]
    assert shown["tried"][0]["kl"] == m.evaluation.chosen_loss.kl and shown["max_kl"] is None
    assert millrace("inspect", out, "--html", tmp_path / "e.html").code == 0
    page = (tmp_path / "e.html").read_text()
    assert "Accuracy of the precision" in page and f"{m.evaluation.chosen_loss.kl:.3g}" in page


def test_auto_keeps_its_choice_and_evidence(millrace: Millrace, tmp_path: Path) -> None:
    for name in ("one", "two"):
        built = millrace(
            "build", "tiny", "-o", tmp_path / name, "--precision", "auto", "--max-kl", "0.1", "--bf16-sums", "pairs",
            *SHORT,
        )  # fmt: skip
        assert "auto chose w8a8 g128: KL 0.0" in built.out and "rejected: w4a8 g128, lm_head w8a8 0." in built.out
    files = [sorted((p.name, p.read_bytes()) for p in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert files[0] == files[1], "two builds give the same bytes"
    m = read_manifest(tmp_path / "one")
    assert m.precision["default"] == "w8a8" and m.evaluation.max_kl == 0.1
    assert [p.name for p in m.evaluation.tried] == ["w4a8 g128, lm_head w8a8", "w8a8 g128"]
    assert "Precisions tried" in millrace("inspect", tmp_path / "one").out
    plain = build_engine("tiny", BUNDLED / "tiny", tmp_path / "plain", BuildSettings(
        precision="w8a8", max_context=64, tune=0, bf16_sums="pairs"))  # fmt: skip
    assert plain.manifest.identity == m.identity, "what was measured is no part of what decides answers"


def test_the_choice_is_the_same_where_there_are_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that sums bfloat16 by tiles, and one that does not, measure the same; who asks for tiles gets them."""
    found, settings = [], {"precision": "auto", "max_kl": 0.1, "max_context": 64, "tune": 0}
    for name, isas, more in (("without", (), {}), ("with", ("amx",), {}), ("asked", (), {"bf16_sums": "tiles"})):
        monkeypatch.setattr(builder, "usable_isas", lambda isas=isas: isas)
        engine = build_engine(
            "tiny", BUNDLED / "tiny", tmp_path / name, BuildSettings(**settings, **more),  # type: ignore[arg-type]
            new_selector=precision_selector,
        )  # fmt: skip
        found.append((engine.manifest.cpu.bf16_sums, engine.manifest.evaluation))
    (pairs, one), (tiles, other), (_, theirs) = found
    assert (pairs, tiles) == ("pairs", "tiles") and one == other
    assert [p.name for p in theirs.tried][-1] == "w8a8 g128, bf16 summed by tiles"
    assert theirs.chosen_loss and one.chosen_loss and theirs.chosen_loss.kl != one.chosen_loss.kl


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((), "it runs in what the checkpoint stores"),
        (("--precision", "bf16"), "it runs in what the checkpoint stores"),
        (("--precision", "fp32"), "fp32 is what other precisions are measured against"),
        (("--precision", "w8a8", "--no-evaluate"), "--no-evaluate was given"),
    ],
)
def test_what_is_not_measured_says_why(millrace: Millrace, tmp_path: Path, asked: tuple[str, ...], why: str) -> None:
    built = millrace("build", "tiny", "-o", tmp_path / "e", *asked, *SHORT)
    assert built.code == 0 and f"not measured: {why}" in built.out and "measuring" not in built.err
    assert read_manifest(tmp_path / "e").evaluation.not_measured == why


@pytest.mark.parametrize(
    "asked",
    [("--kv-cache-dtype", "int8"), ("--head", "w8a8"), ("--precision", "fp32", "--kv-cache-dtype", "bf16")],
)
def test_whatever_changes_answers_is_measured(millrace: Millrace, tmp_path: Path, asked: tuple[str, ...]) -> None:
    built = millrace("build", "tiny", "-o", tmp_path / "e", *asked, *SHORT)
    assert ": KL " in built.out, built.out


def test_a_built_engine_is_not_measured_again(millrace: Millrace, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("generate", "tiny", *ASK, "--precision", "w8a8", "--max-context", "64")
    first = millrace(*asked)
    assert first.code == 0 and "note: w8a8 g128: KL" in first.err
    listed = json.loads(millrace("list", "--json").out)
    assert listed[0]["kl"] > 0 and ": KL" in listed[0]["accuracy"]
    measured: list[object] = []
    monkeypatch.setattr(AccuracySelector, "select", lambda self, query: measured.append(query))
    again = millrace(*asked)
    assert again.code == 0 and "note: w8a8 g128: KL" in again.err and not measured, "who runs it is told"
    assert len(json.loads(millrace("list", "--json").out)) == 1


def test_the_key_says_what_was_asked_and_on_which_text(tmp_path: Path) -> None:
    mine, checkpoint = tmp_path / "text", Checkpoint.open(BUNDLED / "tiny")
    mine.write_text("The wheel turned. " * 90)

    def key(**given: object) -> str:
        build = BuildSettings(**given)  # type: ignore[arg-type]
        return Builder.from_settings("tiny", checkpoint, build, None, new_selector=precision_selector).key

    auto = key(precision="auto")
    assert auto == key(precision="auto", max_kl=0.01) and key() == key(precision="bf16") == key(evaluate=False)
    others = [
        key(precision="auto", max_kl=0.02), key(precision="auto", calibration=str(mine)),
        key(precision="auto", head="bf16"),
        key(precision="auto", group=64), key(precision="auto", kv_cache_dtype="int8"), key(precision="w8a8"),
        key(precision="w8a8", calibration=str(mine)), key(precision="w8a8", evaluate=False), key(),
    ]  # fmt: skip
    assert len({auto, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--max-kl", "0.1"), "--max-kl is given without --precision auto"),
        (("--precision", "w8a8", "--max-kl", "0.1"), "--max-kl is given without --precision auto"),
        (("--precision", "auto", "--max-kl", "-1"), "--max-kl is -1"),
        (("--precision", "auto", "--max-kl", "nan"), "--max-kl is nan"),
        (("--precision", "auto", "--max-kl", "1e-9"), "the best is bf16"),
        (("--precision", "auto", "--no-evaluate"), "--no-evaluate was given"),
        (("--precision", "auto", "--calibration", "EMPTY"), "is empty"),
        (("--precision", "w8a8", "--calibration", "LATIN"), "is not UTF-8"),
        (("--precision", "w8a8", "--calibration", "WORD"), "at least 64, one window"),
        (("--precision", "w8a8", "--calibration", "NONE"), "cannot read --calibration"),
        (("--calibration", "WORD"), "nothing is measured: it runs in what the checkpoint stores"),
        (("--precision", "w8a8", "--group", "6"), "multiple of 4"),
    ],
)  # fmt: skip
def test_mistakes_are_said_before_anything_is_built(
    millrace: Millrace, tmp_path: Path, asked: tuple[str, ...], said: str
) -> None:
    for name, content in (("EMPTY", b""), ("LATIN", "Mühle ".encode("latin-1") * 99), ("WORD", b"wheel")):
        (tmp_path / name).write_bytes(content)
    arguments = [str(tmp_path / a) if a.isupper() else a for a in asked]
    millrace("build", "tiny", "-o", tmp_path / "e", *SHORT, *arguments).assert_mistake(said)
    assert not (tmp_path / "e").exists()


def test_a_map_names_no_auto(millrace: Millrace, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text('{"default": "auto"}')
    result = millrace("build", "tiny", "-o", tmp_path / "e", "--precision-map", file)
    result.assert_mistake('"auto" is unknown', "auto is chosen for the whole model")


@pytest.mark.parametrize("option", ["--calibration", "--precision-map"])
def test_a_pipe_that_nobody_writes_into_holds_up_nothing(millrace: Millrace, tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    precision = ("--precision", "w8a8") if option == "--calibration" else ()
    result = millrace("build", "tiny", "-o", tmp_path / "e", option, tmp_path / "pipe", *precision, *SHORT)
    result.assert_mistake("is empty" if option == "--calibration" else "cannot read")


BAD_MAPS = {
    "bytes": (b"[" * (2 << 20), "more than 1 MiB"),
    "depth": (b'{"default":' * 60_000, "cannot read"),
    "keys": (b'{"default": "w8a8", "default": "bf16"}', '"default" is there twice'),
    "patterns": (json.dumps({"default": "w8a8", **{f"l.{i}": "bf16" for i in range(5000)}}).encode(), "at most 4,096"),
    "length": (json.dumps({"default": "w8a8", "l" * 300: "bf16"}).encode(), "more than 200 characters"),
    "latin": ('{"default": "Mühle"}'.encode("latin-1"), "cannot read"),
}


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_map_has_bounds(millrace: Millrace, tmp_path: Path, name: str) -> None:
    content, said = BAD_MAPS[name]
    (tmp_path / "map.json").write_bytes(content)
    millrace("build", "tiny", "-o", tmp_path / "e", "--precision-map", tmp_path / "map.json").assert_mistake(said)


def test_room_is_looked_for_before_measuring(
    millrace: Millrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - 1000, 1000))
    result = millrace("build", "tiny", "-o", tmp_path / "new" / "e", "--precision", "w4a8", *SHORT)
    result.assert_mistake("1,000 are free there")
    assert "measuring" not in result.err


def test_encoders_are_not_measured(millrace: Millrace, tmp_path: Path) -> None:
    model = random_encoder(tmp_path / "m")
    millrace("build", model, "-o", tmp_path / "a", "--precision", "auto").assert_mistake(
        "--precision auto", "an encoder"
    )
    built = millrace("build", model, "-o", tmp_path / "e", "--precision", "w8a8", "--tune", "0")
    assert built.code == 0 and "not measured: an encoder gives vectors" in built.out


def test_what_is_there_already_is_said_before_measuring(millrace: Millrace, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    result = millrace("build", "tiny", "-o", tmp_path / "e", "--precision", "w4a8")
    result.assert_mistake("is already there")
    assert "measuring" not in result.err


def test_ctrl_c_ends_the_measuring(millrace: Millrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("millrace.evaluate.piecewise_forward.step_of", interrupted)
    assert millrace("build", "tiny", "-o", tmp_path / "e", "--precision", "w4a8", *SHORT).code == 130
    assert not (tmp_path / "e").exists()
