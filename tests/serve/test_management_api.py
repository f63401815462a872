"""Health, metrics, metadata, keys, origins, documentation."""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.engine.executor import StepInputs
from millrace.errors import ConfigError
from millrace.serve.app import PROTOCOLS
from millrace.serve.http.api_key_file import read_keys
from millrace.serve.http.server_context import ServerContext
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.request_types import other_names
from millrace.serve.settings import ServerSettings
from tests.serve.support import MODEL, Fake, Running, post, running

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_max_num_generation_tokens", "request_time_per_output_token_seconds", "request_params_max_tokens",
    "iteration_tokens_total",
)  # fmt: skip
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

ENDPOINTS = [endpoint for protocol in PROTOCOLS for endpoint in protocol.endpoints]


def metrics(server: Running, path: str = "/metrics") -> Samples:
    reply = httpx.get(server.url + path)
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(reply.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset({"model_name": MODEL, **labels}.items())]


@pytest.mark.parametrize("path", ["/metrics", "/v1/metrics"])
def test_p16_metrics_have_vllms_names(server: Running, path: str) -> None:
    post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 3})
    samples = metrics(server, path)
    named = {name for name, labels in samples if ("model_name", MODEL) in labels}
    suffixes = ("_bucket", "_count", "_sum")
    wanted = {f"vllm:{n}" for n in GAUGES + COUNTERS} | {f"vllm:{n}{s}" for n in HISTOGRAMS for s in suffixes}
    assert wanted <= named, wanted - named
    assert value(samples, "vllm:request_success_total", finished_reason="length") >= 1


def test_the_fingerprint_says_what_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(name: str, **metadata: object) -> str:
        backend = replace(model, name=name, metadata=metadata).backend(ServerContext(ServerSettings(port=0)))
        backend.close()
        return backend.fingerprint

    model = Fake().model()
    known: dict[str, Any] = {"engine": "0123", "precision": {"weights": "w4"}}
    same = [fingerprint("a", **known), fingerprint("a", **known, license="mit")]
    others = [
        fingerprint("b", **known),
        fingerprint("a", **known | {"engine": "4567"}),
        fingerprint("a", **known | {"precision": {"weights": "w8"}}),
    ]
    monkeypatch.setattr("millrace.serve.llm.language_model.__version__", "0.0.0")
    others.append(fingerprint("a", **known))
    assert same[0] == same[1] and len({same[0], *others}) == 5


def test_metrics_count_what_was_asked_and_answered() -> None:
    with running() as server:
        before = metrics(server)
        usages = [
            post(server.url, "/v1/completions", {"prompt": "the mill", "max_tokens": n, "n": 2}).json()["usage"]
            for n in (3, 5)
        ]
        after = metrics(server)

        def grown(name: str, **labels: str) -> float:
            return value(after, name, **labels) - value(before, name, **labels)

        assert grown("vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
        assert grown("vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usages) == 16
        assert grown("vllm:request_success_total", finished_reason="length") == 4
        assert grown("vllm:request_generation_tokens_sum") == 16 and grown("vllm:request_params_n_sum") == 4
        assert grown("vllm:request_params_max_tokens_sum") == 8
        assert grown("vllm:request_max_num_generation_tokens_sum") == 3 + 5  # of the longest of each request's two
        assert grown("vllm:request_time_per_output_token_seconds_count") == 2
        decode_s = grown("vllm:request_decode_time_seconds_sum")
        assert decode_s / 4 <= grown("vllm:request_time_per_output_token_seconds_sum") <= decode_s / 2
        assert grown("vllm:time_to_first_token_seconds_count") == grown("vllm:e2e_request_latency_seconds_count") == 2
        assert grown("vllm:request_queue_time_seconds_count") == 2
        assert grown("vllm:inter_token_latency_seconds_count") <= 12
        assert grown("vllm:iteration_tokens_total_count") >= 8
        assert value(after, "vllm:num_requests_running") == value(after, "vllm:kv_cache_usage_perc") == 0


def test_ready_comes_after_the_warm_up() -> None:
    gate = threading.Event()

    def wait(step: StepInputs) -> None:
        assert gate.wait(20)

    with running(Fake(before_run=wait), ServerSettings(port=free_port()), wait=False) as server:
        reply = until(server, 503)
        assert reply.json() == {"object": "health.response", "message": "warming up", "status": "not_ready"}
        assert httpx.get(server.url + "/health").status_code == 503
        assert httpx.get(server.url + "/v1/health/live").json()["status"] == "live"
        gate.set()
        reply = until(server, 200)
        assert reply.json() == {"object": "health.response", "message": f"{MODEL} is ready", "status": "ready"}
        assert httpx.get(server.url + "/health").status_code == 200 and not httpx.get(server.url + "/health").content


def test_a_failed_warm_up_is_said_and_nothing_is_announced() -> None:
    def fail(step: StepInputs) -> None:
        raise RuntimeError("no such kernel")

    with running(Fake(before_run=fail), ServerSettings(port=free_port()), wait=False) as server:
        until_s = time.monotonic() + 10
        while "the warm-up failed" not in (message := until(server, 503).json()["message"]):
            assert time.monotonic() < until_s, message
        assert "no such kernel" in message and httpx.get(server.url + "/v1/health/live").status_code == 200


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(server: Running, status: int) -> httpx.Response:
    """The first such answer to "are you ready?"."""
    until_s = time.monotonic() + 10
    while True:
        assert time.monotonic() < until_s
        with contextlib.suppress(httpx.ConnectError):
            reply = httpx.get(server.url + "/v1/health/ready")
            if reply.status_code == status:
                return reply
        time.sleep(0.01)


def test_p6_a_stuck_engine_is_not_ready_and_recovers() -> None:
    gate = threading.Event()
    gate.set()

    def wait(step: StepInputs) -> None:
        assert gate.wait(20)

    with running(Fake(before_run=wait), ServerSettings(port=0, stall_timeout_s=0.1)) as server:
        gate.clear()
        asking = threading.Thread(target=post, args=(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 3}))
        asking.start()
        stuck = until(server, 503)
        assert stuck.status_code == 503 and "stuck" in stuck.json()["message"], stuck.text
        assert httpx.get(server.url + "/health").status_code == 503
        assert httpx.get(server.url + "/v1/health/live").status_code == 200
        gate.set()
        asking.join()
        assert httpx.get(server.url + "/v1/health/ready").status_code == 200


def test_p8_an_idle_server_stays_ready() -> None:
    with running(Fake(), ServerSettings(port=0, stall_timeout_s=0.05)) as server:  # sglang#16067
        for _ in range(2):
            time.sleep(0.2)
            paths = ("/v1/health/ready", "/v1/health/live", "/health")
            assert [httpx.get(server.url + path).status_code for path in paths] == [200, 200, 200]
            assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200


def test_a_dead_engine_is_not_ready_and_refuses_with_503() -> None:
    broken = threading.Event()

    def fail(step: StepInputs) -> None:
        if broken.is_set():
            raise RuntimeError("the device is gone")

    with running(Fake(before_run=fail)) as server:
        broken.set()
        for _ in range(3):
            reply = post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 3})
            assert reply.status_code == 500 and "the device is gone" in reply.json()["error"]["message"]
        refused = post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert httpx.get(server.url + "/v1/health/ready").json()["message"].startswith("the engine has stopped")
        assert httpx.get(server.url + "/health").status_code == 503
        assert ("millrace:engine_healthy", frozenset({("model_name", MODEL)})) in metrics(server)
        assert value(metrics(server), "millrace:engine_healthy") == 0


def test_a_bug_is_a_500_without_a_traceback(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        monkeypatch.setattr(type(server.model.engine), "submit", lambda *_: 1 / 0)
        reply = post(server.url, "/v1/completions", {"prompt": "a"})
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal_error"
        assert "ZeroDivisionError" not in reply.text and "ZeroDivisionError" in caplog.text
        monkeypatch.undo()
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_metadata_and_versions(server: Running) -> None:
    reply = httpx.get(server.url + "/v1/metadata").json()
    assert reply["modelInfo"] == [{"shortName": MODEL, "modelUrl": "made up"}]
    assert reply["licenseInfo"] == {"name": "apache-2.0"} and reply["selectedModelProfileId"] == "0123abcd"
    assert reply["millrace"]["precision"] == {"weights": "w4"}
    assert sorted(httpx.get(server.url + "/v1/version").json()) == ["api", "release"]
    assert httpx.get(server.url + "/version").json() == {"version": reply["version"]}


def test_metrics_of_the_process_and_of_http() -> None:
    with running() as server:
        post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        post(server.url, "/v1/completions", {})
        httpx.get(server.url + "/nothing")
        samples = metrics(server)
        process = {name for name, _ in samples if name.startswith("process_")}
        assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= process
        counted = {
            (labels["handler"], labels["method"], labels["status"]): n
            for (name, pairs), n in samples.items()
            if name == "http_requests_total" and (labels := dict(pairs))
        }
        assert counted["/v1/completions", "POST", "2xx"] == counted["/v1/completions", "POST", "4xx"] == 1
        assert counted["other", "GET", "4xx"] == 1


def test_vllms_small_endpoints() -> None:
    with running(Fake(before_run=lambda step: time.sleep(0.02))) as server:
        assert httpx.get(server.url + "/ping").status_code == httpx.post(server.url + "/ping").status_code == 200
        assert httpx.get(server.url + "/load").json() == {"server_load": 0}
        body = {"prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines) and httpx.get(server.url + "/load").json() == {"server_load": 1}
        info = httpx.get(server.url + "/tokenizer_info").json()
        named = server.model.tokenizer.special_token_strings
        assert server.model.chat_template is not None
        assert info["chat_template"] == server.model.chat_template.source and info["model_max_length"] == 512
        assert named.items() <= info.items() and info["tokenizer_class"]


def test_keys_protect_what_costs_and_leave_probes_open() -> None:
    with running(Fake(), ServerSettings(port=0, api_keys=("first", "zweiter-schlüssel"))) as server:
        body = {"prompt": "a", "max_tokens": 1}
        for key in ("first", "zweiter-schlüssel"):
            headers = {b"authorization": f"Bearer {key}".encode()}
            assert httpx.post(server.url + "/v1/completions", json=body, headers=headers).status_code == 200
        for given in (None, "Bearer fir", "first", "Bearer", "Bearer first second", "Basic first"):
            wrong = {} if given is None else {"authorization": given}
            for endpoint in ENDPOINTS:
                operation = endpoint.operation
                path = operation.path.replace("{model}", MODEL)
                reply = httpx.request(operation.method, server.url + path, headers=wrong)
                assert (reply.status_code == 401) == operation.protected, (path, reply.text)
                if operation.protected:
                    assert reply.headers["www-authenticate"] == "Bearer"
                    error = reply.json()["error"]  # in Ollama's protocol, a text
                    assert "the API key is" in (error if isinstance(error, str) else error["message"])
        open_paths = {e.operation.path for e in ENDPOINTS if not e.operation.protected}
        assert open_paths == {
            "/v1/health/live", "/v1/health/ready", "/health", "/ping", "/load", "/v1/metrics", "/metrics",
            "/v1/version", "/version", "/api/version",
        }  # fmt: skip


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n  two  \n")
    assert [key.secret for key in read_keys(path)] == [b"one", b"two"]
    for mark, coding in (("\ufeff", "utf-8"), ("\ufeff", "utf-16-le"), ("", "utf-16")):  # as Windows saves
        path.write_text(f"{mark}one\n", encoding=coding)
        with pytest.raises(ConfigError, match="begins with a byte order mark"):
            read_keys(path)
    path.write_bytes(b"x" * (2 << 20))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_keys(path)
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "missing")


def test_origins_are_allowed_only_when_named(server: Running) -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert httpx.options(server.url + "/v1/completions", headers=asking).status_code == 405
    assert "access-control-allow-origin" not in httpx.get(server.url + "/v1/models", headers=asking).headers
    with running(Fake(), ServerSettings(port=0, cors_origins=("https://a.example",))) as other:
        reply = httpx.options(other.url + "/v1/completions", headers=asking)
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://a.example"
        reply = httpx.get(other.url + "/v1/models", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in reply.headers


def test_the_document_covers_every_route_and_field(server: Running) -> None:
    document = httpx.get(server.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    able = [e for e in ENDPOINTS if e.backend is None or issubclass(TextBackend, e.backend)]
    assert len(able) == sum(len(methods) for methods in document["paths"].values()) < len(ENDPOINTS)
    for endpoint in able:
        operation = endpoint.operation
        described = document["paths"][operation.path][operation.method.lower()]
        assert described["summary"] and ("security" in described) == operation.protected
        if operation.request is not None:
            properties = document["components"]["schemas"][operation.request.__name__]["properties"]
            assert set(properties) == set(operation.request.__struct_fields__) | other_names(operation.request)
        for reply in filter(None, (operation.reply, operation.event)):
            properties = document["components"]["schemas"][reply.__name__]["properties"]
            assert set(properties) == set(reply.__struct_fields__) and issubclass(reply, msgspec.Struct)
        if operation.method == "POST" and operation.request is not None:
            assert {"400", "408", "413", "415", "429", "431", "503"} <= set(described["responses"])
            streams = "stream" in operation.request.__struct_fields__
            kinds = described["responses"]["200"]["content"]
            assert set(kinds) == {"application/json"} | ({operation.stream_type} if streams else set())
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_every_example_of_the_document_runs(keys: tuple[str, ...]) -> None:
    with running(Fake(aliases=("it's/an alias",)), ServerSettings(port=0, api_keys=keys)) as server:
        document = httpx.get(server.url + "/openapi.json").json()
        for path, methods in document["paths"].items():
            for described in methods.values():
                (sample,) = described["x-codeSamples"]
                command = sample["source"].replace("{origin}", server.url)
                if "{request_id}" in command:
                    known = {"authorization": "Bearer secret", "x-request-id": "known"}
                    httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=known)
                    command = command.replace("{request_id}", "known")
                if "{response_id}" in command:
                    asked = {"input": "hi", "max_output_tokens": 2}
                    stored = httpx.post(
                        server.url + "/v1/responses", json=asked, headers={"authorization": "Bearer secret"}
                    )
                    command = command.replace("{response_id}", stored.json()["id"])
                assert ("authorization" in command) == bool(keys and described.get("security")), command
                done = subprocess.run(
                    ["bash", "-c", command.replace("curl ", "curl -s -f -S ", 1)],
                    env={**os.environ, "KEY": "secret"}, capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert done.returncode == 0, (command, done.stderr)
                assert MODEL in command or described.get("requestBody") is None, path


def test_the_document_says_defaults_and_ranges(server: Running) -> None:
    """And says nothing else than what is checked: the bounds are taken, and what lies beyond is refused."""
    schemas = httpx.get(server.url + "/openapi.json").json()["components"]["schemas"]
    needed: dict[str, dict[str, object]] = {"top_logprobs": {"logprobs": True}, "cache_ttl_s": {"cache_priority": 50}}
    n_checked = 0
    for name in ("ChatRequest", "CompletionRequest"):
        chat = name == "ChatRequest"
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        assert schemas[name]["properties"]["temperature"]["default"] == 1.0
        assert all(field.get("default", 0) is not None for field in schemas[name]["properties"].values())
        for field, described in schemas[name]["properties"].items():
            more = needed.get(field, {})
            for key, beyond in (("minimum", -1), ("maximum", 1)):
                bound = described.get(key)
                if bound is None or field in ("n", "best_of"):  # n has an engine to fill
                    continue
                body = {"max_tokens": 1, **asked, **more}
                if field == "max_completion_tokens":
                    del body["max_tokens"]
                inside = post(server.url, path, body | {field: bound})
                assert inside.status_code == 200, (field, bound, inside.text)
                outside = post(server.url, path, body | {field: bound + beyond if bound != 1e-9 else 0})
                assert outside.status_code == 400 and field in outside.json()["error"]["message"], (field, outside.text)
                n_checked += 1
    assert n_checked > 30


def test_the_page_needs_nobody_else(server: Running) -> None:
    page = httpx.get(server.url + "/docs")
    assert page.headers["content-type"].startswith("text/html") and "/openapi.json" in page.text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text) and "@import" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.head(server.url + "/docs").status_code == 200
