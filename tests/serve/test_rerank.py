"""POST /v1/score and /v1/rerank, beside cosines of the vectors that /v1/embeddings gives, in NumPy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.engine.artifact.engine import Engine
from millrace.runtime.encoder_loop import MAX_INPUTS
from millrace.runtime.open_engine import open_encoder
from millrace.runtime.settings import RunSettings
from millrace.serve.llm.embeddings import EncoderModel
from millrace.serve.protocols.openai.rerank import cosines
from tests.serve.support import post
from tests.support.checkpoints import random_encoder
from tests.support.engines import build
from tests.support.server import Threaded, in_thread
from tests.support.vocabularies import corpus

TEXTS = corpus(11, 8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    folder = tmp_path_factory.mktemp("encoder")
    build(random_encoder(folder / "checkpoint"), folder / "engine", "fp32").close()
    opened = open_encoder("encoder", Engine.open(folder / "engine"), RunSettings())
    loop = opened.loop()
    model = EncoderModel(
        name="encoder", created=1, max_context=loop.limits.max_context, loop=loop, tokenizer=opened.tokenizer
    )
    with in_thread(model, None, start_s=20, stop_s=20) as started:
        yield started
    opened.close()


@pytest.fixture(scope="module")
def truth(server: Threaded) -> np.ndarray[Any, Any]:
    """Cosines of each text with each other, in float64."""
    data = post(server.url, "/v1/embeddings", {"input": TEXTS}).json()["data"]
    v = np.array([item["embedding"] for item in data], np.float64)
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    return v @ v.T


def scores(reply: Any) -> list[float]:
    assert reply.status_code == 200, reply.text
    assert [item["index"] for item in reply.json()["data"]] == list(range(len(reply.json()["data"])))
    return [item["score"] for item in reply.json()["data"]]


def test_one_text_meets_each(server: Threaded, truth: np.ndarray[Any, Any]) -> None:
    reply = post(server.url, "/v1/score", {"model": "encoder", "text_1": TEXTS[0], "text_2": TEXTS})
    np.testing.assert_allclose(scores(reply), truth[0], atol=1e-6)
    body = reply.json()
    assert body["object"] == "list" and body["data"][0]["object"] == "score" and body["id"].startswith("score-")
    counted = post(server.url, "/v1/embeddings", {"input": [TEXTS[0], *TEXTS]}).json()["usage"]
    assert body["usage"] == counted, "the one is read once"
    alone = post(server.url, "/score", {"text_1": [TEXTS[0]], "text_2": TEXTS[3]})
    assert scores(alone) == [scores(reply)[3]], "the same bits, whatever else was asked"


def test_pairs(server: Threaded, truth: np.ndarray[Any, Any]) -> None:
    reply = post(server.url, "/v1/score", {"text_1": TEXTS[:4], "text_2": TEXTS[4:]})
    np.testing.assert_allclose(scores(reply), [truth[i, i + 4] for i in range(4)], atol=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_the_nearest_come_first(server: Threaded, truth: np.ndarray[Any, Any], path: str) -> None:
    documents = [TEXTS[1], {"text": TEXTS[2]}, *TEXTS[3:]]
    reply = post(server.url, path, {"query": TEXTS[0], "documents": documents}).json()
    order = np.argsort(-truth[0, 1:])
    assert [r["index"] for r in reply["results"]] == order.tolist()
    np.testing.assert_allclose([r["relevance_score"] for r in reply["results"]], truth[0, 1:][order], atol=1e-6)
    assert [r["document"] for r in reply["results"]] == [{"text": TEXTS[1 + i]} for i in order]
    assert reply["usage"]["total_tokens"] > 0 and reply["model"] == "encoder"
    few = post(server.url, path, {"query": TEXTS[0], "documents": documents, "top_n": 2, "return_documents": False})
    assert few.json()["results"] == [
        {k: v for k, v in r.items() if k != "document"} for r in reply["results"][:2]
    ]  # fmt: skip
    assert (
        post(server.url, path, {"query": "a", "documents": ["a", "a"], "top_n": 9}).json()["results"][0]["index"] == 0
    )


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts, and text_2 3"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2 is an empty list"),
        ("/v1/score", {"text_1": "a", "text_2": ["x " * 9999]}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents is an empty list"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * (MAX_INPUTS + 1)}, f"documents has {MAX_INPUTS + 1} texts"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "a", "image": "x"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
    ],
)
def test_mistakes_are_named(server: Threaded, path: str, body: dict[str, Any], what: str) -> None:
    reply = post(server.url, path, body)
    assert reply.status_code == 400 and what in reply.json()["error"]["message"], reply.text


def test_long_texts_may_be_cut(server: Threaded) -> None:
    long = {"query": "a", "documents": ["x " * 9999], "truncate_prompt_tokens": 5}
    assert post(server.url, "/v1/rerank", long).json()["usage"]["total_tokens"] <= 10


def test_a_vector_of_zeros_is_near_to_nothing() -> None:
    found = cosines(np.array([[0, 0], [3, 4], [3, 4]], np.float32), 1)
    assert found.tolist() == [0.0, 0.0]
    assert cosines(np.array([[3, 4], [6, 8], [4, -3]], np.float32), 1).tolist() == [1.0, 0.0]
