"""Four ways of `millrace compress`, and which options each takes: all others are refused before anything is read."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace
from tests.fuzz.originals import write_checkpoint

WAYS = {"--recipe": ("fp8",), "--measure": (), "--max-loss": ("1%",), "--advise": ()}
OPTIONS: dict[str, tuple[str, ...]] = {
    "--dry-run": (), "--samples-from": ("text",), "--samples": ("3",), "--statistics": ("folder",),
    "--calibration": ("text",), "--no-evaluate": (), "--measure-speed": (), "--mmlu": ("folder",),
    "--questions": ("3",), "--engine": ("engine",), "--presets": ("fp8",), "--target": ("memory",), "--batch": ("2",),
}  # fmt: skip
REFUSED = {
    "--recipe": {"--presets", "--target", "--batch"},
    "--measure": {
        "--engine",
        "--dry-run",
        "--samples-from",
        "--samples",
        "--statistics",
        "--presets",
        "--target",
        "--batch",
    },
    "--max-loss": {"--no-evaluate", "--measure-speed", "--mmlu", "--questions", "--presets"},
    "--advise": {"--engine", "--no-evaluate", "--measure-speed", "--mmlu", "--questions", "--target"},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_option_that_a_way_does_not_take_is_refused(millrace: Millrace, tmp_path: Path, way: str) -> None:
    """The model is not there: whoever takes the option says that, or what is wrong with its value."""
    asked = ("compress", tmp_path / "gone", "-o", tmp_path / "out", way, *WAYS[way])
    for option, value in OPTIONS.items():
        done = millrace(*asked, option, *value)
        done.assert_mistake(*([f"{option} is given, and {way} does not take it"] if option in REFUSED[way] else []))
        assert ("does not take it" in done.err) == (option in REFUSED[way]), (option, done.err)


def test_there_is_one_way(millrace: Millrace, tmp_path: Path) -> None:
    asked = ("compress", tmp_path / "gone", "-o", tmp_path / "out")
    for one, other in combinations(WAYS, 2):
        millrace(*asked, other, *WAYS[other], one, *WAYS[one]).assert_mistake(f"{one} and {other} are given")
    millrace(*asked, "--presets", "fp8").assert_mistake("no recipe is named", "--max-loss 1%")
    said = millrace(*asked, "--recipe", "fp8", "--batch", 2)
    said.assert_mistake("of options --dry-run, --calibration", "or ask with --max-loss or --advise")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "c", width=256, inner=100)


def test_a_dry_run_of_a_search_reads_headers_alone(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    """No text for statistics is asked for; groups that divide no layer's inputs are not tried."""
    asked = ("compress", source, "-o", tmp_path / "out", "--max-loss", "1%", "--dry-run")
    shown = millrace(*asked, "--samples", 8)
    shown.assert_mistake("--samples is given without a text")
    shown = millrace(*asked)
    assert shown.code == 0 and "nothing was written" in shown.out and "of 65,536 tokens: about" in shown.out, shown.err
    told = json.loads(millrace(*asked, "--json").out)
    assert told["layers"] == 7 and told["formats"] == ["int8", "fp8", "int4-g128", "int4-g64", "int4-g32"]
    assert told["disk_bytes"] > 2 * told["bytes_before"] and 0 < told["memory_bytes"] < told["measuring_memory_bytes"]
    assert told["seconds"] > 0 and told["statistics"]["disk_bytes"] > 0
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_of_advice_says_what_cannot_be(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    asked = ("compress", source, "-o", tmp_path / "out", "--advise", "--presets", "int8-wo,int4-wo,int8-sq")
    shown = millrace(*asked, "--dry-run")
    assert shown.code == 0 and "2 of 3 methods can be tried" in shown.out and "100 inputs" in shown.out, shown.err
    told = json.loads(millrace(*asked, "--dry-run", "--json").out)
    assert "100 inputs" in told["methods"]["int4-wo"]["refused"] and told["statistics"]["seconds"] > 0
    assert told["methods"]["int8-sq"]["statistics"] and not told["methods"]["int8-wo"]["statistics"]
    assert told["methods"]["int8-wo"]["bits_per_weight"] > 8
    assert [*tmp_path.iterdir()] == []


def test_an_engine_is_built_of_what_was_made(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    """It answers as the folder does, of which it is built."""
    out, engine = tmp_path / "out", tmp_path / "made.engine"
    asked = ("compress", source, "-o", out, "--recipe", "int8-wo", "--no-evaluate", "--engine")
    millrace(*asked, source).assert_mistake("is already there")
    millrace(*asked, out / "engine").assert_mistake("one in the other")
    told = json.loads(millrace(*asked, engine, "--json").out)
    assert told["engine"]["seconds"] > 0 and told["bits_per_weight"] > 8
    said = [
        millrace("generate", model, "-p", "the mill", "--max-tokens", 4, "--temperature", 0, "--json").out
        for model in (out, engine)
    ]
    texts = [json.loads(one)["choices"][0]["text"] if "choices" in one else json.loads(one) for one in said]
    assert texts[0] == texts[1]
