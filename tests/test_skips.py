"""The mechanism behind "nothing skips in silence" (conftest.py): which skips fail a run, and that each is told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXPLAINED = "needs an x86-64 and qemu-user-static"
KNOWN = f"import pytest\ndef test_k(): pytest.skip({EXPLAINED!r})"
# Skips of a test, of a mark, of a fixture and of a whole module, which pytest reports in three ways.
UNKNOWN = """import pytest
@pytest.fixture
def f(): pytest.skip("why, in a fixture")
def test_a(): pytest.skip("why, in a test")
@pytest.mark.skip(reason="why, by a mark")
def test_b(): pass
def test_c(f): pass
"""
MODULE = "import pytest\npytest.skip('why, in a module', allow_module_level=True)"
WHYS = ["by a mark", "in a fixture", "in a module", "in a test"]


TWO = ("-p", "xdist.plugin", "-n", "2", "--dist", "loadfile")


@pytest.mark.parametrize(
    ("contents", "skips", "code", "refused", "workers"),
    [
        ([KNOWN, UNKNOWN, MODULE], "any", 0, [], ()),
        ([KNOWN, UNKNOWN, MODULE], "known", 1, [f"why, {w}" for w in WHYS], ()),
        ([KNOWN, UNKNOWN, MODULE], "known", 1, [f"why, {w}" for w in WHYS], TWO),
        ([KNOWN], "known", 0, [], TWO),
        ([KNOWN], "none", 1, [EXPLAINED], ()),
        ([MODULE], "known", 1, ["why, in a module"], TWO),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ([KNOWN, UNKNOWN, MODULE], "any", 0, [], TWO),
                ([KNOWN], "known", 0, [], ()),
                ([KNOWN], "none", 1, [EXPLAINED], TWO),
                ([MODULE], "known", 1, ["why, in a module"], ()),
            )
        ),
    ],
)
def test_a_skip_fails_the_run_unless_it_is_allowed(
    tmp_path: Path, contents: list[str], skips: str, code: int, refused: list[str], workers: tuple[str, ...]
) -> None:
    """In a process of its own, or two of them, beside a test that passes."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for i, content in enumerate([*contents, "def test_z(): pass"]):
        (tmp_path / f"test_{i}.py").write_text(content)
    words = ("-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", f"--skips={skips}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *workers, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        timeout=60, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    told = [line for line in done.stdout.splitlines() if "skipped 1: " in line]
    assert len(told) == sum({KNOWN: 1, UNKNOWN: 3, MODULE: 1}[content] for content in contents), "each is told"
    found = [line for line in told if line.startswith("NOT ALLOWED, ")]
    assert sorted(found) == [f"NOT ALLOWED, skipped 1: {reason}" for reason in sorted(refused)]
