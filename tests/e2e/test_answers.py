"""An encoder in a repository, and `examples/answers` (guard, retrieve, answer) with small models in its places."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.api.llm import LLM
from millrace.runtime.request.sampling_params import SamplingParams
from tests.support.checkpoints import random_cross_encoder, random_encoder
from tests.support.engines import build
from tests.support.kserve import infer
from tests.support.repository import in_process, refused

EXAMPLE = Path(__file__).parents[2] / "examples" / "answers" / "models"
CONFIG = 'backend: "millrace"\n'
BATCHES = CONFIG + "max_batch_size: 8 dynamic_batching { }\n"
TEXTS = ["when does the mill open", "flour", "a sack of rye, and another one"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    build(random_encoder(folder / "checkpoint"), folder / "engine", "fp32").close()
    return folder / "engine"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, tiny_engine: Path, encoder: Path) -> Iterator[str]:
    root = tmp_path_factory.mktemp("answers") / "models"
    shutil.copytree(
        EXAMPLE, root, ignore=lambda folder, names: {"1"} if Path(folder).name in ("encoder", "llm") else {}
    )
    shutil.copytree(encoder, root / "encoder" / "1")
    shutil.copytree(tiny_engine, root / "llm" / "1")
    (root / "llm" / "config.pbtxt").write_text(CONFIG)  # what is built takes no max_context
    guard = root / "guard" / "config.pbtxt"  # random weights: only what is equal is near
    guard.write_text(guard.read_text().replace('"0.55"', '"0.99999"'))
    shutil.copytree(encoder, root / "rows" / "1")
    (root / "rows" / "config.pbtxt").write_text(BATCHES)
    with in_process(root) as served:
        yield served.url


@pytest.fixture(scope="module")
def vectors(encoder: Path) -> Iterator[Any]:
    """Of texts, without a server."""
    with LLM(encoder) as llm:
        yield lambda texts: np.array([o.outputs.embedding for o in llm.embed(texts)], np.float32)


def embedded(url: str, model: str, texts: list[str], shape: list[int], **more: Any) -> httpx.Response:
    given = {"name": "text_input", "datatype": "BYTES", "shape": shape, "data": texts}
    return infer(url, model, {"inputs": [given], **more})


def of(reply: httpx.Response) -> NDArray[np.float32]:
    (output,) = reply.json()["outputs"]
    assert output["name"] == "embedding" and output["datatype"] == "FP32"
    return np.array(output["data"], np.float32).reshape(output["shape"])


def test_vectors_are_those_of_the_encoder(url: str, vectors: Any) -> None:
    exact = vectors(TEXTS)
    assert np.array_equal(of(embedded(url, "encoder", TEXTS, [3])), exact)
    assert np.array_equal(of(embedded(url, "rows", TEXTS, [3, 1])), exact), "a text a row"
    told = httpx.post(f"{url}/v2/models/encoder/generate", json={"text_input": TEXTS[1]}).json()
    assert np.allclose(told["embedding"], exact[1], atol=1e-6)
    metadata = httpx.get(f"{url}/v2/models/encoder").json()
    assert [t["shape"] for t in (*metadata["inputs"], *metadata["outputs"])] == [[-1], [-1, -1]]


@pytest.mark.parametrize(
    ("texts", "shape", "parameters", "what"),
    [
        ([""] * 2049, [2049], {}, "text_input has 2049 texts, and 1 to 2048 are expected"),
        ([], [0], {}, "text_input has 0 texts"),
        (["a b " * 200], [1], {}, "text 0 has"),
        (["a"], [1], {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        (["a"], [1], {"truncate_prompt_tokens": "all"}, "truncate_prompt_tokens is 'all', and a number is expected"),
        (["a"], [1], {"dimensions": 3}, "unexpected parameter 'dimensions'"),
    ],
)  # fmt: skip
def test_what_an_encoder_refuses(url: str, texts: list[str], shape: list[int], parameters: Any, what: str) -> None:
    reply = embedded(url, "encoder", texts, shape, parameters=parameters)
    assert reply.status_code == 400 and what in reply.json()["error"], reply.text


def test_a_text_that_is_too_long_is_cut_where_it_may_be(url: str, vectors: Any) -> None:
    reply = embedded(url, "encoder", ["a b " * 200], [1], parameters={"truncate_prompt_tokens": -1})
    assert of(reply).shape == (1, vectors(["a"]).shape[1])


def events(url: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{url}/v2/models/answer/generate_stream", json=body, timeout=60) as reply:
        return [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]


def test_an_answer_streams_from_what_was_found(url: str, vectors: Any, tiny_engine: Path) -> None:
    """The passages are those that are nearest, and the words the language model's own to the prompt with them."""
    question = "When does the mill open?"
    told = events(url, question=question, max_tokens=12)
    passages = (EXAMPLE / "retrieve" / "1" / "passages.txt").read_text().splitlines()
    nearness = vectors(passages) @ vectors([question])[0]
    sources = [passages[i] for i in np.argsort(-nearness, kind="stable")[:2]]
    assert told[0]["source"] == sources and len(told) > 4
    prompt = (EXAMPLE / "answer" / "1" / "prompt.txt").read_text()
    with LLM(tiny_engine) as llm:
        asked = prompt.format(passages="\n".join(sources), question=question)
        (exact,) = llm.generate([asked], SamplingParams(max_tokens=12, temperature=0))
    assert "".join(one["text_output"] for one in told) == exact.outputs[0].text


def test_the_guard_refuses_and_an_error_is_told(url: str) -> None:
    unwanted = (EXAMPLE / "guard" / "1" / "unwanted.txt").read_text().splitlines()
    (told,) = events(url, question=unwanted[2])
    assert told["text_output"] == "I cannot help with that."
    body = {"question": "why?", "max_tokens": 0}
    reply = httpx.post(f"{url}/v2/models/answer/generate_stream", json=body, timeout=60)
    assert "llm: " in reply.text and "max_tokens is 0" in reply.text


def test_a_cross_encoder_is_refused(tmp_path: Path) -> None:
    build(random_cross_encoder(tmp_path / "checkpoint"), tmp_path / "engine", "fp32").close()
    model = tmp_path / "models" / "reranker"
    shutil.copytree(tmp_path / "engine", model / "1")
    (model / "config.pbtxt").write_text(CONFIG)
    assert "'reranker' is a cross-encoder" in refused(tmp_path / "models")
