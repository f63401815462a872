"""Load from outside: wrk over HTTP, h2load over gRPC, on a core of their own; and what it cost the server."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.tensors.request import GRPC_METHOD, GRPC_SERVICE, HTTP_PATH

SERVER_CORE, CLIENT_CORE = 0, 1
CONNECTIONS = 64  # with 16 the server's core waits for its client half of the time, and the faster of two waits more
_TICKS = os.sysconf("SC_CLK_TCK")
_STOP_S = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One load on one server: requests a second, and CPU microseconds of the server's process a request."""

    per_s: float
    user_us: float
    system_us: float

    def told(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in asdict(self).items()}


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile stays on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def peer(kind: str) -> contextlib.AbstractContextManager[tuple[int, int]]:
    """Its process and its port. kind: of `peers.py`"""
    return listening([sys.executable, "-m", "benchmarks.tensors.peers", kind])


@contextlib.contextmanager
def listening(command: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Run a server on its core; yield its process and the port that it prints first."""
    with on_core(SERVER_CORE), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(_STOP_S)


def http_load(port: int, pid: int, headers: Mapping[str, str], body: bytes, seconds: int, folder: Path) -> Sample:
    (folder / "body").write_bytes(body)
    told = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in headers.items())
    reading = f'wrk.method = "POST"\nlocal f = io.open("{folder}/body", "rb")\nwrk.body = f:read("*a")\nf:close()\n'
    (folder / "post.lua").write_text(reading + told)
    return _wrk(port, pid, seconds, folder)


def _wrk(port: int, pid: int, seconds: int, folder: Path) -> Sample:
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", f"{folder}/post.lua"]
    said, sample = _loaded([*command, f"http://127.0.0.1:{port}{HTTP_PATH}"], pid, r"(\d+) requests in")
    assert "Non-2xx" not in said and "Socket errors" not in said, said
    return sample


_NUMBERED = """
local f = io.open("%(folder)s/body", "rb")
local body, n = f:read("*a"), 0
f:close()
wrk.method = "POST"
request = function()
  n = n + 1
  local head = '{"id":"' .. n .. '",' .. body:sub(2, %(n_head)s)
  wrk.headers["inference-header-content-length"] = tostring(#head)
  return wrk.format(nil, nil, nil, head .. body:sub(%(n_head)s + 1))
end
"""


def numbered_load(port: int, pid: int, headers: Mapping[str, str], body: bytes, seconds: int, folder: Path) -> Sample:
    """As `http_load`, with another id in each request, as clients have them that number theirs."""
    (folder / "body").write_bytes(body)
    told = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in headers.items())
    numbers = _NUMBERED % {"folder": folder, "n_head": headers["inference-header-content-length"]}
    (folder / "post.lua").write_text(numbers + told)
    return _wrk(port, pid, seconds, folder)


def grpc_load(port: int, pid: int, frame: bytes, seconds: int, folder: Path) -> Sample:
    """frame: the message as gRPC writes it"""
    (folder / "frame").write_bytes(frame)
    command = ["h2load", f"-c{CONNECTIONS}", "-m1", "-t1", "-D", str(seconds), "-d", f"{folder}/frame",
               "-H", "content-type: application/grpc", "-H", "te: trailers"]  # fmt: skip
    path = f"http://127.0.0.1:{port}/{GRPC_SERVICE}/{GRPC_METHOD}"
    said, sample = _loaded([*command, path], pid, r"(\d+) 2xx")
    assert re.search(r"status codes: \d+ 2xx, 0 3xx, 0 4xx, 0 5xx", said), said
    return sample


def _loaded(command: list[str], pid: int, counted: str) -> tuple[str, Sample]:
    before, began_s = cpu_s(pid), time.perf_counter()
    with on_core(CLIENT_CORE):
        done = subprocess.run(command, capture_output=True, text=True)
    took_s, after = time.perf_counter() - began_s, cpu_s(pid)
    assert done.returncode == 0, done.stderr
    found = re.search(counted, done.stdout)
    assert found is not None, done.stdout
    n = int(found[1])
    assert n, done.stdout
    user_us, system_us = ((b - a) / n * 1e6 for a, b in zip(before, after, strict=True))
    return done.stdout, Sample(n / took_s, user_us, system_us)


def cpu_s(pid: int) -> tuple[float, float]:
    """Of a process with all of its threads: user, system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / _TICKS, int(fields[12]) / _TICKS


def versions() -> dict[str, Any]:
    """Of what is measured with, and beside."""
    from importlib.metadata import version

    names = ("fastapi", "uvicorn", "httptools", "uvloop", "grpcio", "protobuf", "numpy")
    wrk = subprocess.run(["wrk", "-v"], capture_output=True, text=True).stdout.split("\n")[0]
    return {**{name: version(name) for name in names}, "wrk": wrk.partition(" [")[0], "h2load": h2load_version()}


def h2load_version() -> str:
    return subprocess.run(["h2load", "--version"], capture_output=True, text=True).stdout.strip()
