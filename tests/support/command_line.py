"""The command line, run in this process or as one of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def assert_mistake(self, *fragments: str) -> None:
        """Exit 2, and one message in three parts on stderr that holds these fragments."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "error: " in self.err and "expected: " in self.err and "to fix: " in self.err
        assert "Traceback" not in self.err
        for fragment in fragments:
            assert fragment in self.err, f"{fragment!r} is not in:\n{self.err}"


def environment(cache: Path) -> dict[str, str]:
    """This process's, with a cache of the test's own and no hub."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def run_process(arguments: Sequence[str], cache: Path, given: bytes = b"") -> Result:
    """`millrace ARGUMENTS` as its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "millrace", *arguments], input=given, capture_output=True, env=environment(cache)
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def heard() -> None:
    """Of a child, before it begins: a suite that runs in a shell's background, or under nohup, hands on that these
    signals are ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def interrupted(arguments: Sequence[str], cache: Path, after: bytes) -> Result:
    """Starts a process, sends SIGINT once stdout holds `after`, and gives how it ended."""
    command = [sys.executable, "-m", "millrace", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(cache), preexec_fn=heard
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        out, until_s = b"", time.monotonic() + 60
        while after not in out and time.monotonic() < until_s:
            out += process.stdout.read1(1024)  # type: ignore[attr-defined]
        process.send_signal(signal.SIGINT)
        out += process.stdout.read()
        err = process.stderr.read()
    return Result(process.returncode, out.decode(), err.decode())
