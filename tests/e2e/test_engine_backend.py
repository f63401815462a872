"""The backend `millrace`: answers beside those of `LLM`, streams, what is refused, who goes away."""

import asyncio
import json
import queue
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from millrace.api.llm import LLM
from millrace.compile.cache.engine_cache import EngineCache
from millrace.compile.resolve_model import BUNDLED
from millrace.env import read_env
from millrace.model_repository.backends.millrace import sampling
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import objects
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.serve.http.api_key_file import KeyFile
from millrace.serve.settings import ServerSettings
from tests.support.kserve_grpc import connected, one, refusal, request
from tests.support.prometheus import series
from tests.support.python_models import ANY, HEAD
from tests.support.python_models import write as write_model
from tests.support.repository import in_process, refused
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


def test_what_vllms_backend_takes(served: Threaded, truth: LLM) -> None:
    """Its inputs, also within `parameters`."""
    same: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    expected = text(truth, PROMPTS[0], **same)
    taken: tuple[dict[str, Any], ...] = (
        {"parameters": {**same, "exclude_input_in_output": True, "return_finish_reason": True}},
        {"sampling_parameters": json.dumps({**same, "stop": ["\0"]}), "exclude_input_in_output": True},
        {**same, "parameters": {"return_num_input_tokens": False, "return_num_output_tokens": False}},
        {"parameters": {"sampling_parameters": json.dumps(same)}},
    )
    for more in taken:
        reply = ask(served, text_input=PROMPTS[0], **more)
        assert reply.status_code == 200 and reply.json()["text_output"] == expected, reply.text
    told = ask(served, text_input=PROMPTS[0], **same, parameters={"return_cumulative_logprob": True}).json()
    assert told["cum_log_probs"] < 0
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"exclude_input_in_output": False}, "exclude_input_in_output is False"),
        ({"sampling_parameters": "[1]"}, "a JSON object is expected"),
        ({"sampling_parameters": '{"temprature": 1}'}, "temprature"),
        ({"sampling_parameters": '{"temperature": "0"}'}, "temperature is '0'"),
    )
    for more, says in refused:
        reply = ask(served, text_input=PROMPTS[0], parameters=more)
        assert reply.status_code in (400, 501) and says in reply.json()["error"], reply.text


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

    assert what in refused(tmp_path)


def test_what_is_built_of_a_version_has_its_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`millrace list` shows "story", and not the version's folder: "1"."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned = 'parameters { key: "tune" value { string_value: "0" } }'
    write(tmp_path / "models", BUNDLED / "tiny", {"story": CONFIG + tuned})

    async def run() -> list[str]:
        repository = ModelRepository(RepositoryFlags(model_repository=(str(tmp_path / "models"),)))
        failed = await repository.start()
        await repository.close(5)
        return list(failed)

    assert asyncio.run(run()) == []
    assert [entry.model for entry in EngineCache(read_env().cache).entries()] == ["story"]


# ---------------------------------------------------------------------- whose tokens they are

ASKS = (
    HEAD
    + """
    def execute(self, requests):
        found = []
        for request in requests:
            inputs = [pb_utils.Tensor("text_input", request.inputs()[0].as_numpy()),
                      pb_utils.Tensor("max_tokens", np.array([8], np.int32)),
                      pb_utils.Tensor("ignore_eos", np.array([True]))]
            asked = pb_utils.InferenceRequest(
                model_name="plain", requested_output_names=["text_output"], inputs=inputs)
            text = asked.exec().output_tensors()[0].as_numpy()
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
        return found
"""
)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, tiny_engine: Path) -> Iterator[Threaded]:
    """With a key for each way of asking, of 100 tokens a minute."""
    ways = ("infer", "generate", "generate_stream", "grpc", "stream", "model", "long", "gone")
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"sk-{way} name={way} tokens_per_minute=100\n" for way in ways))
    root = write(tmp_path_factory.mktemp("models"), tiny_engine, {"tiny": CONFIG, "plain": PLAIN})
    write_model(root, "asks", ASKS, ANY.replace("-1", "1") % "")
    with in_process(root, ServerSettings(port=0, key_file=KeyFile.read(path)), grpc_port=0) as found:
        yield found


def charged(served: Threaded, way: str) -> float:
    (found,) = [
        s.value for s in series(served.url) if s.name == "millrace:key_tokens_total" and s.labels["key"] == way
    ] or [0.0]
    return found


PROMPT = PROMPTS[0]
TENSORS: dict[str, tuple[str, Any]] = {"text_input": ("BYTES", PROMPT), "max_tokens": ("INT32", 8),
                                       "ignore_eos": ("BOOL", True)}  # fmt: skip


def tensors(model: str) -> Any:
    text = PROMPT.encode()
    raw = [len(text).to_bytes(4, "little") + text, np.int32(8).tobytes(), b"\1"]
    return request(model, [one(kind, [1], name) for name, (kind, _) in TENSORS.items()], raw)


def over(served: Threaded, way: str) -> None:
    """Ask for 8 tokens in this way. raises where that is refused"""
    key = {"authorization": f"Bearer sk-{way}"}
    if way in ("grpc", "stream"):
        with connected(served.grpc_url) as client:
            if way == "stream":
                assert all(not m.error_message for m in client.stream(iter([tensors("tiny")]), tuple(key.items())))
            else:
                asked = tensors("plain")
                inputs = [one(kind, [1], name) for name, (kind, _) in TENSORS.items()]
                client.call("ModelInfer", tuple(key.items()), model_name="plain", inputs=inputs,
                            raw_input_contents=list(asked.raw_input_contents))  # fmt: skip
        return
    body: dict[str, Any] = {name: value for name, (_, value) in TENSORS.items()}
    model, route = "tiny", way
    if way == "infer":
        model = "plain"
        body = {"inputs": [{"name": n, "datatype": k, "shape": [1], "data": [v]} for n, (k, v) in TENSORS.items()]}
    if way == "model":
        model, route = "asks", "infer"
        body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]}
    httpx.post(f"{served.url}/v2/models/{model}/{route}", json=body, headers=key, timeout=30).raise_for_status()


@pytest.mark.parametrize("way", ["infer", "generate", "generate_stream", "grpc", "stream", "model"])
def test_tokens_are_charged_to_the_key_however_they_are_asked_for(limited: Threaded, truth: LLM, way: str) -> None:
    """As many as `LLM` counts, of prompt and answer; beyond the key's limit the next request is refused."""
    (counted,) = truth.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True, seed=0))
    each = len(counted.prompt_token_ids) + 8
    n, refused = 0, ""
    while not refused and n < 50:  # on a busy machine some of the limit comes back meanwhile
        try:
            over(limited, way)
        except (httpx.HTTPStatusError, grpc.RpcError) as error:
            refused = str(error)
            break
        n += 1
        until_s = time.monotonic() + 20
        while charged(limited, way) < n * each and time.monotonic() < until_s:
            time.sleep(0.005)  # an answer is there before its end is counted
        assert charged(limited, way) == n * each
    assert n > 99 // each and ("429" in refused or "RESOURCE_EXHAUSTED" in refused)
    assert charged(limited, way) == n * each, "what is refused costs nothing"


def test_a_stream_that_does_not_end_is_charged_as_it_goes(limited: Threaded) -> None:
    key = (("authorization", "Bearer sk-long"),)
    with connected(limited.grpc_url) as client:
        asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        answers = client.stream(iter(asked.get, None), key)
        spent, errors = [charged(limited, "long")], list[str]()
        while not errors and len(spent) < 20:
            asked.put(tensors("tiny"))
            for answer in answers:
                if answer.error_message:
                    errors.append(answer.error_message)
                if answer.infer_response.parameters["triton_final_response"].bool_param or errors:
                    break
            spent.append(charged(limited, "long"))
        asked.put(None)
    assert "the API key has reached its limit tokens_per_minute; ask again in" in errors[0]
    assert spent[-1] > 99 and spent == sorted(spent) and len(set(spent)) > 4, "while the stream went on"


def test_who_goes_away_pays_for_what_was_computed(limited: Threaded) -> None:
    body = {"text_input": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    key = {"authorization": "Bearer sk-gone"}
    url = f"{limited.url}/v2/models/tiny/generate_stream"
    with httpx.stream("POST", url, json=body, headers=key, timeout=30) as reply:
        for i, _ in enumerate(reply.iter_lines()):
            if i > 20:
                break
    until_s = time.monotonic() + 10
    while not charged(limited, "gone") and time.monotonic() < until_s:
        time.sleep(0.02)
    assert 10 < charged(limited, "gone") < 1500
