"""POST /v1/embeddings by the real `openai` client: vectors, formats, limits, errors, many clients at once, an end."""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from millrace.api.embeddings import embed
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.encoder_inputs import Ids
from millrace.errors import BusyError
from millrace.runtime.encoder_loop import MAX_INPUTS, EncoderLimits, EncoderLoop
from millrace.runtime.open_engine import OpenedEncoder
from millrace.serve.llm import embeddings as serve_embeddings
from millrace.serve.llm.embeddings import EncoderModel
from millrace.serve.settings import ServerSettings
from tests.serve.support import post, until
from tests.support.server import Threaded, in_thread
from tests.support.vocabularies import corpus, save_word_pieces

TEXTS = corpus(7, 20)


@pytest.fixture(scope="module")
def opened(encoder: OpenedEncoder) -> OpenedEncoder:
    return encoder


@pytest.fixture(scope="module")
def server(opened: OpenedEncoder) -> Iterator[Threaded]:
    with serving(opened.loop(), opened.tokenizer) as started:
        yield started


@contextmanager
def serving(
    loop: EncoderLoop, tokenizer: Tokenizer, settings: ServerSettings | None = None, **options: Any
) -> Iterator[Threaded]:
    model = EncoderModel(
        name="encoder", created=1, max_context=loop.limits.max_context, loop=loop, tokenizer=tokenizer, **options
    )
    with in_thread(model, settings, start_s=20, stop_s=20) as started:
        yield started


def test_an_encoder_has_the_name_that_it_was_opened_by(opened: OpenedEncoder) -> None:
    assert opened.name == "encoder"


@pytest.fixture
def client(server: Threaded) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0)


@pytest.fixture(scope="module")
def exact(opened: OpenedEncoder) -> NDArray[np.float32]:
    """Of TEXTS, without a server."""
    loop = opened.loop()
    loop.start()
    found = np.array([o.outputs.embedding for o in embed(loop, opened.tokenizer, TEXTS)], np.float32)
    loop.stop()
    return found


def vectors(reply: Any) -> NDArray[np.float32]:
    return np.array([item.embedding for item in reply.data], np.float32)


def test_a_reply_has_openais_shape(client: openai.OpenAI, exact: NDArray[np.float32], opened: OpenedEncoder) -> None:
    reply = client.embeddings.create(model="encoder", input=TEXTS, user="somebody")
    assert reply.object == "list" and reply.model == "encoder" and [d.index for d in reply.data] == list(range(20))
    assert reply.data[0].object == "embedding" and (vectors(reply) == exact).all()
    n = sum(len(opened.tokenizer.encode(text)) for text in TEXTS)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (n, n)


def test_formats_and_forms_of_input_give_the_same_bits(
    client: openai.OpenAI, server: Threaded, exact: NDArray[np.float32], opened: OpenedEncoder
) -> None:
    ids = [opened.tokenizer.encode(text) for text in TEXTS]
    for given in (TEXTS, ids):
        for form in ("float", "base64"):
            reply = client.embeddings.create(model="encoder", input=given, encoding_format=form)
            got = vectors(reply) if form == "float" else _decoded([d.embedding for d in reply.data])
            assert (got == exact).all()
    for one in (TEXTS[3], ids[3], [TEXTS[3]], [ids[3]]):
        assert (vectors(client.embeddings.create(model="encoder", input=one)) == exact[3]).all()
    raw = post(server.url, "/v1/embeddings", {"input": TEXTS[3], "encoding_format": "base64"}).json()
    assert (_decoded([raw["data"][0]["embedding"]]) == exact[3]).all() and raw["id"].startswith("embd-")
    bare = {"input": TEXTS[3], "add_special_tokens": False}
    assert post(server.url, "/v1/embeddings", bare).json()["usage"]["prompt_tokens"] == len(ids[3]) - 2


def _decoded(given: list[Any]) -> NDArray[np.float32]:
    return np.stack([np.frombuffer(base64.b64decode(v), "<f4") if isinstance(v, str) else np.array(v) for v in given])


def test_many_texts_and_long_ones(client: openai.OpenAI, server: Threaded, exact: NDArray[np.float32]) -> None:
    reply = client.embeddings.create(model="encoder", input=TEXTS * 102)  # 2040, whose reply is written in a thread
    assert (vectors(reply) == np.tile(exact, (102, 1))).all()
    long = {"input": ["mill " * 90_000, TEXTS[0]], "truncate_prompt_tokens": -1}
    raw = post(server.url, "/v1/embeddings", long).json()
    assert (
        raw["usage"]["prompt_tokens"] - 100 < 40
        and (np.array(raw["data"][1]["embedding"], np.float32) == exact[0]).all()
    )


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "missing"),
    ({"input": []}, "input", "empty list"),
    ({"input": ["a", [1]]}, "input", "mixes"),
    ({"input": [[]]}, "input", "has no tokens"),
    ({"input": [[1], [403]]}, "input", "token 0 of input 1 is 403"),
    ({"input": ["a", "mill " * 200]}, "input", "input 1 has 202 tokens; expected: at most 100"),
    ({"input": "mill " * 200}, "input", "the input has 202 tokens"),
    ({"input": "mill " * 90_000}, "input", "the input has 90002 tokens"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"at most {MAX_INPUTS}"),
    ({"input": 3}, "input", "integer"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
    ({"input": "a", "dimensions": 48}, "dimensions", "96"),
    ({"input": "a", "truncate_prompt_tokens": 101}, "truncate_prompt_tokens", "1 to 100"),
    ({"input": "a", "normalize": False}, "normalize", "not supported"),
    ({"input": "a", "normalize": True}, "normalize", "the length that the model's own files say"),
    ({"input": "a", "dimension": 3}, "dimension", "dimensions"),
    ({"input": "a", "model": "other"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("body", "param", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_wrong_requests_name_the_field(body: dict[str, Any], param: str, says: str, server: Threaded) -> None:
    reply = post(server.url, "/v1/embeddings", body)
    error = reply.json()["error"]
    assert reply.status_code in (400, 404) and error["param"] == param and says in error["message"], reply.text
    assert len(reply.text) < 700
    assert post(server.url, "/v1/embeddings", {"input": "a", "dimensions": 96}).status_code == 200


def test_an_encoder_is_asked_for_what_it_cannot_do(server: Threaded, client: openai.OpenAI) -> None:
    for path, body in (("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "a"})):
        error = post(server.url, path, body).json()["error"]
        assert error["code"] == "model_cannot" and "is an encoder" in error["message"], error
        assert "a request to /v1/embeddings" in error["message"]
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert "/v1/completions" not in paths
    example = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert len(post(server.url, "/v1/embeddings", example).json()["data"]) == 2
    assert client.models.list().data[0].id == "encoder"


def test_clients_side_by_side_get_their_own(server: Threaded, exact: NDArray[np.float32]) -> None:
    with httpx.Client(base_url=server.url, timeout=20) as web, ThreadPoolExecutor(8) as pool:

        def ask(i: int) -> bool:
            n = 1 + i % 7
            reply = web.post("/v1/embeddings", json={"input": [TEXTS[(i + k) % 20] for k in range(n)]}).json()
            got = np.array([d["embedding"] for d in reply["data"]], np.float32)
            return bool((got == exact[[(i + k) % 20 for k in range(n)]]).all())

        assert all(pool.map(ask, range(60)))


def test_metrics_carry_the_models_label(server: Threaded, opened: OpenedEncoder) -> None:
    def values() -> dict[str, float]:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if '{model_name="encoder"}' in line}

    before = values()
    post(server.url, "/v1/embeddings", {"input": TEXTS[:3]})
    after = values()
    n = sum(len(opened.tokenizer.encode(text)) for text in TEXTS[:3])
    assert after["millrace:embeddings_total"] - before["millrace:embeddings_total"] == 3
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == n
    assert after["vllm:request_prompt_tokens_count"] - before["vllm:request_prompt_tokens_count"] == 1
    assert after["vllm:num_requests_waiting"] == after["vllm:num_requests_running"] == 0


# ------------------------------------------------------------------ with a network that waits

LIMITS = EncoderLimits(
    inputs=("tokens", "lengths"), max_step_tokens=64, max_texts=8, max_context=64, vocab_size=999, width=2
)


class Slow:
    """Each step waits until it is let go."""

    def __init__(self) -> None:
        self.go, self.begun, self.steps = threading.Semaphore(1), 0, 0  # one for the warm-up
        self.fails = False

    def run(self, inputs: dict[str, Ids]) -> dict[str, NDArray[np.float32]]:
        self.begun += 1
        assert self.go.acquire(timeout=20)
        self.steps += 1
        if self.fails:
            raise RuntimeError("on purpose")
        return {"embeddings": np.ones((len(inputs["lengths"]), 2), np.float32)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    save_word_pieces(folder)
    return open_tokenizer(folder)


@contextmanager
def slow(tokenizer: Tokenizer, **options: Any) -> Iterator[tuple[Slow, EncoderLoop, Threaded]]:
    network = Slow()
    loop = EncoderLoop(network, LIMITS)  # type: ignore[arg-type]
    settings = ServerSettings(port=0, drain_timeout_s=2)
    with serving(loop, tokenizer, settings, **options) as started:
        try:
            yield network, loop, started
        finally:
            network.go.release(1000)


BODY = {"input": [[5, 6]] * 20}


def test_a_client_that_goes_away_takes_its_texts_along(tokenizer: Tokenizer) -> None:
    with slow(tokenizer) as (network, loop, server):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/embeddings", json=BODY, timeout=0.3)
        until(lambda: 'num_requests_running{model_name="encoder"} 0.0' in httpx.get(server.url + "/metrics").text)
        network.go.release(1)  # the step that was running
        until(lambda: loop.stats().idle)
        assert network.steps == 2 and loop.stats().waiting == 0
        network.go.release(3)
        assert post(server.url, "/v1/embeddings", BODY).status_code == 200


def test_a_request_of_many_texts_keeps_nobody_out(tokenizer: Tokenizer) -> None:
    with slow(tokenizer, max_queued=10) as (network, loop, server), ThreadPoolExecutor(2) as pool:
        many = pool.submit(post, server.url, "/v1/embeddings", BODY)
        until(lambda: loop.stats().waiting == 12)
        one = pool.submit(post, server.url, "/v1/embeddings", {"input": "a"})
        until(lambda: loop.stats().requests == 2)
        network.go.release(2)  # the step that was running, and the next
        assert one.result().status_code == 200 and not many.done()
        network.go.release(10)
        assert many.result().status_code == 200


def test_too_many_tokens_that_wait_keep_out_large_requests(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_embeddings, "MAX_WAITING_TOKENS", 10)
    monkeypatch.setattr(serve_embeddings, "SMALL_TOKENS", 8)
    with slow(tokenizer) as (network, loop, server), ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, server.url, "/v1/embeddings", BODY)
        until(lambda: loop.stats().waiting == 12)
        reply = post(server.url, "/v1/embeddings", BODY)
        assert reply.status_code == 429 and "tokens are waiting" in reply.json()["error"]["message"]
        small = pool.submit(post, server.url, "/v1/embeddings", {"input": "a"})
        until(lambda: loop.stats().requests == 2)
        network.go.release(20)
        assert first.result().status_code == small.result().status_code == 200


def test_too_many_requests_that_wait_are_told_to_come_back(tokenizer: Tokenizer) -> None:
    with slow(tokenizer, max_queued=1) as (network, loop, server), ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server.url, "/v1/embeddings", BODY)
        until(lambda: loop.stats().waiting == 12)
        reply = post(server.url, "/v1/embeddings", {"input": "a"})
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
        assert "1 requests are waiting" in reply.json()["error"]["message"]
        network.go.release(3)
        assert first.result().status_code == 200


def test_a_step_that_fails_costs_its_request_only(tokenizer: Tokenizer) -> None:
    with slow(tokenizer) as (network, _, server):
        network.go.release(1000)
        network.fails = True
        reply = post(server.url, "/v1/embeddings", {"input": "a"})
        assert reply.status_code == 500 and "on purpose" in reply.json()["error"]["message"]
        network.fails = False
        assert post(server.url, "/v1/embeddings", {"input": "a"}).status_code == 200
        assert httpx.get(server.url + "/health").status_code == 200


def test_a_server_that_ends_finishes_or_says_so(tokenizer: Tokenizer) -> None:
    with slow(tokenizer) as (network, loop, server), ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, server.url, "/v1/embeddings", {"input": "a"})
        until(lambda: not loop.stats().idle)
        server.server.stop()
        until(lambda: httpx.get(server.url + "/v1/health/ready").status_code == 503)
        refused = post(server.url, "/v1/embeddings", {"input": "a"})
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        network.go.release(1)
        assert running.result().status_code == 200
    with slow(tokenizer) as (network, loop, server), ThreadPoolExecutor(2) as pool:
        cut = pool.submit(post, server.url, "/v1/embeddings", BODY)
        until(lambda: not loop.stats().idle)
        server.server.stop()
        server.server.stop()  # nobody waits any more
        until(lambda: is_stopping(loop))
        network.go.release(1)
        assert cut.result().status_code == 503 and "being closed" in cut.result().json()["error"]["message"]


def test_a_reply_that_is_being_written_is_sent(opened: OpenedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, in_base64 = threading.Event(), threading.Event(), serve_embeddings._base64

    def late(vector: NDArray[np.float32]) -> str:
        begun.set()
        assert go.wait(10)
        return in_base64(vector)

    monkeypatch.setattr(serve_embeddings, "_base64", late)
    monkeypatch.setattr(serve_embeddings, "OFF_LOOP_ITEMS", 0)
    with serving(opened.loop(), opened.tokenizer) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server.url, "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})
        assert begun.wait(10)
        server.server.stop()
        until(lambda: httpx.get(server.url + "/v1/health/ready").status_code == 503)
        go.set()
        assert asked.result().status_code == 200 and len(asked.result().json()["data"]) == len(TEXTS)


def is_stopping(loop: EncoderLoop) -> bool:
    try:
        loop.submit([np.ones(1, np.int32)]).future.cancel()
    except BusyError:
        return True
    return False


def test_a_step_that_does_not_end_is_left_behind(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.serve.server.STOP_S", 0.2)
    with slow(tokenizer) as (network, _, server), ThreadPoolExecutor(1) as pool:
        cut = pool.submit(post, server.url, "/v1/embeddings", BODY)
        until(lambda: network.begun == 2)  # until then, it would only be being closed
        server.server.stop()
        server.server.stop()
        assert cut.result().status_code == 503 and "does not end" in cut.result().json()["error"]["message"]
        assert server.server.stuck
