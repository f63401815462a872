"""`--warm-prompts FILE`: what it may hold, and that those who begin alike find it."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.errors import ConfigError
from millrace.serve.llm import prompt_warmup
from millrace.serve.llm.prompt_warmup import read_warm_prompts
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, post, until
from tests.serve.test_management_api import free_port
from tests.support.server import in_thread

SYSTEM = {"role": "system", "content": "You are the miller of a mill by a river, and you answer in rhymes."}
QUESTION = {"role": "user", "content": "Who are you?"}
TEXT = "The mill by the river turns all day, and the miller sleeps."


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def written(file: Path, *lines: object) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def cached(url: str, path: str, **asked: Any) -> int:
    reply = post(url, path, {**asked, "max_tokens": 1, "temperature": 0})
    assert reply.status_code == 200, reply.text
    n: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def test_the_first_to_ask_finds_them(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="millrace.serve.llm.prompt_warmup")
    lines = (
        TEXT, {"messages": [SYSTEM], "cache_priority": 90, "cache_ttl_s": 60},
        {"prompt": TEXT, "cache_salt": "mine", "cache_pin": True, "cache_ttl_s": 0.3},
    )  # fmt: skip
    model = replace(Fake().model(), warm_prompts=read_warm_prompts(written(file, *lines)))
    with in_thread(model, None, start_s=20, stop_s=20) as server:
        n_tokens = len(model.tokenizer.encode(TEXT))
        assert cached(server.url, "/v1/completions", prompt=TEXT + " So") >= n_tokens // 4 * 4 - 4 > 8
        assert cached(server.url, "/v1/completions", prompt=TEXT, cache_salt="mine") > 8
        assert cached(server.url, "/v1/completions", prompt=TEXT, cache_salt="yours") == 0
        assert cached(server.url, "/v1/chat/completions", messages=[SYSTEM, QUESTION]) > 8
        assert "warmed by 3 prompts" in caplog.text
        until(lambda: model.engine.stats().pages_used == 0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 10_000, "line 2 is not JSON"),
        ("\xff".encode("latin-1"), "line 2 is not JSON"),
        ("7", "line 2 is neither a text nor an object"),
        ("{}", "line 2 has neither a prompt nor messages"),
        ('{"prompt": "a", "messages": []}', "line 2 has a prompt and messages"),
        ('{"promt": "a"}', 'line 2: unknown field "promt"'),
        ('{"prompt": 5}', "line 2: prompt is of type integer"),
        ('{"messages": [{"role": "owner", "content": "a"}]}', "line 2: messages.*is 'owner'"),
        ('{"prompt": "a", "cache_priority": 200}', "line 2: cache_priority is 200"),
        ('{"prompt": "a", "cache_ttl_s": -1, "cache_pin": true}', "line 2: cache_ttl_s is -1"),
        ('{"prompt": "a", "chat_template_kwargs": {}}', "line 2 has chat_template_kwargs, but no messages"),
    ],
)
def test_a_bad_line_is_named(file: Path, line: str | bytes, why: str) -> None:
    file.write_bytes(b'"a"\n' + (line.encode() if isinstance(line, str) else line) + b"\n\n")
    with pytest.raises(ConfigError, match=f"(?s)prompts.jsonl, {why}"):
        read_warm_prompts(file)


def test_a_bad_file_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the prompts of .*prompts\.jsonl"):
        read_warm_prompts(file)
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match=r"has 0 prompts"):
        read_warm_prompts(file)
    with pytest.raises(ConfigError, match=r"has 1025 prompts"):
        read_warm_prompts(written(file, *["a"] * 1025))
    assert len(read_warm_prompts(written(file, *["a"] * 1024))) == 1024
    monkeypatch.setattr(prompt_warmup, "MAX_FILE_BYTES", 100)
    with pytest.raises(ConfigError, match=r"has more than 100 bytes"):
        read_warm_prompts(file)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("word " * 3000, "line 2: .*context"),
        ({"prompt": "a", "cache_pin": True}, "line 2: cache_pin is set for a prompt"),
    ],
)
def test_a_prompt_that_cannot_be_kept_is_named_and_the_server_is_not_ready(file: Path, line: object, why: str) -> None:
    model = replace(Fake().model(), warm_prompts=read_warm_prompts(written(file, TEXT, line)))
    with in_thread(model, ServerSettings(port=free_port()), start_s=20, stop_s=20, wait=False) as server:
        heartbeat: list[str] = []

        def failed() -> bool:
            with suppress(httpx.TransportError):
                heartbeat.append(httpx.get(server.url + "/v1/health/ready").json()["message"])
            return bool(heartbeat) and "the warm-up failed" in heartbeat[-1]

        until(failed)
        assert re.search(f"(?s)prompts.jsonl, {why}", heartbeat[-1])
