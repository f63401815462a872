"""Every mistake a caller can make, against the real engine: where it is caught, as what, and what the message names.

Field by field the server's own tests go further (tests/serve/test_bad_requests.py), and damaged engines have theirs
(tests/engine/test_hostile_engine.py); here everything is put to one server, which must then still work.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import safetensors.numpy

from millrace import LLM
from millrace.errors import CheckpointError, ConfigError, HubError, MachineError, MillraceError
from millrace.serve.settings import ServerSettings
from tests.e2e.live import JSON, MODEL, Live, live
from tests.support.checkpoints import random_checkpoint

KEY = "right"
AUTHORISED = {**JSON, "authorization": f"Bearer {KEY}"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


# ------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards or more; for copying."""
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def truncate(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:20])


def reshape(folder: Path) -> None:
    for path in shards(folder):
        tensors = safetensors.numpy.load_file(path)
        if "model.layers.1.mlp.up_proj.weight" in tensors:
            tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((7, 320), np.float32)
            safetensors.numpy.save_file(tensors, path)


def config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (shards(folder)[1] if name == "shard" else folder / name).unlink()

    return change


def write(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated weights": (truncate, [".safetensors", "bytes"]),
    "truncated header": (cut_header, [".safetensors"]),
    "missing shard": (remove("shard"), ["-00002-of-"]),
    "wrong shape": (reshape, ["layers.1.mlp.up_proj.weight", "7", "364"]),
    "no config": (remove("config.json"), ["config.json"]),
    "broken config": (write("config.json", '{"hidden_size": '), ["config.json"]),
    "unsupported value": (config(is_encoder_decoder=True), ["is_encoder_decoder", "two stacks"]),
    "unknown architecture": (config(architectures=["MambaForCausalLM"], model_type="mamba"), ["Mamba", "Llama"]),
    "wrong kind": (config(num_hidden_layers="two"), ["num_hidden_layers", "two"]),
    "no such head": (config(hidden_size=-320), ["hidden_size", "-320"]),
    "more layers than weights": (config(num_hidden_layers=3), ["layers.2"]),
    "wrong vocabulary": (config(vocab_size=1004), ["1003", "1004"]),
    "no tokenizer": (remove("tokenizer.json"), ["tokenizer"]),
    "broken tokenizer": (write("tokenizer.json", "{}"), ["tokenizer.json"]),
}


def assert_three_parts(error: MillraceError, names: list[str]) -> None:
    what, expected, fix = error.args[:3]
    assert what and expected and fix and len(str(error)) < 2000
    for name in names:
        assert name in str(error), str(error)


@pytest.mark.parametrize("damage, names", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoints(checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], names: list[str]) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        LLM(folder).close()
    assert_three_parts(error.value, names)


ARGUMENTS: list[tuple[dict[str, Any], type[MillraceError], list[str]]] = [
    ({"max_context": 513}, ConfigError, ["513", "1 to 512"]),
    ({"max_context": 0}, ConfigError, ["max_context", "at least 1"]),
    ({"max_batch": 0}, ConfigError, ["max_batch"]),
    ({"tune": None}, ConfigError, ["tune"]),
    ({"precision": "int3"}, ConfigError, ["int3", "w4a8"]),
    ({"precision": {"lm_head": "bf16"}}, ConfigError, ["default"]),
    ({"precision": {"default": "fp8"}}, ConfigError, ["fp8"]),
    ({"kv_cache_dtype": "fp4"}, ConfigError, ["fp4", "int4"]),
    ({"kv_cache_dtpye": "int8"}, ConfigError, ["kv_cache_dtpye", "kv_cache_dtype"]),
    ({"isa": "neon"}, ConfigError, ["neon", "scalar"]),
    ({"threads": 0}, ConfigError, ["threads"]),
    ({"threads": "2"}, ConfigError, ["threads", "a number"]),
    ({"kv_memory": "plenty"}, ConfigError, ["plenty", "512M"]),
    ({"kv_memory": "200K"}, MachineError, ["tokens", "max_context=192"]),
    ({"kv_memory": "900T"}, MachineError, ["available", "kv_memory"]),
]


@pytest.mark.parametrize("arguments, kind, names", ARGUMENTS, ids=[str(a) for a, _, _ in ARGUMENTS])
def test_arguments(checkpoint: Path, arguments: dict[str, Any], kind: type[MillraceError], names: list[str]) -> None:
    with pytest.raises(kind) as error:
        LLM(checkpoint, **arguments).close()
    assert_three_parts(error.value, names)


@pytest.mark.parametrize("name, kind", [("no-such-model", CheckpointError), ("org/no-such-model", HubError)])
def test_names(name: str, kind: type[MillraceError]) -> None:
    with pytest.raises(kind) as error:
        LLM(name)
    assert_three_parts(error.value, [name])


# ------------------------------------------------------------------ HTTP


@pytest.fixture(scope="module")
def guarded(tiny_engine: Path) -> Iterator[Live]:
    """With a key; every test here puts its mistakes to this one server."""
    with live(tiny_engine, ServerSettings(port=0, api_keys=(KEY,))) as server:
        yield server


def text(**fields: object) -> bytes:
    return json.dumps({"prompt": "Once", "max_tokens": 2, **fields}).encode()


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}).encode()


REQUESTS: list[tuple[str, bytes, int, str]] = [  # path, body, status, the message names
    (TEXT, text(max_tokens=0), 400, "max_tokens is 0; expected: an integer of at least 1"),
    (TEXT, text(max_tokens=-1), 400, "max_tokens is -1"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens is 0"),
    (TEXT, text(max_tokens=10**40), 400, "2048"),
    (TEXT, text(max_tokens=2048), 400, "maximum context length is 2048"),
    (TEXT, text(temperature=float("nan")), 400, "not a JSON object"),
    (TEXT, text(temperature="NaN"), 400, "temperature is of type string"),
    (TEXT, text(temperature=-1), 400, "temperature is -1"),
    (TEXT, text(temperature=10**400), 400, ""),
    (TEXT, text(seed=2**64), 400, "seed is"),
    (TEXT, text(seed=10**4000), 400, ""),
    (TEXT, b'{"prompt": "\xff\xfe\xfa"}', 400, "utf-8"),
    (TEXT, text(prompt="half \ud83d a pair"), 400, ""),
    (TEXT, b"", 400, "not a JSON object"),
    (TEXT, b"[]", 400, "of type array"),
    (TEXT, b"null", 400, "of type null"),
    (TEXT, b'"Once"', 400, "of type string"),
    (TEXT, b"{", 400, "not a JSON object"),
    (TEXT, b'{"prompt": ' + b"[" * 200_000, 400, "prompt[0][0] is of type array"),
    (CHAT, b'{"messages": ' + b'[{"a":' * 100_000, 400, "nested too deeply"),
    (CHAT, b'{"messages": [], "tools": ' + b'[{"a":' * 100_000, 400, "nested too deeply"),
    (CHAT, chat(chat_template_kwargs={"a": json.loads("[" * 900 + "]" * 900)}), 200, ""),
    (TEXT, text(prompt=[]), 400, "empty list"),
    (TEXT, text(prompt=[[], [1]]), 400, "no tokens"),
    (TEXT, text(prompt=[2048]), 400, "prompt token 0 is 2048; expected: a token id from 0 to 2047"),
    (TEXT, text(prompt=[-1]), 400, "prompt token 0 is -1"),
    (TEXT, text(prompt=[2**31]), 400, "prompt token 0 is"),
    (TEXT, text(prompt=[2**200]), 400, "prompt"),
    (TEXT, text(prompt="mill " * 20_000), 400, "maximum context length is 2048 tokens"),
    (CHAT, chat(messages=[{"role": "user", "content": "mill " * 20_000}]), 400, "maximum context length is 2048"),
    (TEXT, text(stop_token_ids=[2048]), 400, "0 to 2047"),
    (TEXT, text(logit_bias={"2048": 1}), 400, "0 to 2047"),
    (TEXT, text(temprature=1), 400, 'did you mean "temperature"?'),
    (CHAT, chat(max_token=1), 400, 'did you mean "max_tokens"?'),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": ""}}]), 400, "tools[0] has no name"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema is missing"),
    (CHAT, chat(guided_regex="(a"), 400, "guided_regex: its regex cannot be enforced"),
    (CHAT, chat(response_format={"type": "text"}), 200, ""),
    (CHAT, chat(user="me", metadata={"a": "b"}, store=True), 200, ""),
    (CHAT, chat(top_k=5, min_p=0.1, ignore_eos=True, stop_token_ids=[7]), 200, ""),
    (CHAT, chat(messages=[{"role": "king", "content": "Hi"}]), 400, "system, developer, user, assistant or tool"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(model="gpt-9"), 404, f'the model "gpt-9" does not exist; expected: one of "{MODEL}"'),
    ("/v1/moderations", text(), 404, "/v1/moderations is not served yet"),
    ("/v1/embeddings", b'{"input": "Once"}', 400, "is a language model, and cannot answer /v1/embeddings"),
    ("/v1/models", text(), 405, "does not know POST"),
    ("/detokenize", b'{"tokens": [2048]}', 400, "tokens[0] is 2048"),
]


@pytest.mark.parametrize("path, body, status, names", REQUESTS, ids=[f"{r[0]} {r[1][:60]!r}" for r in REQUESTS])
def test_requests(guarded: Live, path: str, body: bytes, status: int, names: str) -> None:
    reply = httpx.post(guarded.url + path, content=body, headers=AUTHORISED, timeout=30)
    assert reply.status_code == status, reply.text
    if status != 200:
        assert_is_openais_error(reply, names)


def assert_is_openais_error(reply: httpx.Response, names: str) -> None:
    error = reply.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"] and names in error["message"], error
    assert "; expected: " in error["message"] and "; to fix: " in error["message"], error
    assert "Traceback" not in reply.text and len(reply.text) < 2000


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", f"Basic {KEY}", "Bearer \xff\xfe"])
def test_api_keys(guarded: Live, header: str | None) -> None:
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    typed = [(b"content-type", b"application/json"), *headers]
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        reply = httpx.post(guarded.url + path, content=text(), headers=typed)
        assert reply.status_code == 401
        assert_is_openais_error(reply, "API key")
    assert httpx.get(guarded.url + "/v1/models", headers=headers).status_code == 401
    assert httpx.get(guarded.url + "/v1/health/ready", headers=headers).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
def test_100_megabytes(guarded: Live, announced: bool) -> None:
    n_blocks, block = 100, b"x" * 2**20

    def stream() -> Iterator[bytes]:
        for _ in range(n_blocks):
            yield block

    headers = AUTHORISED | ({"content-length": str(n_blocks * 2**20)} if announced else {})
    before = psutil.Process().memory_info().rss
    most = [before]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            most.append(psutil.Process().memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    reply = httpx.post(guarded.url + TEXT, content=stream(), headers=headers, timeout=30)
    stop.set()
    watcher.join()
    assert reply.status_code == 413
    assert_is_openais_error(reply, "at most 8388608")
    assert max(most) - before < 20 * 2**20, "client and server together"


def test_a_template_that_loops_holds_up_nobody(tiny_engine: Path) -> None:
    with live(tiny_engine, template=LOOPS) as server:
        replies: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: replies.append(httpx.post(server.url + CHAT, content=chat(), timeout=60))
        )
        asking.start()
        n_others = 0
        while asking.is_alive():
            assert httpx.post(server.url + TEXT, content=text(), headers=JSON, timeout=30).status_code == 200
            n_others += 1
        asking.join()
        assert replies[0].status_code == 422 and n_others > 5
        assert_is_openais_error(replies[0], "not done after 2 s")
        server.wait_until_idle()


def test_after_all_that_it_still_answers(guarded: Live) -> None:
    with guarded.client(KEY) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=5)
    assert answer.choices[0].finish_reason in ("stop", "length")
    guarded.wait_until_idle()
    assert httpx.get(guarded.url + "/v1/health/ready").status_code == 200
