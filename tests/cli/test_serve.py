"""`millrace serve` as a process: ready, asked, stopped; and what keeps it from starting."""

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from millrace.bench.client.demo_client import DemoChatRequest, ask
from millrace.bench.run.server_process import ServerProcess
from millrace.cli.doctor import run
from millrace.cli.serve import run as serve_command
from millrace.machine.cpu import usable_cores
from millrace.runtime.scheduling.admission_policy import Policy, fcfs, longest_prefix, shortest_first
from millrace.serve.llm.language_model import TextModel
from tests.cli.conftest import Millrace
from tests.support.command_line import environment


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.txt"
    file.write_text("# ours\nsecret\n\nother\n")
    return file


def get(url: str, key: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_ready_asked_and_drained(built_tiny: Path) -> None:
    with ServerProcess(built_tiny, ("--served-model-name", "mine", "--log-level", "error")) as server:
        assert server.ready_s > 0
        status, models = get(f"{server.url}/v1/models")
        assert status == 200 and [m["id"] for m in json.loads(models)["data"]] == ["mine"]
        heard = ask(server.url, DemoChatRequest("Tell me a story.", 20, seed=1, ignore_eos=True))
        assert heard.n_output == 20 and heard.text and heard.finish_reason == "length"
        assert 0 < heard.ttft_s <= heard.chunk_s[-1] and len(heard.pauses_s) == len(heard.chunk_s) - 1
        assert ask(server.url, DemoChatRequest("Tell me a story.", 20, seed=1, ignore_eos=True)).text == heard.text
        server.terminate()
        assert server.wait() < 20


def test_the_least_time_of_a_step_beside_what_it_takes(
    millrace: Millrace, built_tiny: Path, measured: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gauges(*flags: str) -> dict[str, float]:
        with ServerProcess(built_tiny, ("--log-level", "error", *flags)) as server:
            ask(server.url, DemoChatRequest("Tell me a story.", 30, seed=1, ignore_eos=True))
            lines = get(f"{server.url}/metrics")[1].decode().splitlines()
        pairs = (line.split(" ") for line in lines if line.startswith("millrace:decode_step"))
        return {name.partition("{")[0].removeprefix("millrace:"): float(value) for name, value in pairs}

    assert gauges() == {}, "nobody has measured this machine"
    monkeypatch.setattr(run, "load", lambda: 99.0)
    assert json.loads(millrace("doctor", "--json").out)["kept"] is None
    monkeypatch.setattr(run, "load", lambda: 0.0)
    assert Path(json.loads(millrace("doctor", "--json").out)["kept"]).is_file()
    found = gauges()
    assert 0 < found["decode_step_bound_seconds"] < found["decode_step_seconds"] < 1
    assert gauges("--threads", str(usable_cores() + 1)) == {}, "another run than the measured one"


def test_api_keys(built_tiny: Path, keys: Path) -> None:
    with ServerProcess(built_tiny, ("--api-key-file", str(keys), "--log-level", "error")) as server:
        assert get(f"{server.url}/v1/models")[0] == 401
        assert get(f"{server.url}/v1/models", "wrong")[0] == 401
        assert get(f"{server.url}/v1/models", "other")[0] == 200
        server.terminate()
        server.wait()


def test_a_missing_or_empty_key_file(millrace: Millrace, built_tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    millrace("serve", built_tiny, "--api-key-file", file).assert_mistake("cannot read the API keys", "keys.txt")
    file.write_text("# nothing\n\n")
    millrace("serve", built_tiny, "--api-key-file", file).assert_mistake("holds no API key")


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_is_none(millrace: Millrace, built_tiny: Path, port: str) -> None:
    millrace("serve", built_tiny, "--port", port).assert_mistake(f"--port is {port}", "0 to 65535")


def test_a_port_that_is_taken(millrace: Millrace, built_tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        millrace("serve", built_tiny, "--port", port).assert_mistake(f"cannot listen on 127.0.0.1:{port}", "--port")


@pytest.mark.parametrize(
    "flags, fragment",
    [
        (["--log-level", "loud"], '--log-level is "loud"'),
        (["--log-format", "xml"], "text, json"),
        (["--max-body-bytes", "much"], "512M"),
        (["--max-queued", "0"], "at least 1"),
        (["--itl-ms", "0.9"], "--itl-ms is 0.9\n  expected: 1 to 60000"),
        (["--itl-ms", "60001"], "--itl-ms is 60001.0\n  expected: 1 to 60000"),
        (["--itl-ms", "nan"], "--itl-ms is nan\n  expected: 1 to 60000"),
        (["--itl-ms", "soon"], "--itl-ms"),
        (["--schedule", "shortes"], '--schedule is "shortes"\n  expected: one of fcfs, shortest, prefix'),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
        (["--warm-prompts", "no/such.jsonl"], "cannot read the prompts of no/such.jsonl"),
        (["--warm-prompts", "x.jsonl", "--no-prefix-cache"], "--warm-prompts and --no-prefix-cache are both given"),
    ],
)
def test_other_flags(millrace: Millrace, built_tiny: Path, flags: list[str], fragment: str) -> None:
    millrace("serve", built_tiny, *flags).assert_mistake(fragment)


@pytest.mark.parametrize(
    "flags, gap_s, n_tokens, policy",
    [
        ([], 0.1, 98, fcfs),
        (["--itl-ms", "8", "--schedule", "shortest"], 0.008, 6, shortest_first),
        (["--itl-ms", "60000", "--schedule", "prefix"], 60.0, 2**31, longest_prefix),
    ],
)
def test_turns_are_those_of_the_loop_that_serves(
    millrace: Millrace, built_tiny: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], gap_s: float,
    n_tokens: int, policy: Policy,
) -> None:  # fmt: skip
    """n_tokens: of prompts that a step of 1.5 ms has room for within the gap, at 1 ms each"""
    served: list[TextModel] = []
    monkeypatch.setattr(serve_command, "serve", lambda models, *others, **named: served.extend(models))
    assert millrace("serve", built_tiny, "--port", "0", *flags).code == 0
    scheduler = served[0].engine.loop._scheduler
    assert scheduler.budget.gap_limit_s == gap_s and scheduler._order._policy is policy
    scheduler.budget.stretch = math.inf  # the other limit
    scheduler.budget.observe(0, 0.0015)
    scheduler.budget.observe(64, 0.0655)
    assert scheduler.budget.prefill_tokens(1) == min(n_tokens, scheduler.limits.max_step_tokens - 1)


@pytest.mark.parametrize(("flags", "found"), [((), True), (("--no-prefix-cache",), False)])
def test_prompts_of_a_file_are_known_from_the_start(
    built_tiny: Path, tmp_path: Path, flags: tuple[str, ...], found: bool
) -> None:
    prompt = "Once there was a mill by a river. " * 12
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": prompt}) + "\n")
    flags = flags or ("--warm-prompts", str(file))
    with ServerProcess(built_tiny, ("--log-level", "error", *flags)) as server:
        body = json.dumps({"prompt": prompt + "It turned.", "max_tokens": 1}).encode()
        asked = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=20) as reply:
            usage = json.loads(reply.read())["usage"]
    n_new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert 1 <= n_new <= 8 if found else n_new == usage["prompt_tokens"], "all but `It turned.`"


def process(arguments: list[str], cache: Path, out: int, err: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments], stdout=out, stderr=err, env=environment(cache)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_server_goes_on_when_nobody_reads_what_it_says(built_tiny: Path, tmp_path: Path, flags: list[str]) -> None:
    """`millrace serve tiny 2>&1 | head -1`: the pipe is closed before the announcement is complete."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    reading, writing = os.pipe()
    os.close(reading)
    log = (tmp_path / "log").open("wb")
    with log, process(["serve", str(built_tiny), "--port", port, *flags], tmp_path, writing,
                      log.fileno() if flags else writing) as server:  # fmt: skip
        os.close(writing)
        until_s = time.monotonic() + 60
        while True:
            try:
                assert get(f"http://127.0.0.1:{port}/v1/models")[0] == 200
                break
            except urllib.error.URLError:
                assert server.poll() is None and time.monotonic() < until_s, server.returncode
                time.sleep(0.05)
        server.terminate()
        assert server.wait(60) == 0
    assert b"Traceback" not in (tmp_path / "log").read_bytes()


def test_a_list_that_nobody_reads_ends_quietly(millrace: Millrace, cache: Path) -> None:
    millrace("generate", "tiny", "Once", "--max-tokens", "1", "--tune", "0")
    for arguments in (["list"], ["list", "--json"], ["inspect", "tiny", "--calls"]):
        reading, writing = os.pipe()
        os.close(reading)
        with process(arguments, cache, writing, subprocess.PIPE) as told:
            os.close(writing)
            assert told.communicate(timeout=60)[1] == b"" and told.returncode == 1


def test_what_was_asked_is_recorded_without_text(built_tiny: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "traffic.jsonl", "Tell me a story of a mill. " * 60
    with ServerProcess(built_tiny, ("--record", str(file), "--log-level", "error")) as server:
        heard = [ask(server.url, DemoChatRequest(text, n, seed=1, ignore_eos=True)) for n in (3, 5)]
        server.terminate()
        server.wait()
    lines = [json.loads(line) for line in file.read_text().splitlines()][-2:]  # before them, the warm-up's
    assert [line["input_length"] for line in lines] == [h.n_prompt for h in heard]
    assert [line["output_length"] for line in lines] == [3, 5]
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"] and lines[0]["timestamp"] < lines[1]["timestamp"]
    assert "mill" not in file.read_text() and set(lines[0]) == {
        "timestamp", "input_length", "output_length", "hash_ids", "duration", "waited", "max_tokens",
    }  # fmt: skip
