"""`millrace serve --model-repository DIR`: as a process, beside a language model, and what keeps it from starting."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Millrace
from tests.support.command_line import environment
from tests.support.kserve_grpc import connected
from tests.support.repository import ADD_SUB, in_process, write_models

ADDED = {
    "inputs": [{"name": f"INPUT{i}", "shape": [1, 16], "datatype": "INT32", "data": [i + 1] * 16} for i in range(2)]
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_models(tmp_path / "models", {"simple": ADD_SUB})


@contextmanager
def two_processes(
    root: Path, built_tiny: Path, cache: Path, more: Mapping[bool, Sequence[str]], **pipes: Any
) -> Iterator[dict[bool, subprocess.Popen[Any]]]:
    """Alone, and beside a language model: at the same time, for much of what they do is waiting. more: arguments"""
    with ExitStack() as started:
        servers = {}
        for beside, arguments in more.items():
            model = [str(built_tiny)][:beside]
            command = [sys.executable, "-m", "millrace", "serve", *model, "--model-repository", str(root), *arguments]
            server = subprocess.Popen(command, env=environment(cache), **pipes)
            servers[beside] = started.enter_context(server)
            started.callback(server.kill)  # where an assertion has failed
        yield servers


def ask(announced: Mapping[str, str], beside: bool) -> None:
    url = announced["url"]
    with connected(announced["grpc_url"]) as client:
        assert client.call("ModelReady", name="simple").ready
    answer = httpx.post(f"{url}/v2/models/simple/infer", json=ADDED).json()
    assert [o["data"][0] for o in answer["outputs"]] == [3, -1]
    listed = [m["id"] for m in httpx.get(f"{url}/v1/models").json()["data"]]
    assert len(listed) == beside and "simple" not in listed
    assert httpx.get(f"{url}/v2/health/ready").status_code == 200
    if beside:
        asked = {"prompt": "Once", "max_tokens": 2, "seed": 1}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=30).json()["usage"]["completion_tokens"] == 2
    assert 'nv_inference_request_summary_us{model="simple"' in httpx.get(f"{url}/metrics").text


def test_served_as_a_process(root: Path, built_tiny: Path, tmp_path: Path) -> None:
    traces = {beside: tmp_path / f"{beside}.json" for beside in (False, True)}
    more = {
        beside: [
            *("--port", "0", "--grpc-port", "0", "--json"),
            *("--trace-config", f"triton,file={trace}", "--trace-config", "level=TIMESTAMPS"),
            *("--trace-config", "rate=1", "--cache-config", "local,size=1M", "--rate-limit", "execution_count"),
            *("--rate-limit-resource", "R:4", "--metrics-config", "summary_latencies=true"),
        ]
        for beside, trace in traces.items()
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with two_processes(root, built_tiny, tmp_path, more, **pipes) as servers:
        for beside, server in servers.items():
            assert server.stdout is not None
            ask(json.loads(server.stdout.readline()), beside)
        until_s = time.monotonic() + 10
        while not all(trace.exists() for trace in traces.values()) and time.monotonic() < until_s:
            time.sleep(0.01)
        for trace in traces.values():
            assert json.loads(trace.read_text())[0]["model_name"] == "simple", "while it runs"
        for server in servers.values():
            server.terminate()
        assert [server.wait(30) for server in servers.values()] == [0, 0]


def test_a_terminal_is_told_where_it_is(root: Path, built_tiny: Path, tmp_path: Path) -> None:
    """And there a key is asked for, but for health."""
    (tmp_path / "keys").write_text("secret\n")
    more = {beside: ["--port", "0", "--api-key-file", str(tmp_path / "keys")] for beside in (False, True)}
    with two_processes(root, built_tiny, tmp_path, more, stderr=subprocess.PIPE, text=True) as servers:
        for beside, server in servers.items():
            assert server.stderr is not None
            line = next(line for line in server.stderr if line.startswith("Ready after"))
            found = re.search(r"http://[0-9.]+:\d+", line)
            assert found is not None, line
            with httpx.Client(base_url=found[0], timeout=20) as client:
                assert client.get("/v2/health/live").status_code == 200
                refused = client.post("/v2/models/simple/infer", json=ADDED)
                assert refused.status_code == 401 and refused.json()["error"].startswith("the API key is missing")
                key = {"authorization": "Bearer secret"}
                assert client.post("/v2/models/simple/infer", json=ADDED, headers=key).status_code == 200
            server.terminate()
            server.stderr.read()
            assert server.wait(30) == 0
            told = ("tensor models at http://" in line, "/v1," in line, "/docs" in line)
            assert told == (beside,) * 3 and "/v2" in line


def test_the_load_generator_drives_it_over_grpc(millrace: Millrace, root: Path) -> None:
    with in_process(root, grpc_port=0) as served:
        load = ["--protocol", "grpc", "--model", "simple", "--batch-size", "2"]
        short = ["--duration-s", "0.2", "--certify-s", "0.2", "--json"]
        done = millrace("bench", "infer", served.grpc_url, *load, *short)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    (point,) = found["points"]
    assert found["model"]["platform"] == "add_sub" and found["model"]["max_batch"] == 8
    assert point["requests"]["whole"] > 10 and point["requests"]["failed"] == 0


def test_ports_that_cannot_be(millrace: Millrace, root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = ["choose another --host or --grpc-port"]
        millrace("serve", "--model-repository", str(root), "--grpc-port", port).assert_mistake(*said)
    both = millrace("serve", "--model-repository", str(root), "--port", port, "--grpc-port", port)
    both.assert_mistake(f"--port and --grpc-port are both {port}")


def test_what_keeps_it_from_starting(millrace: Millrace, root: Path) -> None:
    recorded = millrace("serve", "--model-repository", str(root), "--record", "f")
    recorded.assert_mistake("--record is given, and MODEL is not")
    (root / "simple" / "config.pbtxt").write_text('backend: "add_sub" max_batchsize: 1')
    for arguments, fragments in (
        (["--model-repository", str(root)], ["simple/config.pbtxt:1:20", "max_batchsize", f"millrace lint {root}"]),
        (["--model-repository", str(root / "gone")], ["is no folder"]),
        (["--grpc-port", "0"], ["--grpc-port 0 is for tensor models, and there are none", "--model-repository DIR"]),
        (["--grpc-port", "70000"], ["65535"]),
        (["--load-model", "x"], ["there is none", "--model-repository DIR"]),
        (["--model-repository", str(root), "--load-model", "x"], ["--model-control-mode none", "explicit"]),
        (["--model-repository", str(root), "--model-control-mode", "never"], ["one of none, poll, explicit"]),
        (["--cache-config", "local,size=1M"], ["there are none", "--model-repository DIR"]),
        (["--model-repository", str(root), "--cache-config", "redis,host=x"], ["--cache-config", "local,size=BYTES"]),
        (["--model-repository", str(root), "--rate-limit-resource", "R:1"], ["--rate-limit execution_count"]),
        (["--model-repository", str(root), "--trace-config", "level=TIMESTAMPS"], ["names no file"]),
        (["--model-repository", str(root), "--metrics-config", "summaries=1"], ["summary_latencies"]),
    ):
        millrace("serve", *arguments).assert_mistake(*fragments)


def test_a_name_in_two_repositories(millrace: Millrace, root: Path, tmp_path: Path) -> None:
    """With the flag, also as Triton's command lines have it, the next mistake is what is said."""
    other = write_models(tmp_path / "others", {"simple": ADD_SUB})
    both = ["--model-repository", str(root), "--model-repository", str(other)]
    twice = millrace("serve", *both)
    twice.assert_mistake("simple: model appears in two or more repositories", "or give --model-namespacing")
    assert millrace("lint", root, other).code == 2 and millrace("lint", root, other, "--model-namespacing").code == 0
    (other / "simple" / "config.pbtxt").write_text('backend: "add_sub" max_batchsize: 1')
    for flag in ("--model-namespacing", "--model-namespacing=true"):
        millrace("serve", *both, flag).assert_mistake("simple/config.pbtxt:1:20", "max_batchsize")
    millrace("serve", "--model-namespacing").assert_mistake("there is none", "--model-repository DIR")


def test_traces_and_ports_that_fit_nothing(millrace: Millrace, root: Path) -> None:
    here = ("--model-repository", str(root))
    for arguments, fragments in (
        (["tiny", "--trace-config", "triton,file=t.json"], ["writes files of tensor models", "mode=opentelemetry"]),
        (["tiny", "--trace-config", "mode=jaeger"], ["asks for another mode", "opentelemetry"]),
        ([*here, "--reuse-port", "--port", "0"], ["reuse_port", "any free port"]),
        ([*here, "--reuse-port", "--port", "8124", "--model-control-mode", "explicit"], ["--reuse-port", "poll"]),
    ):
        millrace("serve", *arguments).assert_mistake(*fragments)
