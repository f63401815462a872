"""`millrace compress --max-loss`: table, JSON, the same again by the recipe; and mistakes."""

import json
from pathlib import Path

import pytest

from millrace.compile.resolve_model import BUNDLED
from millrace.compress.search import search as search_room
from millrace.engine import roofline_probe
from tests.cli.conftest import Millrace
from tests.fuzz.originals import write_checkpoint


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint, a text, and a folder for statistics."""
    folder = tmp_path_factory.mktemp("given")
    whole = (BUNDLED / "calibration.txt").read_text()
    (folder / "half.txt").write_text(whole[: len(whole) // 2])
    return write_checkpoint(folder / "c", width=64, inner=96), folder / "half.txt", folder / "statistics"


def test_the_whole_way(
    millrace: Millrace, given: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept beside the statistics saves the text, the pass and the trying, and gives the same."""
    monkeypatch.setattr(roofline_probe, "ROUND_S", 1e-4)
    monkeypatch.setattr(search_room, "MAX_MIXES", 4)
    source, text, kept = given
    asked = ("compress", source, "--max-loss", "900%", "--statistics", kept)
    told = json.loads(
        millrace(
            *asked, "-o", tmp_path / "a", "--target", "memory", "--samples-from", text, "--samples", 4, "--json"
        ).out
    )
    search, loss = told["search"], told["loss"]
    assert search["found"] == 0 and search["target"] == "memory" and search["unit"] == "bytes" and "rows" not in search
    assert sum(told["formats"].values()) == 7 and loss["kl"] > 0 and loss["tokens"] > 100
    choice = search["choice"]
    assert (
        max(choice["kl"], choice["perplexity"] / choice["source_perplexity"] - 1) <= search["mixes"][0]["measured"] < 9
    )
    assert choice["kl"] != loss["kl"] and choice["digest"] == loss["digest"] and search["proven"] > 0
    again = ("compress", source, "-o", tmp_path / "c", "--recipe", tmp_path / "a" / "recipe.json", "--statistics", kept)
    assert millrace(*again, "--no-evaluate").code == 0
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in "ac"}) == 1
    (damaged,) = kept.glob("formats-*/*v_proj.int8.npz")
    damaged.write_bytes(damaged.read_bytes()[:-30])
    millrace(*asked, "-o", tmp_path / "d").assert_mistake("int8.npz is damaged", "search again")
    damaged.unlink()
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    (hard := tmp_path / "e").write_text("@#$%^&*" * 400)
    shown = millrace(*asked, "-o", tmp_path / "d", "--batch", 2, "--calibration", hard)
    assert "chosen by" in shown.out and ", on other windows" in shown.out and " ± " in shown.out
    assert shown.code == 0 and "<- found" in shown.out and "of a step of 2 rows" in shown.out, shown.err
    search = json.loads((tmp_path / "d" / "compression.json").read_text())["search"]
    assert search["target"] == "latency" and search["rows"] == 2 and search["unit"] == "s" and search["threads"] > 0
    assert 0 < search["mixes"][0]["cost"] <= search["floats"] < 1
    perplexity = json.loads((tmp_path / "d" / "compression.json").read_text())["loss"]["source_perplexity"]
    assert perplexity > vocab_size and "worse than guessing" in shown.err
    assert sorted(p.name for p in tmp_path.iterdir()) == list("acde"), "nothing else is left"


def test_mistakes(millrace: Millrace, given: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, text, _ = given
    asked = ("compress", source, "-o", tmp_path / "made" / "out")
    bounded = (*asked, "--max-loss", "1%")
    millrace(*asked).assert_mistake("no recipe is named", "--max-loss")
    millrace(*bounded, "--target", "memory", "--batch", 2).assert_mistake("--target memory")
    millrace(*bounded, "--target", "speed").assert_mistake("'speed' is not one of", "--help")
    millrace(*bounded).assert_mistake("--max-loss needs a text", "--samples-from")
    millrace(*bounded, "--samples-from", text, "--calibration", text).assert_mistake("are one text")
    millrace(*asked, "--max-loss", "0.01").assert_mistake("'0.01'", "kl:0.01")
    millrace("compress", source, "-o", source, "--max-loss", "1%", "--statistics", tmp_path).assert_mistake("already")
    millrace(*bounded, "--samples-from", text, "--samples", 4, "--calibration", tmp_path / "no").assert_mistake("/no")
    assert not (tmp_path / "made").exists()
