"""Messages over gRPC that protobuf does not decode again: limits, errors, counts and log lines as for all calls."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from millrace.model_repository.backends import add_sub
from millrace.model_repository.backends.backend import BatchedInstance
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from millrace.serve.http.http_request import BufferedRequestLog
from millrace.serve.http.request_bodies import UNCOUNTED_BODY_BYTES
from millrace.serve.protocols.kserve.grpc.calls import GrpcCallContext, GrpcFrontend
from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE, message
from millrace.serve.protocols.kserve.grpc.send_budget import SendBudgetLease
from millrace.serve.settings import ServerSettings
from tests.support.repository import ADD_SUB, in_process, write_models
from tests.support.server import Threaded


class Quick(BatchedInstance):
    """The first number of INPUT0: how many rows OUTPUT0 has, or what it raises."""

    max_inline_bytes = 1 << 16

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        n = int(inputs["INPUT0"].flat[0])
        if n == -1:
            raise StatusError(Code.INVALID_ARG, "")
        if n == -2:
            return {"OUTPUT0": [1, 2], "OUTPUT1": [3]}  # type: ignore[dict-item]  # no arrays
        return {"OUTPUT0": np.zeros((n, 16), np.int32), "OUTPUT1": inputs["INPUT1"]}


def encoded(n: int) -> bytes:
    sent = message("ModelInferRequest")(model_name="m")
    for name, data in (("INPUT0", np.full((1, 16), n, "<i4")), ("INPUT1", np.ones((1, 16), "<i4"))):
        sent.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        sent.raw_input_contents.append(data.tobytes())
    data_of_message: bytes = sent.SerializeToString()
    return data_of_message


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Threaded]:
    monkeypatch.setattr(add_sub, "_AddSub", Quick)
    write_models(tmp_path, {"m": ADD_SUB})
    with in_process(tmp_path, grpc_port=0) as found:
        yield found


@pytest.fixture
def infer(served: Threaded) -> Iterator[Any]:
    with grpc.insecure_channel(served.grpc_url, options=[("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.unary_unary(f"{SERVICE}ModelInfer")

        def ask(n: int) -> Any:
            return message("ModelInferResponse").FromString(call(encoded(n), timeout=20))

        for _ in range(3):
            ask(1)
        yield ask


@pytest.fixture
def cached(infer: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each call: whether its message was cached."""
    calls: list[bool] = []
    read_cached = GrpcFrontend._read_cached

    def counted(self: GrpcFrontend, data: bytes, caller: GrpcCallContext) -> Any:
        result = read_cached(self, data, caller)
        calls.append(result is not None)
        return result

    monkeypatch.setattr(GrpcFrontend, "_read_cached", counted)
    return calls


def executions(served: Threaded) -> int:
    import httpx

    return int(httpx.get(f"{served.url}/v2/models/m/stats").json()["model_stats"][0]["execution_count"])


def test_a_large_response_is_counted(
    infer: Any, cached: list[bool], served: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    add = SendBudgetLease.add

    def count(self: SendBudgetLease, n_bytes: int) -> None:
        counted.append(n_bytes)
        add(self, n_bytes)

    monkeypatch.setattr(SendBudgetLease, "add", count)
    rows = UNCOUNTED_BODY_BYTES // 64 + 1
    assert len(infer(rows).raw_output_contents[0]) == rows * 64 and len(infer(1).raw_output_contents[0]) == 64
    assert cached[0] and len(counted) >= 1 and counted[0] > UNCOUNTED_BODY_BYTES


def test_a_cached_message_needs_its_key(tmp_path: Path) -> None:
    write_models(tmp_path, {"m": ADD_SUB})
    settings = ServerSettings(port=0, api_keys=("secret",))
    with in_process(tmp_path, settings, grpc_port=0) as served, grpc.insecure_channel(served.grpc_url) as channel:
        call = channel.unary_unary(f"{SERVICE}ModelInfer")
        for _ in range(3):
            call(encoded(1), timeout=20, metadata=(("authorization", "Bearer secret"),))
        for metadata in ((), (("authorization", "Bearer other"),)):
            with pytest.raises(grpc.RpcError) as failed:
                call(encoded(1), timeout=20, metadata=metadata)
            assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_cancelled_call_is_logged_and_not_counted_any_more(
    infer: Any, cached: list[bool], served: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    began, logged = threading.Event(), threading.Event()

    def add(self: BufferedRequestLog, *line: Any) -> None:
        statuses.append(line[3])
        logged.set()

    async def encode(self: GrpcFrontend, n_bytes: int, write: Any) -> bytes:
        began.set()
        await asyncio.sleep(60)
        raise AssertionError("it is cancelled")

    monkeypatch.setattr(BufferedRequestLog, "add", add)
    monkeypatch.setattr(GrpcFrontend, "encode_off_loop", encode)
    with grpc.insecure_channel(served.grpc_url) as channel:
        future = channel.unary_unary(f"{SERVICE}ModelInfer").future(encoded(1), timeout=20)
        assert began.wait(20) and cached == [True]
        future.cancel()
        assert logged.wait(20) and statuses == [grpc.StatusCode.CANCELLED.value[0]]


def test_an_error_without_text_is_one_execution(infer: Any, cached: list[bool], served: Threaded) -> None:
    before = executions(served)
    with pytest.raises(grpc.RpcError) as failed:
        infer(-1)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT and failed.value.details() == ""
    assert executions(served) == before + 1 and len(cached) == 1


def test_what_is_no_array_ends_one_call(infer: Any, cached: list[bool]) -> None:
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as failed:
            infer(-2)
        assert failed.value.code() is grpc.StatusCode.INTERNAL and "log" in (failed.value.details() or "")
        infer(1)
    assert cached == [True] * 6
