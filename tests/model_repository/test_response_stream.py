"""Responses of a request, read one after the other, and what is done where nobody reads them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request import response_stream
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.response_stream import ResponseStream
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import memory_bytes, objects
from tests.support.loaded import Loaded
from tests.support.repository import REPEAT, write_models


def repeated(model: Model, n: int, delay_ms: int = 0) -> InferRequest:
    request, values = InferRequest({}), np.arange(n, dtype=np.int32)
    delays, wait = np.full(n, delay_ms, np.uint32), np.zeros(1, np.uint32)
    given = [RawInput("IN", "INT32", (n,), values), RawInput("DELAY", "UINT32", (n,), delays)]
    model.checker.attach_inputs(request, [*given, RawInput("WAIT", "UINT32", (1,), wait)])
    return request


def test_strings_are_counted_with_what_they_hold() -> None:
    arrays = [np.zeros((2, 3), np.float32), objects([b"x" * 1000, b"", b"y" * 10])]
    assert memory_bytes(arrays) == 24 + 3 * 8 + 1010


def test_all_are_read_in_their_order(tmp_path: Path) -> None:
    write_models(tmp_path, {"repeat": REPEAT})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("repeat")
            found = [int(r.outputs["OUT"][0]) async for r in ResponseStream(model, repeated(model, 200))]
            assert found == list(range(200)) and model.unread_bytes == 0

    asyncio.run(run())


def test_what_nobody_reads_ends_its_own_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_stream, "MAX_UNREAD_BYTES", 100_000)
    monkeypatch.setattr(response_stream, "UNCOUNTED_RESPONSE_BYTES", 10_000)
    write_models(tmp_path, {"repeat": REPEAT})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("repeat")
            lazy = ResponseStream(model, request := repeated(model, 1000))
            async with asyncio.timeout(10):
                while not request.cancelled:
                    await asyncio.sleep(0.001)
                with pytest.raises(StatusError, match=r"responses of 9[0-9]{4} bytes wait for their readers"):
                    await lazy.next()
                assert await lazy.next() is None and model.unread_bytes == 0
                kept = ResponseStream(model, repeated(model, 50))
                while model.unread_bytes < 50_000:
                    await asyncio.sleep(0.001)
                assert [int(r.outputs["OUT"][0]) async for r in ResponseStream(model, repeated(model, 9))] == list(
                    range(9)
                )
                kept.close()
                assert model.unread_bytes == 0

    asyncio.run(run())
