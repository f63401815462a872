"""POST /v1/score and /v1/rerank of a cross-encoder, compared with `LLM.score`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import LLM
from millrace.engine.artifact.engine import Engine
from millrace.runtime.open_engine import open_encoder
from millrace.runtime.settings import RunSettings
from millrace.serve.llm.embeddings import EncoderModel
from tests.serve.support import post
from tests.support.checkpoints import random_cross_encoder
from tests.support.engines import build
from tests.support.server import Threaded, in_thread
from tests.support.vocabularies import corpus

TEXTS = corpus(11, 8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross-encoder")
    build(random_cross_encoder(folder / "checkpoint"), folder / "engine", "fp32").close()
    return folder / "engine"


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Threaded]:
    opened = open_encoder("reranker", Engine.open(engine), RunSettings())
    loop = opened.loop()
    model = EncoderModel(
        name="reranker", created=1, max_context=loop.limits.max_context, loop=loop, tokenizer=opened.tokenizer,
        pairs=opened.pairs,
    )  # fmt: skip
    with in_thread(model, None, start_s=20, stop_s=20) as started:
        yield started
    opened.close()


@pytest.fixture(scope="module")
def truth(engine: Path) -> list[float]:
    """Scores of the first text with each."""
    with LLM(engine) as llm:
        return [output.outputs.score for output in llm.score(TEXTS[0], TEXTS)]


def test_score(server: Threaded, truth: list[float]) -> None:
    reply = post(server.url, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert [item["score"] for item in reply["data"]] == truth, "the same bits"
    assert min(truth) > 0 and max(truth) < 1 and len(set(truth)) == len(truth)
    pairs = post(server.url, "/score", {"text_1": [TEXTS[0]] * 2, "text_2": TEXTS[3:5]}).json()
    assert [item["score"] for item in pairs["data"]] == truth[3:5]
    assert pairs["usage"]["total_tokens"] < reply["usage"]["total_tokens"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank(server: Threaded, truth: list[float], path: str) -> None:
    reply = post(server.url, path, {"query": TEXTS[0], "documents": TEXTS, "top_n": 3}).json()
    order = np.argsort(-np.array(truth), kind="stable")[:3].tolist()
    assert [r["index"] for r in reply["results"]] == order
    assert [r["relevance_score"] for r in reply["results"]] == [truth[i] for i in order]


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/v1/embeddings", {"input": "a"}, "is a cross-encoder"),
        ("/api/embed", {"input": "a"}, "is a cross-encoder"),
        ("/v1/completions", {"prompt": "a"}, "is a cross-encoder"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts, and text_2 3"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2 is an empty list"),
        ("/v1/score", {"text_1": "a", "text_2": ["x", "x " * 9999]}, "the pair of text_2 1 has"),
        ("/v1/rerank", {"query": "x " * 9999, "documents": ["b"]}, "the pair of documents 0 has"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents has 2049 texts"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 2}, "special tokens of a pair"),
    ],
)
def test_mistakes_are_named(server: Threaded, path: str, body: dict[str, Any], what: str) -> None:
    reply = post(server.url, path, body)
    assert reply.status_code == 400 and what in reply.text, reply.text


def test_long_texts_may_be_cut(server: Threaded) -> None:
    long = {"query": "the mill", "documents": ["x " * 9999, "b"], "truncate_prompt_tokens": 20}
    reply = post(server.url, "/v1/rerank", long).json()
    assert 20 < reply["usage"]["total_tokens"] < 40 and len(reply["results"]) == 2
