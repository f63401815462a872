"""Four ways of `millrace compress`, and which options each takes: all others are refused before anything is read."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace

WAYS = {"--recipe": ("fp8",), "--measure": (), "--max-loss": ("1%",), "--advise": ()}
OPTIONS: dict[str, tuple[str, ...]] = {
    "--dry-run": (), "--samples-from": ("text",), "--samples": ("3",), "--statistics": ("folder",),
    "--calibration": ("text",), "--no-evaluate": (), "--measure-speed": (), "--mmlu": ("folder",),
    "--questions": ("3",), "--presets": ("fp8",), "--target": ("memory",), "--batch": ("2",),
}  # fmt: skip
REFUSED = {
    "--recipe": {"--presets", "--target", "--batch"},
    "--measure": {"--dry-run", "--samples-from", "--samples", "--statistics", "--presets", "--target", "--batch"},
    "--max-loss": {"--dry-run", "--no-evaluate", "--measure-speed", "--mmlu", "--questions", "--presets"},
    "--advise": {"--dry-run", "--no-evaluate", "--measure-speed", "--mmlu", "--questions", "--target"},
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
