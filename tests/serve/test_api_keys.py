"""API keys with limits: their file, what they allow in simulated time, and what clients of each protocol are told."""

import math
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.errors import ConfigError
from millrace.serve.http import api_keys as keys_module
from millrace.serve.http.api_key_file import ApiKey, KeyFile, read_keys
from millrace.serve.http.api_keys import ApiKeys, Grant
from millrace.serve.http.errors import HttpError
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, running, until
from tests.support.kserve import binary
from tests.support.kserve_grpc import connected, refusal
from tests.support.repository import ADD_SUB, in_process, write_models


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def written(path: Path, text: str) -> KeyFile:
    path.write_text(text)
    return KeyFile.read(path)


def ask(keys: ApiKeys, secret: str) -> Grant:
    return keys.grant(f"Bearer {secret}".encode(), None)


def refused(keys: ApiKeys, secret: str) -> HttpError:
    with pytest.raises(HttpError) as found:
        ask(keys, secret)
    return found.value


def test_what_a_line_says(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n# not this\n  two name=web.app-1 concurrent=4\tservice\n")
    with pytest.raises(ConfigError) as wrong:
        read_keys(path)
    assert f"line 3 of {path}" in str(wrong.value) and "two" not in str(wrong.value)
    path.write_text("one\n\ntwo name=web.app-1 concurrent=4 requests_per_minute=60  tokens_per_minute=1000000000\n")
    limits = {"concurrent": 4, "requests_per_minute": 60, "tokens_per_minute": 10**9}
    assert read_keys(path) == (ApiKey(b"one"), ApiKey(b"two", "web.app-1", limits))
    assert "two" not in repr(KeyFile.read(path)), "nothing that is logged has a key"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("k name=a b", "name"), ("k name=", "name is ''"), ("k name=a/b", "letters, digits, _, . or -"),
        ("k concurrent=0", "concurrent is '0'"), ("k concurrent=-1", "a number from 1"), ("k concurrent=4.5", "'4.5'"),
        ("k requests_per_minute=\u0661", "a number from 1"), ("k tokens_per_minute=1000000001", "to 1000000000"),
        ("k requests_per_minut=5", "no setting"), ("k name=a\nl name=a", "the name a twice"),
    ],
)  # fmt: skip
def test_lines_that_are_wrong(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        written(tmp_path / "keys", line + "\n")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tight", ["requests_per_minute", "tokens_per_minute", "concurrent"])
def test_limits_against_a_plain_count(tmp_path: Path, tight: str, seed: int) -> None:
    """In drawn schedules: levels that rise evenly to a minute's worth; requests cost one, tokens what they took."""
    rng, clock = random.Random(seed), Clock()
    loose = {"requests_per_minute": 200, "tokens_per_minute": 9000, "concurrent": 10**6}
    limits = loose | {tight: {"requests_per_minute": 6, "tokens_per_minute": 200, "concurrent": 2}[tight]}
    line = "k name=x " + " ".join(f"{what}={n}" for what, n in limits.items())
    keys = ApiKeys((), written(tmp_path / "keys", line), clock)
    level = {what: float(n) for what, n in limits.items()}
    running: deque[Grant] = deque()
    n_granted = dict.fromkeys(("", *limits), 0)
    for _ in range(600):
        waited_s = rng.choice([0.0, 0.1, 1.0, 7.0])
        clock.now_s += waited_s
        for what in ("requests_per_minute", "tokens_per_minute"):
            level[what] = min(limits[what], level[what] + waited_s * limits[what] / 60)
        if running and rng.random() < 0.6:
            n_tokens = rng.randint(0, 90)
            running.popleft().end(n_tokens)
            level["tokens_per_minute"] -= n_tokens
            continue
        needs = {w: (1 - level[w]) * 60 / limits[w] for w in ("requests_per_minute", "tokens_per_minute")}
        needs["concurrent"] = 1.0 if len(running) >= limits["concurrent"] else 0.0
        longest_s = max(needs.values())
        if longest_s <= 1e-9:
            running.append(ask(keys, "k"))
            level["requests_per_minute"] -= 1
            n_granted[""] += 1
        else:
            error = refused(keys, "k")
            assert error.status == 429 and int(error.headers["retry-after"]) == math.ceil(longest_s - 1e-9)
            n_granted[next(what for what in limits if f"its limit {what}" in error.args[2])] += 1
    assert min(n_granted[""], n_granted[tight]) > 20, f"it was met, and it let through: {n_granted}"


def test_a_file_that_changes_is_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whose key it is does not change when another goes; a file that cannot be read changes nothing."""
    clock, path = Clock(), tmp_path / "keys"
    keys = ApiKeys(("own",), written(path, "a\nb\nc name=web\n"), clock)

    def becomes(text: str | None) -> None:
        path.unlink()
        if text is not None:
            path.write_text(text)
        clock.now_s += keys_module.LOOK_S

    tenants = {secret: ask(keys, secret).tenant for secret in ("own", "a", "b", "c")}
    assert tenants == {"own": "key 0", "a": "key 1", "b": "key 2", "c": "web"}
    becomes("b\nnew name=other\nc name=web concurrent=1\n")
    assert refused(keys, "a").status == 401
    assert [ask(keys, s).tenant for s in ("own", "b", "new")] == ["key 0", "key 2", "other"]
    assert "its limit concurrent" in str(refused(keys, "c")), "the request of before has not ended"
    for text in (None, "", "b name=b name=\n", "\udcff"):
        becomes(None)
        if text is not None:
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
        clock.now_s += keys_module.LOOK_S
        assert ask(keys, "b").tenant == "key 2"
        path.touch()
    assert caplog.text.count("the API keys stay as they were") == 4
    becomes("b\n")
    assert refused(keys, "new").status == 401 and ask(keys, "b").tenant == "key 2"


def counts(url: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {
        f"{s.name.removeprefix('millrace:key_')} {s.labels['key']} {s.labels.get('limit', '')}".strip(): s.value
        for family in families if family.name.startswith("millrace:key_") for s in family.samples
    }  # fmt: skip


def test_clients_of_a_language_model(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", "secret-a name=a requests_per_minute=3\nsecret-b name=b tokens_per_minute=10\n")
    with running(Fake(), ServerSettings(port=0, key_file=file)) as server:
        a, b = ({"authorization": f"Bearer secret-{key}"} for key in "ab")
        body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
        asked = [httpx.post(f"{server.url}/v1/completions", json=body, headers=a) for _ in range(4)]
        assert [reply.status_code for reply in asked] == [200, 200, 200, 429]
        error = asked[3].json()["error"]
        assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
        assert "the API key 'a' has reached its limit requests_per_minute" in error["message"]
        assert 1 <= int(asked[3].headers["retry-after"]) <= 20
        stream = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}, headers=b)
        assert stream.status_code == 200, "who has some left may overdraw"
        until(lambda: counts(server.url)["running b"] == 0)
        late = httpx.post(f"{server.url}/v1/messages", json={**body, "messages": []}, headers={"x-api-key": "secret-b"})
        assert late.status_code == 429 and late.json()["error"]["type"] == "rate_limit_error"
        assert int(late.headers["retry-after"]) > 60 - 5, "11 tokens above 10 a minute"
        found = counts(server.url)
        assert (found["requests_total a"], found["refused_total a requests_per_minute"]) == (3, 1)
        assert found["tokens_total b"] >= 21 and found["refused_total b tokens_per_minute"] == 1
        assert "secret" not in httpx.get(f"{server.url}/metrics").text
        file.path.write_text("secret-a name=a\n")
        until(lambda: httpx.post(f"{server.url}/v1/completions", json=body, headers=a).status_code == 200)
        assert httpx.get(f"{server.url}/v1/models", headers=b).status_code == 401


def test_clients_of_tensor_models(tmp_path: Path) -> None:
    """Over HTTP, also where the short way answers, and over gRPC."""
    file = written(tmp_path / "keys", "secret name=a requests_per_minute=20\nother name=b\n")
    write_models(tmp_path / "models", {"m": ADD_SUB})
    with in_process(tmp_path / "models", ServerSettings(port=0, key_file=file), grpc_port=0) as served:
        inputs = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16],
                   "parameters": {"binary_data_size": 64}} for i in (0, 1)]  # fmt: skip
        body, headers = binary(inputs, bytes(128), parameters={"binary_data_output": True})
        with httpx.Client(headers={"authorization": "Bearer secret"}) as client:
            codes = [client.post(f"{served.url}/v2/models/m/infer", content=body, headers=headers) for _ in range(22)]
        assert [reply.status_code for reply in codes] == [200] * 20 + [429] * 2
        assert "its limit requests_per_minute" in codes[-1].json()["error"] and "retry-after" in codes[-1].headers
        metadata = [("authorization", "Bearer secret")]
        with connected(served.grpc_url) as client_grpc:
            code, what = refusal(lambda: client_grpc.call("ModelMetadata", metadata=metadata, name="m"))
            assert code == "RESOURCE_EXHAUSTED" and "the API key 'a' has reached its limit" in what
            assert client_grpc.call("ModelMetadata", metadata=[("x-api-key", "other")], name="m").name == "m"
        found = counts(served.url)
        assert (found["requests_total a"], found["requests_total b"], found["running a"]) == (20, 1, 0)
        assert found["refused_total a requests_per_minute"] == 3, "two over HTTP, where the short way asks before"


def test_so_many_at_a_time(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", "secret name=a concurrent=2\n")
    slow = ADD_SUB.replace('backend: "add_sub"', 'backend: "identity" parameters { key: "execute_delay_ms" value '
                           '{ string_value: "500" } }')  # fmt: skip
    write_models(tmp_path / "models", {"m": slow})
    with in_process(tmp_path / "models", ServerSettings(port=0, key_file=file)) as served:
        inputs = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": [0] * 16} for i in (0, 1)]

        def status(_: int) -> int:
            asked = httpx.post(
                f"{served.url}/v2/models/m/infer", json={"inputs": inputs}, headers={"x-api-key": "secret"}
            )
            return asked.status_code

        with ThreadPoolExecutor(4) as threads:
            assert sorted(threads.map(status, range(4))) == [200, 200, 429, 429]
        assert status(0) == 200, "once they have ended"
