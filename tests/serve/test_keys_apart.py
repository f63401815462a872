"""What one API key does, and what another sees of it: work in the background, the prefix cache, the timeline."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.engine.executor import StepInputs
from millrace.errors import ConfigError
from millrace.serve.http.api_key_file import ApiKey, KeyFile, read_keys
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, Running, running, until
from tests.serve.test_api_keys import counts, written

A, B, ADMIN = ({"authorization": f"Bearer secret-{key}"} for key in ("a", "b", "admin"))
KEYS = "secret-a name=a {limits}\nsecret-b name=b\nsecret-admin name=c role=admin\n"
JOB = {"input": "a", "max_output_tokens": 20, "background": True}
PROMPT = [5, 6, 7, 8] * 10


@contextmanager
def keyed(tmp_path: Path, limits: str = "", fake: Fake | None = None, **settings: Any) -> Iterator[Running]:
    file = written(tmp_path / "keys", KEYS.format(limits=limits))
    with running(fake or Fake(), ServerSettings(port=0, key_file=file, **settings)) as server:
        yield server


def ask(server: Running, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=20)


@pytest.mark.parametrize("stream", [False, True])
def test_work_in_the_background_counts_until_it_ends(tmp_path: Path, stream: bool) -> None:
    go = threading.Event()
    started = threading.Event()

    def wait(step: StepInputs) -> None:
        if started.is_set():
            assert go.wait(20)

    with keyed(tmp_path, "concurrent=2", Fake(before_run=wait)) as server:
        started.set()
        try:
            if stream:  # the reader goes away at once, and the answer goes on
                url, body = f"{server.url}/v1/responses", {**JOB, "stream": True}
                for _ in range(2):
                    with httpx.stream("POST", url, json=body, headers=A) as events:
                        assert events.status_code == 200
            else:
                assert [ask(server, "/v1/responses", JOB, A).status_code for _ in range(2)] == [200, 200]
            refused = ask(server, "/v1/responses", JOB, A)
            assert refused.status_code == 429 and "its limit concurrent" in refused.text
            assert ask(server, "/v1/chat/completions", {"messages": []}, A).status_code == 429
            assert counts(server.url)["running a"] == 2 and counts(server.url)["tokens_total a"] == 0
        finally:
            go.set()
        until(lambda: counts(server.url)["running a"] == 0)
        found = counts(server.url)
        assert found["tokens_total a"] > 2 * 20, "prompts and answers are charged"
        assert ask(server, "/v1/responses", JOB, A).status_code == 200
        until(lambda: counts(server.url)["running a"] == 0)


def test_a_cancelled_job_counts_no_more(tmp_path: Path) -> None:
    go = threading.Event()
    started = threading.Event()

    def wait(step: StepInputs) -> None:
        if started.is_set():
            assert go.wait(20)

    with keyed(tmp_path, "concurrent=1", Fake(before_run=wait)) as server:
        started.set()
        try:
            job = ask(server, "/v1/responses", JOB, A).json()["id"]
            assert ask(server, "/v1/responses", JOB, A).status_code == 429
            at_limit = f"{server.url}/v1/responses/{job}"
            assert httpx.get(at_limit, headers=A).json()["status"] == "in_progress", "reading it computes nothing"
            assert httpx.post(f"{at_limit}/cancel", headers=A).status_code == 200
            assert httpx.delete(at_limit, headers=A).status_code == 200
        finally:
            go.set()
        until(lambda: counts(server.url)["running a"] == 0)
        assert ask(server, "/v1/responses", JOB, A).status_code == 200


@pytest.mark.parametrize("shared", [False, True])
def test_keys_share_the_prefix_cache_only_if_it_is_set(tmp_path: Path, shared: bool) -> None:
    def cached(headers: dict[str, str], **more: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **more}
        reply = ask(server, "/v1/completions", body, headers)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    with keyed(tmp_path, share_prefix_cache=shared) as server:
        assert cached(A) == 0 < cached(A)
        assert bool(cached(B)) is shared
        assert cached(B) > 0
        assert cached(A, cache_salt="x") == 0 < cached(A, cache_salt="x")
        assert bool(cached(B, cache_salt="x")) is shared


def test_one_key_alone_shares_with_itself(tmp_path: Path) -> None:
    with running(settings=ServerSettings(port=0, api_keys=("secret-a",))) as server:
        body = {"prompt": PROMPT, "max_tokens": 1}
        told = [ask(server, "/v1/completions", body, A).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert told[0]["cached_tokens"] == 0 < told[1]["cached_tokens"]


def test_the_timeline_shows_a_key_its_own_requests(tmp_path: Path) -> None:
    with keyed(tmp_path) as server:
        for headers, name, n in ((A, "of-a", 3), (B, "of-b", 5)):
            body = {"prompt": PROMPT[: 4 * n], "max_tokens": n, "ignore_eos": True}
            assert ask(server, "/v1/completions", body, {**headers, "x-request-id": name}).status_code == 200
        server.wait_until_idle()
        for headers, own, others in ((A, ["of-a"], ["of-b"]), (B, ["of-b"], ["of-a"]), (ADMIN, ["of-a", "of-b"], [])):
            page = httpx.get(f"{server.url}/timeline", headers=headers).text
            assert all(name in page for name in own) and not any(name in page for name in others)
        steps = {}
        for name, headers in (("a", A), ("b", B), ("admin", ADMIN)):
            (data,) = httpx.get(f"{server.url}/timeline.json", headers=headers).json()["data"]
            steps[name] = data["steps"]
        assert sum(n for step in steps["a"] for _, n in step["prompts"]) == 12
        assert sum(n for step in steps["b"] for _, n in step["prompts"]) == 20
        assert len(steps["admin"]) >= len(steps["a"]) + len(steps["b"]), "and the warm-up's"


def test_a_key_file_that_everybody_can_read_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("secret\n")
    for mode, warns in ((0o600, False), (0o640, False), (0o644, True), (0o604, True)):
        path.chmod(mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            KeyFile.read(path)
        assert ("chmod 600" in caplog.text) is warns and "secret" not in caplog.text


def test_the_role_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one role=admin\ntwo role=user name=x\n")
    assert read_keys(path) == (ApiKey(b"one", is_admin=True), ApiKey(b"two", "x"))
    path.write_text("one role=root\n")
    with pytest.raises(ConfigError, match="admin or user"):
        read_keys(path)
