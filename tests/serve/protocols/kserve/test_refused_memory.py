"""What refused requests leave behind: nothing, though nobody collects garbage."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.machine.process_info import resident_bytes
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, serving_with
from tests.support.kserve_grpc import connected, refusal, request
from tests.support.repository import identity, in_process, write_models

N_REFUSED = 50
MAX_GROWTH = 50 << 20
LIMIT = 1_150_000  # bytes of a body: a leak of all of them would be more than that
WARM = 2  # refused requests before memory is measured


def growth(refuse: Callable[[], None]) -> int:
    """Bytes of resident memory that N_REFUSED refused requests leave behind, without the garbage collector."""
    for _ in range(WARM):
        refuse()
    gc.collect()
    gc.disable()
    try:
        before = resident_bytes()
        for _ in range(N_REFUSED):
            refuse()
        until_s = time.monotonic() + 5
        while (found := resident_bytes() - before) >= MAX_GROWTH and time.monotonic() < until_s:
            time.sleep(0.05)  # the last of them is answered before it is let go of
        return found
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    root = write_models(tmp_path_factory.mktemp("models"), {"same": identity("FP32", "-1")})
    with in_process(
        root,
        http_max_input_size=LIMIT,
        grpc_port=0,
        model_control_mode="explicit",
        load_model=("same",),
        allow_client_shm=True,
    ) as served:
        yield served.url, served.grpc_url


# By name: the path, what the body begins and ends with, and what it is filled with between.
PARTS = {
    "infer, a wrong shape": ('{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":[', "0.12345,", "]}]}"),
    "infer, a wrong type": ('{"inputs":[{"name":"INPUT0","shape":[1],"datatype":3,"data":[', "0.12345,", "]}]}"),
    "infer, no JSON": ('{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":[', "0.12345,", "]}"),
    "infer, an unknown input": ('{"inputs":[{"name":"B","shape":[1],"datatype":"FP32","data":[', "0.12345,", "]}]}"),
    "infer, the last value": (
        '{"inputs":[{"name":"INPUT0","shape":[%d],"datatype":"FP32","data":[',
        "0.12345,",
        ',"a"]}]}',
    ),
    "generate": ('{"INPUT0": [["a"], ', "0.12345,", "]}"),
    "generate_stream": ('{"INPUT0": [["a"], ', "0.12345,", "]}"),
    "load": ('{"parameters": {"file:1/model": 3, "x": [', "0.12345,", "]}}"),
    "trace settings": ('{"unknown": [', "0.12345,", "]}"),
    "log settings": ('{"unknown": [', "0.12345,", "]}"),
    "shared memory": ('{"key": [', "0.12345,", "]}"),
}
PATHS = {
    "generate": "models/same/generate", "generate_stream": "models/same/generate_stream",
    "load": "repository/models/same/load", "trace settings": "trace/setting", "log settings": "logging",
    "shared memory": "systemsharedmemory/region/a/register",
}  # fmt: skip


def filled(name: str, limit: int) -> bytes:
    head, item, tail = PARTS[name]
    n = (limit - len(head) - len(tail) - 100) // len(item)
    return ((head % (n + 2) if "%d" in head else head) + item * n + "0" + tail).encode()


# Of a route, or of code, that others ask by day.
BY_NIGHT = ("infer, a wrong type", "infer, no JSON", "infer, an unknown input", "generate", "trace settings")


@pytest.mark.parametrize("name", [name for name in PARTS if name not in BY_NIGHT])
def test_a_refused_body_over_http_is_freed(place: tuple[str, str], name: str) -> None:
    path, body = PATHS.get(name, "models/same/infer"), filled(name, LIMIT)
    with httpx.Client(timeout=20) as client:

        def refuse() -> None:
            assert client.post(f"{place[0]}/v2/{path}", content=body).status_code in (400, 500), name

        assert growth(refuse) < MAX_GROWTH


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_refused_message_over_grpc_is_freed(place: tuple[str, str], is_stream: bool) -> None:
    asked = request("same", [{"name": "OTHER", "datatype": "FP32", "shape": [LIMIT // 8]}], [bytes(LIMIT // 2)])
    with connected(place[1]) as client:

        def refuse() -> None:
            if is_stream:
                (told,) = client.stream(iter([asked]))
                assert "unexpected inference input 'OTHER'" in told.error_message
            else:
                code, words = refusal(lambda: client.future("ModelInfer", asked).result())
                assert "unexpected inference input 'OTHER'" in words, code

        assert growth(refuse) < MAX_GROWTH


TEXTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"model": "fake", "prompt": [], "temperature": "hot"},
    "/v1/chat/completions": {"model": "fake", "messages": [], "temperature": "hot"},
    "/v1/responses": {"model": "fake", "input": [], "temperature": "hot"},
    "/v1/messages": {"model": "fake", "messages": [], "max_tokens": "many"},
    "/v1/embeddings": {"model": "fake", "input": [], "dimensions": "many"},
    "/api/chat": {"model": "fake", "messages": [], "options": 3},
    "/api/generate": {"model": "fake", "prompt": 3, "options": 3},
    "/tokenize": {"model": "fake", "prompt": 3},
    "/detokenize": {"model": "fake", "tokens": "many"},
    "/v1/messages/count_tokens": {"model": "fake", "messages": 3},
    "/v1/score": {"model": "fake", "text_1": 3},
    "/v1/rerank": {"model": "fake", "query": 3},
    "/api/embed": {"model": "fake", "input": 3},
    "/api/embeddings": {"model": "fake", "prompt": 3},
}
# Of the same code as others by day.
TEXTS_BY_NIGHT = (
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/score",
    "/v1/rerank",
    "/api/embed",
    "/api/embeddings",
)


@pytest.fixture(scope="module")
def texts() -> Iterator[str]:
    with serving_with(Fake(), max_body_bytes=LIMIT) as server:
        yield server.url


def text_growth(url: str, path: str, limit: int) -> int:
    """Bytes that refused bodies of nearly `limit` bytes leave behind."""
    fields = TEXTS[path] | {"user": "u" * (limit // 2), "metadata": {"x": ["0.12345"] * (limit // 30)}}
    body, headers = json.dumps(fields).encode(), {"content-type": "application/json"}
    assert limit * 0.8 < len(body) < limit
    with httpx.Client(timeout=60) as client:

        def refuse() -> None:
            assert 400 <= client.post(url + path, content=body, headers=headers).status_code < 500

        return growth(refuse)


@pytest.mark.parametrize("path", [path for path in TEXTS if path not in TEXTS_BY_NIGHT])
def test_a_refused_body_of_a_text_model_is_freed(texts: str, path: str) -> None:
    assert text_growth(texts, path, LIMIT) < MAX_GROWTH


@pytest.mark.nightly
@pytest.mark.parametrize("path", TEXTS)
def test_the_largest_refused_bodies_of_a_text_model_are_freed(path: str) -> None:
    with serving_with(Fake()) as server:
        assert text_growth(server.url, path, ServerSettings().max_body_bytes) < MAX_GROWTH


@pytest.mark.nightly
@pytest.mark.parametrize("name", PARTS)
def test_the_largest_refused_bodies_are_freed(tmp_path: Path, name: str) -> None:
    """Of a server's own limits."""
    root = write_models(tmp_path, {"same": identity("FP32", "-1")})
    flags: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("same",), "allow_client_shm": True}
    path, body = PATHS.get(name, "models/same/infer"), filled(name, RepositoryFlags().http_max_input_size)
    with in_process(root, **flags) as served, httpx.Client(timeout=120) as client:

        def refuse() -> None:
            assert client.post(f"{served.url}/v2/{path}", content=body).status_code in (400, 500), name

        assert growth(refuse) < MAX_GROWTH
