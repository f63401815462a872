"""`millrace size verify`: a server of its own under a small load, its profile for `millrace serve`, and mistakes."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.bench.client.demo_client import DemoChatRequest, ask
from millrace.bench.run.server_process import ServerProcess
from millrace.size.simulation import capacity
from tests.cli.conftest import Millrace

SHORT = ("--isl", "24", "--osl", "12", "--loads", "0.3", "--rounds", "1", "--each-s", "0.6", "--probe-s", "0.3")


def test_a_server_beside_its_prediction(
    millrace: Millrace, built_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How near they are is not asked of a second on a busy machine; that they are of the same load is."""
    file = tmp_path / "p.json"
    done = millrace("size", "verify", built_tiny, *SHORT, "--json", "-o", file, "--", "--itl-ms", "77")
    told = json.loads(done.out)
    assert done.code == (0 if told["holds"] else 3), done.err
    assert told["holds"] == (told["median_error"] <= 0.1 and told["p90_error"] <= 0.25)
    assert told["profile"]["schedule"]["gap_limit_s"] == pytest.approx(0.077), "the flag went to the server"
    (load,) = told["loads"]
    assert load["share"] == 0.3 and load["requests_per_s"] == pytest.approx(0.3 * told["capacity_requests_per_s"])
    by = {(f["name"], f["of"]): f for f in load["figures"]}
    for name, error in told["median_errors"].items():
        errors = [abs(f["error"]) for f in load["figures"] if f["judged"] and f["name"] == name]
        assert error == pytest.approx(sum(errors) / len(errors)), "of one figure, or of two"
    assert set(told["median_errors"]) == {"ttft", "itl", "throughput"}
    assert len(by) == 7 and sum(f["judged"] for f in by.values()) == told["figures_judged"] == 5
    for figure in by.values():
        assert figure["error"] == pytest.approx(figure["predicted"] / figure["measured"] - 1)
        assert figure["predicted"] > 0 and figure["measured"] > 0
    assert by["ttft", "mean"]["measured"] < by["e2e", "mean"]["measured"] < 60
    assert by["ttft", "mean"]["predicted"] < by["e2e", "mean"]["predicted"] < 60
    with ServerProcess(built_tiny, ("--log-level", "error", "--profile", str(file))) as server:
        ask(server.url, DemoChatRequest("Tell me a story.", 30, seed=1, ignore_eos=True))
        (ran,) = json.loads(_read(f"{server.url}/timeline.json"))["data"]
        lines = [line for line in _read(f"{server.url}/metrics").splitlines() if line.startswith("millrace:step_")]
    metrics = {line.partition("{")[0]: float(line.split(" ")[-1]) for line in lines}
    predicted, measured = _by_hand(told["profile"], ran["steps"])
    assert metrics["millrace:step_predicted_seconds"] == pytest.approx(predicted, rel=1e-4)
    assert metrics["millrace:step_seconds"] == pytest.approx(measured, rel=1e-4)
    assert len(ran["steps"]) >= 30 and predicted > 0, "a token each, but for the first"
    monkeypatch.setattr(capacity, "_LEAST", 100)  # requests that are simulated
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)
    asked = ("size", "--hardware", "this", "--isl", "24", "--osl", "12", "--rate", "5", "--ttft-ms", "60000", "--json")
    answer = json.loads(millrace(*asked, "--profile", file).out)["answer"]
    assert "measured steps of" in answer["provenance"] and answer["error"] == told["profile"]["error"]
    assert 0.1 < answer["point"]["requests_per_s"] / told["capacity_requests_per_s"] < 10, "of another moment"
    other = json.loads(file.read_text()) | {"engine": "0" * 32}
    file.write_text(json.dumps(other))
    millrace("serve", built_tiny, "--port", "0", "--profile", file).assert_mistake("the profile is of the engine 000")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        found: str = reply.read().decode()
    return found


def _by_hand(profile: dict[str, Any], steps: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean seconds of the last 256 steps, by what `verify` told and as the server's timeline has them: predicted by
    times between knots, pairs of a prompt's tokens, and contexts that are read; measured."""
    cost, last = profile["cost"], steps[-256:]
    tokens, times = zip(*cost["at"], strict=True)
    total = 0.0
    for step in last:
        n = step["rows"] + sum(n for _, n in step["prompts"])
        pairs = sum(n * (start + n / 2) for start, n in step["prompts"])
        total += float(np.interp(n, tokens, times)) + max(0, n - tokens[-1]) * cost["token"]
        total += pairs * cost["pair"] + step["contexts"] * cost["read"]
    slower = sum(profile["spread"]) / len(profile["spread"])
    return slower * total / len(last), sum(step["took_s"] for step in last) / len(last)


def test_mistakes(millrace: Millrace, built_tiny: Path) -> None:
    millrace("size", "verify").assert_mistake("neither MODEL nor --url")
    millrace("size", "verify", built_tiny, "--url", "http://127.0.0.1:9").assert_mistake("MODEL and --url")
    millrace("size", "verify", built_tiny, "--loads", "3").assert_mistake("--loads")
    millrace("size", "verify", "--url", "http://127.0.0.1:9").assert_mistake("timeline.json")
    millrace("size", "--rate", "3", "verify", built_tiny).assert_mistake("answers before `verify`")
    millrace("serve", built_tiny, "--profile", "/no/such/file").assert_mistake("cannot be read")
