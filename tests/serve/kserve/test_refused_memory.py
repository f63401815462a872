"""What refused requests leave behind: nothing, though nobody collects garbage."""

import gc
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from millrace.machine.process import resident_bytes
from tests.serve.support import Fake, serving_with
from tests.support.kserve_grpc import connected, refusal, request
from tests.support.repository import identity, in_process, write_models

N_REFUSED = 50
MOST_GROWTH = 50 << 20
LIMIT = 3 << 19  # bytes of a body: a leak of all of them would be 75 MB of bytes alone
WARM = 5  # refused requests before memory is measured


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
        return resident_bytes() - before
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


def filled(head: str, tail: str, item: str = "0.12345,") -> bytes:
    return (head + item * ((LIMIT - len(head) - len(tail) - 100) // len(item)) + "0" + tail).encode()


BODIES = {
    "infer, a wrong shape": (
        "models/same/infer", filled('{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":[', "]}]}")),
    "infer, a wrong type": (
        "models/same/infer", filled('{"inputs":[{"name":"INPUT0","shape":[1],"datatype":3,"data":[', "]}]}")),
    "infer, no JSON": (
        "models/same/infer", filled('{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":[', "]}")),
    "infer, an unknown input": (
        "models/same/infer", filled('{"inputs":[{"name":"OTHER","shape":[1],"datatype":"FP32","data":[', "]}]}")),
    "generate": ("models/same/generate", filled('{"INPUT0": [["a"], ', "]}")),
    "generate_stream": ("models/same/generate_stream", filled('{"INPUT0": [["a"], ', "]}")),
    "load": ("repository/models/same/load", filled('{"parameters": {"file:1/model": 3, "x": [', "]}}")),
    "trace settings": ("trace/setting", filled('{"unknown": [', "]}")),
    "log settings": ("logging", filled('{"unknown": [', "]}")),
    "shared memory": ("systemsharedmemory/region/a/register", filled('{"key": [', "]}")),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_refused_body_over_http_is_freed(place: tuple[str, str], name: str) -> None:
    path, body = BODIES[name]
    with httpx.Client(timeout=20) as client:

        def refuse() -> None:
            assert client.post(f"{place[0]}/v2/{path}", content=body).status_code in (400, 500), name

        assert growth(refuse) < MOST_GROWTH


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

        assert growth(refuse) < MOST_GROWTH


TEXTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"model": "fake", "prompt": [], "temperature": "hot"},
    "/v1/chat/completions": {"model": "fake", "messages": [], "temperature": "hot"},
    "/v1/responses": {"model": "fake", "input": [], "temperature": "hot"},
    "/v1/messages": {"model": "fake", "messages": [], "max_tokens": "many"},
    "/v1/embeddings": {"model": "fake", "input": [], "dimensions": "many"},
    "/api/chat": {"model": "fake", "messages": [], "options": 3},
    "/api/generate": {"model": "fake", "prompt": 3, "options": 3},
    "/tokenize": {"model": "fake", "prompt": 3},
}


@pytest.fixture(scope="module")
def texts() -> Iterator[str]:
    with serving_with(Fake(), max_body_bytes=LIMIT) as server:
        yield server.url


@pytest.mark.parametrize("path", TEXTS)
def test_a_refused_body_of_a_text_model_is_freed(texts: str, path: str) -> None:
    fields = TEXTS[path] | {"user": "u" * (LIMIT // 2), "metadata": {"x": ["0.12345"] * (LIMIT // 30)}}
    body = json.dumps(fields).encode()
    assert len(body) < LIMIT
    with httpx.Client(timeout=20) as client:

        def refuse() -> None:
            assert (
                400
                <= client.post(texts + path, content=body, headers={"content-type": "application/json"}).status_code
                < 500
            )

        assert growth(refuse) < MOST_GROWTH
