"""The short way of small inferences over gRPC: limits and errors are those of all others."""

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
from millrace.serve.http.request_bodies import FREE_BYTES
from millrace.serve.protocols.kserve.grpc.calls import GrpcFrontend
from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE, message
from millrace.serve.protocols.kserve.grpc.send_budget import SendBudget, SendBudgetLease
from tests.support.repository import ADD_SUB, in_process, write_models
from tests.support.server import Threaded


class Quick(BatchedInstance):
    """The first number of INPUT0: how many rows OUTPUT0 has, or what it raises."""

    quick_bytes = 1 << 16

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        n = int(inputs["INPUT0"].flat[0])
        if n == -1:
            raise StatusError(Code.INVALID_ARG, "")
        if n == -2:
            return {"OUTPUT0": [1, 2], "OUTPUT1": [3]}  # type: ignore[dict-item]  # no arrays
        return {"OUTPUT0": np.zeros((n, 16), np.int32), "OUTPUT1": inputs["INPUT1"]}


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
            sent = message("ModelInferRequest")(model_name="m")
            for name, data in (("INPUT0", np.full((1, 16), n, "<i4")), ("INPUT1", np.ones((1, 16), "<i4"))):
                sent.inputs.add(name=name, datatype="INT32", shape=[1, 16])
                sent.raw_input_contents.append(data.tobytes())
            return message("ModelInferResponse").FromString(call(sent.SerializeToString(), timeout=20))

        for _ in range(3):
            ask(1)
        yield ask


@pytest.fixture
def n_short(infer: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each call: whether it took the short way."""
    calls: list[bool] = []
    infer_alone = GrpcFrontend.infer_alone

    def counted(self: GrpcFrontend, data: bytes) -> Any:
        calls.append(False)
        inferred = infer_alone(self, data)
        calls[-1] = inferred is not None
        return inferred

    monkeypatch.setattr(GrpcFrontend, "infer_alone", counted)
    return calls


def executions(served: Threaded) -> int:
    import httpx

    return int(httpx.get(f"{served.url}/v2/models/m/stats").json()["model_stats"][0]["execution_count"])


def test_a_large_response_is_counted(
    infer: Any, n_short: list[bool], served: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    add = SendBudgetLease.add

    def count(self: SendBudgetLease, n_bytes: int) -> None:
        counted.append(n_bytes)
        add(self, n_bytes)

    monkeypatch.setattr(SendBudgetLease, "add", count)
    rows = FREE_BYTES // 64 + 1
    assert len(infer(rows).raw_output_contents[0]) == rows * 64 and len(infer(1).raw_output_contents[0]) == 64
    assert n_short[0] and len(counted) >= 1 and counted[0] > FREE_BYTES


def test_while_responses_are_unread_all_calls_take_the_plain_way(
    infer: Any, n_short: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SendBudget, "is_used", property(lambda self: True))
    infer(1)
    assert n_short == []


def test_an_error_without_text_is_one_execution(infer: Any, n_short: list[bool], served: Threaded) -> None:
    before = executions(served)
    with pytest.raises(grpc.RpcError) as failed:
        infer(-1)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT and failed.value.details() == ""
    assert executions(served) == before + 1 and len(n_short) == 1


def test_what_is_no_array_ends_one_call(infer: Any, n_short: list[bool]) -> None:
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as failed:
            infer(-2)
        assert failed.value.code() is grpc.StatusCode.INTERNAL and "log" in (failed.value.details() or "")
        infer(1)
    assert n_short == [True] * 6
