"""The backend `millrace`: answers beside those of `LLM`, streams, what is refused, who goes away."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.runtime.llm import LLM
from millrace.runtime.params import SamplingParams
from millrace.serve.inference.backends.millrace import sampling
from millrace.serve.inference.flags import RepositoryFlags
from millrace.serve.inference.lifecycle import ModelRepository
from millrace.serve.inference.request import InferRequest
from millrace.serve.inference.status import StatusError
from millrace.serve.kserve.tensors import objects
from tests.support.kserve_grpc import connected, one, refusal, request
from tests.support.repository import in_process
from tests.support.server import Threaded

PROMPTS = ["Once upon a time", "The fox", "A mill by the river", "She said"]
CONFIG = 'backend: "millrace"\n'
PLAIN = CONFIG + "model_transaction_policy { decoupled: false }\n"


def write(root: Path, engine: Path, models: dict[str, str]) -> Path:
    for name, config in models.items():
        shutil.copytree(engine, root / name / "1")
        (root / name / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_engine: Path) -> Iterator[Threaded]:
    root = write(tmp_path_factory.mktemp("models"), tiny_engine, {"tiny": CONFIG, "whole": PLAIN + "max_batch_size: 4"})
    with in_process(root, grpc_port=0) as found:
        yield found


@pytest.fixture(scope="module")
def truth(tiny_engine: Path) -> Iterator[LLM]:
    llm = LLM(tiny_engine)
    yield llm
    llm.close()


def text(truth: LLM, prompt: str, **params: Any) -> str:
    return truth.generate([prompt], SamplingParams(**params))[0].outputs[0].text


def ask(served: Threaded, model: str = "tiny", route: str = "generate", **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v2/models/{model}/{route}", json=body, timeout=30)


def test_answers_are_those_of_the_engine(served: Threaded, truth: LLM) -> None:
    for prompt in PROMPTS:
        said = ask(served, text_input=prompt, max_tokens=12, temperature=0.0).json()
        assert said["text_output"] == text(truth, prompt, max_tokens=12, temperature=0), said
        assert said.keys() == {"model_name", "model_version", "text_output", "finish_reason"}
        assert said["finish_reason"] in ("stop", "length")
    drawn: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_k": 20, "top_p": 0.9}
    said = ask(served, text_input=PROMPTS[0], random_seed=7, **drawn).json()
    assert said["text_output"] == text(truth, PROMPTS[0], seed=7, **drawn)
    stop = text(truth, PROMPTS[0], max_tokens=12, temperature=0).split()[3]
    said = ask(served, text_input=PROMPTS[0], max_tokens=12, temperature=0.0, stop_words=[stop]).json()
    assert said["text_output"] == text(truth, PROMPTS[0], max_tokens=12, temperature=0, stop=[stop])
    assert said["finish_reason"] == "stop"


def test_a_stream_adds_up_to_the_answer(served: Threaded, truth: LLM) -> None:
    body = {"text_input": PROMPTS[1], "max_tokens": 16, "temperature": 0.0, "stream": True, "return_log_probs": True}
    events, logprobs = [], []
    with httpx.stream("POST", f"{served.url}/v2/models/tiny/generate_stream", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                found = events[-1]["output_log_probs"]
                logprobs += found if isinstance(found, list) else [found]
    assert len(events) > 4 and "".join(e["text_output"] for e in events) == text(
        truth, PROMPTS[1], max_tokens=16, temperature=0
    )  # fmt: skip
    assert [bool(e["finish_reason"]) for e in events] == [False] * (len(events) - 1) + [True]
    chosen = truth.generate([PROMPTS[1]], SamplingParams(max_tokens=16, temperature=0, logprobs=0))[0].outputs[0]
    np.testing.assert_allclose(events[-1]["cum_log_probs"], sum(logprobs), rtol=1e-5)
    assert len(logprobs) == len(chosen.token_ids)


def test_many_at_once_share_steps(served: Threaded, truth: LLM) -> None:
    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [{"text_input": PROMPTS[i % 4], "max_tokens": 24, "temperature": 0.0} for i in range(24)]
            found = await asyncio.gather(
                *(client.post(f"{served.url}/v2/models/tiny/generate", json=body) for body in bodies)
            )
            return [reply.json()["text_output"] for reply in found]

    alone = [text(truth, prompt, max_tokens=24, temperature=0) for prompt in PROMPTS]
    assert asyncio.run(run()) == alone * 6


def test_one_answer_as_tensors(served: Threaded, truth: LLM) -> None:
    """A model whose policy is not decoupled, with a batch dimension: as tritonclient asks TensorRT-LLM's ensemble."""
    prompt, wanted = PROMPTS[2].encode(), text(truth, PROMPTS[2], max_tokens=8, temperature=0)
    numbers = {"max_tokens": ("INT32", np.int32(8)), "temperature": ("FP32", np.float32(0))}
    inputs = [one("BYTES", [1, 1], "text_input"), *(one(kind, [1, 1], name) for name, (kind, _) in numbers.items())]
    raw = [len(prompt).to_bytes(4, "little") + prompt, *(value.tobytes() for _, value in numbers.values())]
    with connected(served.grpc_url) as client:
        found = client.infer("whole", inputs, raw, outputs=[{"name": "text_output"}])
        assert list(found.outputs[0].shape) == [1, 1] and found.raw_output_contents[0][4:].decode() == wanted
        stream = client.stream(iter([request("tiny", [one("BYTES", [1], "text_input")], raw[:1])]))
        assert not next(stream).error_message
    body = {"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [PROMPTS[2]]}]}
    assert ask(served, "whole", "infer", **body).status_code == 200
    assert ask(served, "tiny", "infer", **body).status_code == 501


def test_who_goes_away_takes_no_more_steps(served: Threaded) -> None:
    body = {"text_input": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    for _ in range(3):
        with httpx.stream("POST", f"{served.url}/v2/models/tiny/generate_stream", json=body, timeout=30) as reply:
            next(reply.iter_lines())
    with connected(served.grpc_url) as client:

        def pending() -> int:
            told = client.call("ModelStatistics", name="tiny").model_stats[0]
            return int(told.inference_stats.fail.count)

        for _ in range(500):
            if pending() >= 3:
                break
        assert pending() >= 3, "each ended as one that was cancelled"


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"text_input": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
    ({"text_input": "a", "beam_width": 4}, 501, "beam_width is 4, which is not supported"),
    ({"text_input": "a", "bad_words": ["x"]}, 501, "bad_words is not supported"),
    ({"text_input": "a", "temprature": 0.5}, 400, "unexpected parameter 'temprature': did you mean \"temperature\"?"),
    ({"text_input": "a " * 9000, "max_tokens": 2}, 400, "context"),
    ({"max_tokens": 2}, 400, "expected number of inputs between 1 and"),
]


@pytest.mark.parametrize(("body", "status", "what"), WRONG)
def test_what_is_refused(served: Threaded, body: dict[str, Any], status: int, what: str) -> None:
    reply = ask(served, **body)
    assert reply.status_code == status and what in reply.json()["error"], reply.text


def test_a_stream_wants_a_decoupled_model(served: Threaded) -> None:
    with connected(served.grpc_url) as client:
        inputs = [one("BYTES", [1, 1], "text_input"), one("BOOL", [1, 1], "stream")]
        code, what = refusal(lambda: client.infer("whole", inputs, [b"\x01\0\0\0a", b"\x01"]))
    assert code == "INVALID_ARGUMENT" and "without the decoupled transaction policy" in what


def test_names_are_ours_or_tensorrt_llms() -> None:
    asked = InferRequest({"text_input": objects([b"a"]), "top_k": np.array([[5]], np.int32), "end_id": np.array([[9]])})
    asked.parameters = {"min_tokens": 3, "temperature": 1}
    params, streams = sampling(asked)
    assert not streams and params == SamplingParams(
        top_k=5, min_tokens=3, temperature=1.0, stop_token_ids=[9], max_tokens=16
    )  # fmt: skip
    asked.inputs["top_k"] = np.array([[5, 6]], np.int32)
    with pytest.raises(StatusError, match="top_k has 2 elements, and one is expected"):
        sampling(asked)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (CONFIG + "instance_group { count: 2 }", "must have one instance"),
        (CONFIG + 'parameters { key: "model" value { string_value: "../../x" } }', "parameter 'model' is '../../x'"),
        (CONFIG + 'parameters { key: "kv_memori" value { string_value: "1G" } }', "did you mean \"kv_memory\"?"),
        (CONFIG + 'parameters { key: "threads" value { string_value: "0" } }', "--threads is 0"),
        (CONFIG + 'output { name: "tokens" data_type: TYPE_INT32 dims: [ 1 ] }', "inference output 'tokens'"),
        (CONFIG, "1/ holds 0 checkpoints, engines or GGUF files"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(tmp_path: Path, config: str, what: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(config)

    async def run() -> str:
        repository = ModelRepository(RepositoryFlags(model_repository=(str(tmp_path),)))
        (failed,) = await repository.start()
        await repository.close(1)
        return failed

    assert what in asyncio.run(run())
