"""Messages of a stream that are made of those before them: the bytes that protobuf would write. And its deadline."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import objects
from millrace.protobuf import varint
from millrace.serve.protocols.kserve.grpc.infer import FINAL, GrpcOutputOptions, fill_response, set_parameter
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from millrace.serve.protocols.kserve.grpc.stream_responses import Deadline, StreamResponses

MODEL: Any = SimpleNamespace(name="llm", version=3, labels={"scores": ("a", "b")})


def request() -> InferRequest:
    return InferRequest({}, request_id="r-7")


def by_protobuf(asking: InferRequest, response: InferResponse, wanted: GrpcOutputOptions, final: bool) -> bytes:
    found = message("ModelStreamInferResponse")()
    raws = fill_response(found.infer_response, MODEL, asking, response, wanted)
    parsed = message("ModelInferResponse").FromString(b"".join(raws))
    found.infer_response.raw_output_contents.extend(parsed.raw_output_contents)
    set_parameter(found.infer_response, FINAL, final)
    data: bytes = found.SerializeToString()
    return data


def drawn(rng: random.Random) -> InferResponse:
    """Mostly alike: a text and why it ended; now and then more strings, numbers, other shapes, parameters."""
    texts = ["", "mill", "Grüße \N{PERSON BOWING DEEPLY}", "x" * rng.choice((1, 120, 128, 20_000))]
    outputs: dict[str, Any] = {"text_output": objects([rng.choice(texts).encode()]), "finish_reason": objects([b""])}
    kind = rng.randrange(8)
    if kind == 0:
        outputs["text_output"] = objects([t.encode() for t in texts]).reshape(2, 2)
    elif kind == 1:
        outputs["scores"] = np.arange(rng.randrange(1, 4), dtype=rng.choice((np.float32, np.int8)))
    elif kind == 2:
        outputs["text_output"] = objects([])
    elif kind == 3:
        outputs = dict(reversed(outputs.items()))
    parameters: dict[str, Any] = {"seen": kind} if kind == 4 else {}
    return InferResponse(outputs, parameters)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("which", ["all", "some outputs", "classes"])
def test_the_bytes_are_protobufs(seed: int, which: str) -> None:
    rng, asking = random.Random(seed), request()
    wanted = GrpcOutputOptions(n_classes={"scores": 1}) if which == "classes" else GrpcOutputOptions()
    if which == "some outputs":
        asking.outputs = ("text_output",)
    answers, quick = StreamResponses(message("ModelInferRequest")(id="r-7"), MODEL, asking, wanted), 0
    for i in range(200):
        response, final = drawn(rng), i % 50 == 49
        known = answers._kinds
        assert answers.response(response, final) == by_protobuf(asking, response, wanted, final), i
        quick += bool(known) and answers._kinds is known
    assert quick > 50 if which == "all" else quick == 0, "most of them are made of the one before"


def test_what_protobuf_cannot_say_is_an_error_each_time() -> None:
    answers = StreamResponses(message("ModelInferRequest")(), MODEL, request(), GrpcOutputOptions())
    good = InferResponse({"text_output": objects([b"a"])})
    bad = InferResponse({"text_output": np.array([1 + 2j])})
    answers.response(good, False)
    for _ in range(2):
        with pytest.raises(StatusError, match="data type complex128"):
            answers.response(bad, False)
    assert answers.response(good, False) == by_protobuf(request(), good, GrpcOutputOptions(), False)


@pytest.mark.parametrize("n", [0, 1, 127, 128, 300, 16383, 16384, 1 << 31])
def test_lengths_are_as_protobuf_writes_them(n: int) -> None:
    want = message("ModelInferRequest")(parameters={"x": {"uint64_param": n}}).SerializeToString() if n else b"\0"
    assert want.endswith(varint(n))


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 10))


def test_many_quick_writes_take_as_long_as_they_like_together() -> None:
    async def writes() -> int:
        done = 0
        with Deadline(0.05) as deadline:
            for _ in range(12):
                deadline.begin()
                await asyncio.sleep(0.01)
                deadline.end()
                done += 1
            await asyncio.sleep(0.12)  # nothing is written
        return done

    assert run(writes()) == 12


def test_a_write_that_takes_too_long_ends_it() -> None:
    async def writes() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(TimeoutError), Deadline(0.05) as deadline:
            await asyncio.sleep(0.02)
            deadline.begin()
            await asyncio.sleep(5)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0, "it is usable afterwards"
        await asyncio.sleep(0)
        return loop.time() - began_s

    assert 0.07 <= run(writes()) < 0.5


def test_a_cancellation_from_outside_stays_one() -> None:
    async def writes() -> None:
        with Deadline(5) as deadline:
            deadline.begin()
            await asyncio.sleep(5)

    async def outside() -> None:
        task = asyncio.ensure_future(writes())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(outside())


def test_an_error_within_goes_on_as_it_is() -> None:
    async def writes() -> None:
        with Deadline(5):
            raise KeyError("x")

    with pytest.raises(KeyError):
        run(writes())
