"""`millrace build` that is told to end, or is killed: nothing stays for good."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Millrace
from tests.support.command_line import environment, heard

# A build that tunes for a minute, whatever there is to tune, when its files are written.
BUILD = """
import time
from millrace.compile import build
from millrace.cli.main import main
build.tune_folder = lambda *_: time.sleep(60)
main()
"""


def ended(folder: Path, signal_number: int) -> int:
    """Start a build, send it the signal when its files are written, and return the exit code."""
    arguments = ["build", "tiny", "-o", str(folder / "e"), "--tune", "60"]
    with subprocess.Popen(
        [sys.executable, "-c", BUILD, *arguments], stderr=subprocess.DEVNULL, env=environment(folder / "cache"),
        preexec_fn=heard,
    ) as process:  # fmt: skip
        until_s = time.monotonic() + 60
        while not any(folder.glob(".e.*.unfinished/program.bin")) and time.monotonic() < until_s:
            time.sleep(0.01)
        process.send_signal(signal_number)
        return process.wait(30)


def left(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name != "cache"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_build_that_is_told_to_end_leaves_nothing(tmp_path: Path, number: int) -> None:
    assert ended(tmp_path, number) == 128 + number
    assert left(tmp_path) == []


def test_a_killed_build_is_cleared_away_by_the_next(millrace: Millrace, tmp_path: Path) -> None:
    assert ended(tmp_path, signal.SIGKILL) == -signal.SIGKILL
    assert len(left(tmp_path)) == 1
    assert millrace("build", "tiny", "-o", tmp_path / "e", "--tune", "0").code == 0
    assert left(tmp_path) == ["e"]


# In a process of its own: a signal that found no handler would end the suite.
SIGNALLED = """
import os, signal, time
from millrace.cli.signals import raise_on_sigterm

signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
with raise_on_sigterm():
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
try:
    with raise_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
except SystemExit as caught:
    assert caught.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print("as before")
"""


def test_signals_are_as_before_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "as before\n", "")
