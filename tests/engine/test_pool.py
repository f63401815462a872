"""The team of threads that computes steps, in drawn jobs; the thread sanitizer sees what is not ordered."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("tests/native/pool.cpp", "native/pool.cpp", "native/platform.cpp")
RACES = ("-fsanitize=thread", "-O1")
JOBS = {(): 600, RACES: 80}
BY_NIGHT = {(): 1500, RACES: 200}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
@pytest.mark.parametrize("jobs", [JOBS, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)], ids=["some", "many"])
@pytest.mark.parametrize("flags", [(), RACES], ids=["plain", "races"])
def test_drawn_jobs(tmp_path: Path, flags: tuple[str, ...], jobs: dict[tuple[str, ...], int]) -> None:
    """With fewer processors than workers, too: nobody waits for who has not begun."""
    program = tmp_path / "pool"
    command = ["g++", "-std=c++20", "-O2", "-pthread", *flags, f"-I{ROOT / 'native'}", "-o", str(program)]
    subprocess.run([*command, *(str(ROOT / source) for source in SOURCES)], check=True)
    for workers in (1, 2, 3, 9):
        found = subprocess.run(
            [program, str(workers), str(jobs[flags]), str(workers)], capture_output=True, text=True, timeout=100
        )
        assert found.returncode == 0 and not found.stderr, found.stderr[:2000]
