"""Vectors by Ollama's paths and its own client, and shorter ones of models that were trained for them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest

from millrace.errors import RequestError
from millrace.runtime.open_engine import OpenedEncoder
from millrace.serve.llm.embeddings import EncoderModel
from millrace.serve.llm.matryoshka import Matryoshka, check_dimensions, shorten
from millrace.serve.settings import ServerSettings
from tests.serve.support import post
from tests.support.server import Threaded, in_thread

TEXTS = ["The river runs past a mill.", "The wheel turns.", "a"]
WIDTH = 96


@pytest.fixture(scope="module")
def server(encoder: OpenedEncoder) -> Iterator[Threaded]:
    loop = encoder.loop()
    model = EncoderModel(
        name="encoder", created=1, max_context=loop.limits.max_context, loop=loop, tokenizer=encoder.tokenizer,
        matryoshka=Matryoshka.from_folder(encoder.engine.folder),
    )  # fmt: skip
    with in_thread(model, ServerSettings(port=0), start_s=20, stop_s=20) as started:
        yield started


def vectors(server: Threaded, **more: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    reply = post(server.url, "/v1/embeddings", {"input": TEXTS, **more})
    assert reply.status_code == 200, reply.text
    return np.array([each["embedding"] for each in reply.json()["data"]])


def test_ollamas_client_gets_the_vectors_of_openais(server: Threaded) -> None:
    client, exact = ollama.Client(server.url), vectors(server)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    found = client.embed(model="encoder:latest", input=TEXTS)
    np.testing.assert_allclose(np.array(found.embeddings), exact / lengths, rtol=1e-6, atol=1e-7)
    assert found.prompt_eval_count and found.prompt_eval_count > 3 and found.total_duration
    (one,) = client.embed(model="encoder", input=TEXTS[0], keep_alive="5m", options={"num_ctx": 512}).embeddings
    np.testing.assert_allclose(one, (exact / lengths)[0], rtol=1e-6, atol=1e-7)
    old = client.embeddings(model="encoder", prompt=TEXTS[0])
    np.testing.assert_allclose(np.array(old.embedding), exact[0], rtol=1e-6, atol=1e-7)
    assert [model.model for model in client.list().models] == ["encoder"]
    client._client.close()


def test_what_ollamas_paths_take_and_refuse(server: Threaded) -> None:
    long = "mill " * 9999
    assert post(server.url, "/api/embed", {"input": long}).status_code == 200
    refused = post(server.url, "/api/embed", {"input": long, "truncate": False})
    assert refused.status_code == 400 and "tokens" in refused.json()["error"]
    nothing: list[dict[str, Any]] = [{}, {"input": ""}, {"input": []}]
    for empty in nothing:
        assert post(server.url, "/api/embed", empty).json()["embeddings"] == []
    assert post(server.url, "/api/embeddings", {"prompt": ""}).json() == {"embedding": []}
    told = post(server.url, "/api/embed", {"input": "a", "options": {"temperature": 0, "odd": 1}, "keep_alive": 0})
    assert told.headers["x-millrace-ignored"] == "keep_alive, options.odd, options.temperature"
    assert "did you mean" in post(server.url, "/api/embed", {"inptu": "a"}).json()["error"]
    assert post(server.url, "/api/chat", {"messages": []}).status_code == 400


@pytest.mark.parametrize("n", [32, 64, WIDTH])
def test_shorter_vectors_are_those_of_sentence_transformers_scaled_to_length_1(server: Threaded, n: int) -> None:
    exact, found = vectors(server), vectors(server, dimensions=n)
    expected = exact[:, :n]
    if n < WIDTH:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    (own,) = post(server.url, "/api/embed", {"input": TEXTS[1], "dimensions": n}).json()["embeddings"]
    np.testing.assert_allclose(own, expected[1] / np.linalg.norm(expected[1]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [0, -1, 33, 97])
def test_other_lengths_are_refused(server: Threaded, n: int) -> None:
    for path in ("/v1/embeddings", "/api/embed"):
        reply = post(server.url, path, {"input": "a", "dimensions": n})
        assert reply.status_code == 400 and "one of 32, 64, 96" in reply.text


CONFIGS: list[tuple[dict[str, object], Matryoshka | None]] = [
    ({}, None), ({"is_matryoshka": False}, None), ({"is_matryoshka": "yes"}, None),
    ({"is_matryoshka": True}, Matryoshka()),
    ({"matryoshka_dimensions": [8, 16]}, Matryoshka((8, 16))), ({"matryoshka_dimensions": []}, None),
    ({"matryoshka_dimensions": ["8"], "is_matryoshka": True}, Matryoshka()),
]  # fmt: skip


@pytest.mark.parametrize("config, expected", CONFIGS)
def test_what_a_configuration_says(tmp_path: Path, config: dict[str, object], expected: Matryoshka | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Matryoshka.from_folder(tmp_path) == expected


def test_lengths_that_a_model_may_have() -> None:
    check_dimensions(None, 96, None)
    check_dimensions(96, 96, None)
    check_dimensions(1, 96, Matryoshka())
    for asked, trained in ((95, None), (97, Matryoshka()), (0, Matryoshka()), (16, Matryoshka((8,)))):
        with pytest.raises(RequestError, match="dimensions is"):
            check_dimensions(asked, 96, trained)
    zeros = np.zeros((2, 4), np.float32)
    assert np.array_equal(shorten(zeros, 2), zeros[:, :2])
