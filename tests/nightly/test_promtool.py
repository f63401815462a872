"""The alerts of examples/monitoring by Prometheus' own tool, which knows PromQL and its templates."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"


def promtool(*words: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    return subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", ["check rules rules.yml", "check config prometheus.yml", "test rules rules_test.yml"])
def test_it_finds_nothing_wrong(words: str) -> None:
    found = promtool(*words.split())
    assert found.returncode == 0, found.stdout + found.stderr
    assert "SUCCESS" in found.stdout and "FAILED" not in found.stdout + found.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("histogram_quantile(0.99,", "histogram_quantil(0.99,", ("check", "rules", "rules.yml")),
        ("> 500000", "> 5000000", ("test", "rules", "rules_test.yml")),
        ('up{job="millrace"} == 0', 'up{job="millrace"} == 1', ("test", "rules", "rules_test.yml")),
    ],
)  # fmt: skip
def test_it_would_find_a_mistake(tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    shutil.copytree(FOLDER, tmp_path / "monitoring")
    rules = tmp_path / "monitoring" / "rules.yml"
    text = rules.read_text()
    assert old in text
    rules.write_text(text.replace(old, new, 1))
    assert promtool(*words, folder=tmp_path / "monitoring").returncode != 0
