"""`prompt_embeds` from Python and over HTTP: the answers of the tokens whose rows they are, to the bit."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from millrace import LLM, SamplingParams
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.runtime.request.prompt_embeds import Rows
from tests.e2e.live import Live

PROMPT = "Once upon a time there was a mill by the river"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", precision="w4a8", evaluate=False) as model:
        yield model


@pytest.fixture(scope="module")
def table() -> Rows:
    """As the engine keeps it."""
    stored = Checkpoint.open(BUNDLED / "tiny").tensors.load("model.embed_tokens.weight")
    return stored.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_equal_to_the_tokens_they_stand_for(llm: LLM, table: Rows) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    params = SamplingParams(seed=3, temperature=1, max_tokens=30, logprobs=2, n=2)
    (expected,) = llm.generate([ids], params)
    (found,) = llm.generate({"prompt_embeds": table[ids]}, params)
    assert found.prompt_token_ids == []
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    answer = expected.outputs[0].token_ids
    resumed: dict[str, Any] = {"prompt_embeds": table[ids], "resume_token_ids": answer[:9]}
    (rest,) = llm.generate(resumed, SamplingParams(seed=3, temperature=1, max_tokens=30))
    assert rest.outputs[0].token_ids == answer[9:]


def test_beside_other_prompts_and_cut_into_chunks(llm: LLM, table: Rows) -> None:
    ids = llm.tokenizer.encode(" ".join([PROMPT] * 12))
    params = SamplingParams(seed=1, max_tokens=12)
    prompts: list[Any] = [ids[: 3 + 20 * i] for i in range(8)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    mixed = [{"prompt_embeds": table[p]} if i % 2 else p for i, p in enumerate(prompts)]
    assert [output.outputs[0].token_ids for output in llm.generate(mixed, params)] == expected


def as_safetensors(rows: Any) -> str:
    return base64.b64encode(safetensors.numpy.save({"prompt_embeds": rows})).decode()


def test_over_http(tiny: Live, table: Rows) -> None:
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 20, "return_token_ids": True, "logprobs": 1}

    def choice(**more: object) -> dict[str, Any]:
        answer = httpx.post(f"{tiny.url}/v1/completions", json={**asked, **more}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    expected = choice(prompt=PROMPT)
    rows = table[expected["prompt_token_ids"]]
    ways: list[object] = [rows.tolist(), as_safetensors(rows), as_safetensors(rows.astype(ml_dtypes.bfloat16))]
    for way in ways:
        found = choice(prompt_embeds=way)
        assert found["token_ids"] == expected["token_ids"] and found["prompt_token_ids"] == []
        assert found["logprobs"]["token_logprobs"] == expected["logprobs"]["token_logprobs"]


ROW = np.zeros((2, 8), np.float32)
HEADER = {"a": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}}


def file_of(header: object, data: bytes = bytes(64)) -> str:
    text = json.dumps(header).encode()
    return base64.b64encode(len(text).to_bytes(8, "little") + text + data).decode()


@pytest.mark.parametrize(("given", "why"), [
    (as_safetensors(ROW), "has rows of 8 numbers"),
    ([], "is not a matrix"), ([[]], "is not a matrix"), ([[1.0], [1.0, 2.0]], "has rows of 1 numbers"),
    ("", "is no safetensors file"), ("é", "is no base64"), ("AAAA", "is no safetensors file"),
    (base64.b64encode(b"PK\3\4" + bytes(100)).decode(), "is a file of torch.save"),
    (file_of({}), "has 0 tensors"), (file_of({**HEADER, "b": HEADER["a"]}), "has 2 tensors"),
    (file_of({"a": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 64]}}), "bytes for a tensor"),
    (file_of({"a": {"dtype": "F32", "shape": [2, 8], "data_offsets": [32, 96]}}), "bytes for a tensor"),
    (file_of({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}), "has a tensor of 1 dimensions, [16]"),
    (file_of({"a": {"dtype": "I8", "shape": [2, 32], "data_offsets": [0, 64]}}), "has a tensor of I8"),
    (file_of([]), "is no safetensors file"),
    (base64.b64encode(b"\xff" * 8 + bytes(64)).decode(), "is no safetensors file"),
])  # fmt: skip
def test_what_is_refused(tiny: Live, given: object, why: str) -> None:
    answer = httpx.post(f"{tiny.url}/v1/completions", json={"prompt_embeds": given}, timeout=60)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"] == "prompt_embeds"


@pytest.mark.parametrize(("more", "param"), [
    ({"prompt": "a"}, "prompt"), ({"echo": True}, "echo"), ({"receipt": True}, "receipt"), ({"n": 100_000}, "n"),
])  # fmt: skip
def test_beside_what_it_cannot_be(tiny: Live, more: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{tiny.url}/v1/completions", json={"prompt_embeds": ROW.tolist(), **more}, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_no_prompt_at_all(tiny: Live) -> None:
    answer = httpx.post(f"{tiny.url}/v1/completions", json={"max_tokens": 1}, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
