"""What is said while long work goes on, where no terminal is there to draw bars on."""

import re
from pathlib import Path

import pytest

from millrace.cli.console import Lines, progress
from tests.cli.conftest import Millrace

GIB = 1 << 30


def test_a_first_start_says_what_it_does(millrace: Millrace) -> None:
    said = millrace("generate", "tiny", "Once", "--max-tokens", "1", "--tune", "0.1").err
    assert re.search(r"^building tiny into \S+/engines/tiny-\w+ \.\.\.$", said, re.MULTILINE), said
    assert "\ntiming kernels ...\n" in said and "reading the checkpoint ..." in said
    assert said.count(" ...\n") == 3, "one line a phase, not one a weight"
    again = millrace("generate", "tiny", "Once", "--max-tokens", "1", "--tune", "0.1").err
    assert " ...\n" not in again, "it is there"


def test_json_is_quiet(millrace: Millrace, tmp_path: Path) -> None:
    for command in (["generate", "tiny", "Once", "--max-tokens", "1"], ["build", "tiny", "-o", tmp_path / "e"]):
        assert millrace(*command, "--tune", "0", "--json").err == ""
    assert "building tiny into" in millrace("build", "tiny", "-o", tmp_path / "other", "--tune", "0").err


def test_a_line_about_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 100.0
    report = Lines(lambda: now_s)
    report("building m into e", 0, 4 * GIB)
    for i in range(1, 41):  # a weight a second
        now_s += 1
        report(f"layers.{i}", i * GIB // 10, 4 * GIB)
    report("weights", 4 * GIB, 4 * GIB)
    for rows in range(5):
        report("timing kernels" if rows == 0 else f"timing kernels with {rows} rows", rows, 5)
    assert capsys.readouterr().err.splitlines() == [
        "building m into e ...", "  layers.10: 1 GiB of 4 GiB", "  layers.20: 2 GiB of 4 GiB",
        "  layers.30: 3 GiB of 4 GiB", "  layers.40: 4 GiB of 4 GiB", "timing kernels ...",
    ]  # fmt: skip


def test_a_download_whose_size_becomes_known_is_one_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as report:
        for total in (0, GIB, 2 * GIB):
            report("downloading org/\x1bname", 7, total)
    assert capsys.readouterr().err == "downloading org/\\x1bname ...\n"
    with progress(quiet=True) as report:
        report("downloading", 0, 1)
    assert capsys.readouterr().err == ""
