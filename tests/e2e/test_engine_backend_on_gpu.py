"""The repository's backend `millrace` with the parameter `device`. Tensors of this CPU are a GPU's."""

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millrace import LLM, SamplingParams
from millrace.compile import resolve_model
from millrace.engine.cuda import encoder_executor, executor
from tests.e2e.test_on_gpu import HERE, PROMPTS, STORIES, Breaking
from tests.serve.support import until
from tests.support.checkpoints import random_encoder
from tests.support.repository import in_process, refused
from tests.support.server import Threaded

SMALL = {"max_batch": "4", "max_context": "128"}


@pytest.fixture(autouse=True, scope="module")
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve_model, "find_gpu", lambda device: HERE)
        yield


def config(**parameters: str) -> str:
    said = {"device": "cuda", **parameters}
    return 'backend: "millrace"\n' + "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in said.items()
    )


def write(root: Path, name: str, checkpoint: Path, **parameters: str) -> Path:
    shutil.copytree(checkpoint, root / name / "1")
    (root / name / "config.pbtxt").write_text(config(**parameters))
    return root


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Iterator[Threaded]:
    root = write(tmp_path_factory.mktemp("models"), "stories", Path(STORIES), **SMALL)
    write(root, "drawn", Path(STORIES), random_weights="true", **SMALL)
    for weights in (root / "drawn").rglob("*.safetensors"):
        weights.unlink()
    with in_process(write(root, "texts", encoder)) as found:
        yield found


def ask(served: Threaded, model: str = "stories", **body: Any) -> httpx.Response:
    asked = {"text_input": PROMPTS[0], "max_tokens": 20, "temperature": 0.0, **body}
    return httpx.post(f"{served.url}/v2/models/{model}/generate", json=asked, timeout=30)


def test_answers_are_those_of_a_cpu(served: Threaded) -> None:
    """Of a trained model in float32: alone, many at once, and as a stream."""

    async def together() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{served.url}/v2/models/stories/generate"
            bodies = [{"text_input": PROMPTS[i % 3], "max_tokens": 20, "temperature": 0.0} for i in range(9)]
            return [r.json()["text_output"] for r in await asyncio.gather(*(client.post(url, json=b) for b in bodies))]

    with LLM(STORIES, tune=0, max_batch=4, max_context=128) as llm:
        said = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0))
    truth = [one.outputs[0].text for one in said]
    assert ask(served).json()["text_output"] == truth[0]
    assert asyncio.run(together()) == truth * 3
    body = {"text_input": PROMPTS[1], "max_tokens": 20, "temperature": 0.0, "stream": True}
    with httpx.stream("POST", f"{served.url}/v2/models/stories/generate_stream", json=body, timeout=30) as reply:
        events = [json.loads(line[6:])["text_output"] for line in reply.iter_lines() if line.startswith("data: ")]
    assert len(events) > 4 and "".join(events) == truth[1]


def test_weights_that_are_drawn(served: Threaded) -> None:
    assert ask(served, "drawn").json()["finish_reason"] in ("stop", "length")


def test_an_encoder(served: Threaded, encoder: Path) -> None:
    texts = {"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["a mill", "a river"]}
    (found,) = httpx.post(f"{served.url}/v2/models/texts/infer", json={"inputs": [texts]}).json()["outputs"]
    with LLM(encoder, tune=0) as llm:
        want = np.array([one.outputs.embedding for one in llm.embed(["a mill", "a river"])])
    np.testing.assert_allclose(np.reshape(found["data"], found["shape"]), want, atol=1e-5)


@pytest.mark.parametrize(("parameters", "what"), [
    ({"threads": "2"}, "threads is given, and"), ({"device": "gpu"}, 'device is "gpu"'),
    ({"precision": "auto"}, "auto is given for a GPU"),
    ({"device": "cpu", "random_weights": "true"}, "given for a CPU"),
])  # fmt: skip
def test_what_cannot_be_loaded(parameters: dict[str, str], what: str, tmp_path: Path) -> None:
    write(tmp_path, "m", Path(STORIES), **parameters)

    assert what in refused(tmp_path)


@pytest.mark.timeout(60)
def test_a_device_that_fails_in_mid_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request under way has its error; the engine, which has stopped, is made anew like any instance."""
    monkeypatch.setattr(executor, "CudaExecutor", Breaking)
    monkeypatch.setattr(Breaking, "fails_at", 12)
    monkeypatch.setattr(Breaking, "fails_in", "wait")
    write(tmp_path, "stories", Path(STORIES), **SMALL)
    with in_process(tmp_path) as served, caplog.at_level(logging.INFO):
        ready = f"{served.url}/v2/models/stories/ready"
        assert httpx.get(ready).status_code == 200
        for _ in range(3):  # steps in a row, after which the engine gives up
            reply = ask(served)
            assert reply.status_code == 500 and "CUDA error" in reply.text, reply.text
        until(lambda: "stories_0 was lost and is being restarted: the engine has stopped" in caplog.text)
        monkeypatch.setattr(Breaking, "fails_in", "")
        until(lambda: "stories_0 is available again" in caplog.text)
        assert httpx.get(ready).status_code == 200 and ask(served).status_code == 200


@pytest.mark.timeout(60)
def test_an_encoder_whose_device_fails(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "texts", encoder)
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a mill"]}]}
    with in_process(tmp_path) as served, caplog.at_level(logging.INFO):
        url = f"{served.url}/v2/models/texts/infer"

        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with monkeypatch.context() as broken:
            broken.setattr(encoder_executor.CudaEncoderExecutor, "run", fail)
            for _ in range(3):
                assert "CUDA error" in httpx.post(url, json=body).text
            until(lambda: "texts_0 was lost and is being restarted: the engine has stopped" in caplog.text)
        until(lambda: "texts_0 is available again" in caplog.text)
        assert httpx.post(url, json=body).status_code == 200
