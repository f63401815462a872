"""Requests that a quick model computes without its queue: answered and counted as the queue's."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.backends import add_sub
from millrace.model_repository.backends.backend import BatchedInstance
from millrace.model_repository.models.backend_model import BackendModel
from millrace.model_repository.models.model_version import Model, only_response
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from tests.support.loaded import Loaded
from tests.support.repository import ADD_SUB, write_models

BATCHING = "dynamic_batching { preferred_batch_size: [ 2, 4 ] }"


def request(size: int = 1, outputs: tuple[str, ...] = (), columns: int = 16) -> InferRequest:
    made = InferRequest({}, outputs, "r")
    made.batch_size = size
    rows = np.arange(16 * size, dtype=np.int32).reshape(size, 16)
    made.inputs = {"INPUT0": rows * 3, "INPUT1": rows[:, :columns]}
    return made


def with_model(root: Path, config: str, work: Callable[[Model], Any]) -> Any:
    write_models(root, {"m": config})

    async def run() -> Any:
        async with Loaded(root) as repository:
            result = work(repository.get("m"))
            return await result if asyncio.iscoroutine(result) else result

    return asyncio.run(run())


def counts(model: Model) -> dict[str, Any]:
    """All statistics but times."""
    report = model.statistics_dict()
    stages = {stage: duration["count"] for stage, duration in report["inference_stats"].items()}
    sizes = [
        (s["batch_size"], s["compute_input"]["count"], s["compute_output"]["count"]) for s in report["batch_stats"]
    ]
    return {"stages": stages, "sizes": sizes, **{k: report[k] for k in ("inference_count", "execution_count")},
            "closed": report["batch_closed"], "failures": dict(model.statistics.failures)}  # fmt: skip


async def outcome(model: Model, asked: InferRequest) -> Any:
    asked.timings = []
    try:
        response = await model.infer(asked)
    except StatusError as error:
        return error.code, error.message
    return [(name, array.tolist()) for name, array in response.outputs.items()], [t.model for t in asked.timings]


@pytest.mark.parametrize("more", ["", BATCHING, f"{BATCHING} model_transaction_policy {{ decoupled: false }}"])
def test_answers_and_statistics_are_those_of_the_queue(
    tmp_path: Path, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(model: Model) -> Any:
        cases = [
            request(), request(2), request(4), request(8), request(outputs=("OUTPUT1",)), request(3),
            request(outputs=("OUTPUT1", "OUTPUT0")), request(columns=3), request(outputs=("NONE",)),
        ]  # fmt: skip
        return [await outcome(model, case) for case in cases], counts(model)

    config = f"{ADD_SUB} {more}"
    calls = list[bool]()
    infer_inline = BackendModel._infer_inline

    def counted(self: BackendModel, asked: InferRequest) -> Any:
        calls.append(self._can_infer_inline)
        return infer_inline(self, asked)

    monkeypatch.setattr(BackendModel, "_infer_inline", counted)
    alone = with_model(tmp_path, config, work)
    assert calls == [True] * 9
    monkeypatch.setattr(BackendModel, "_infer_inline", lambda self, asked: None)
    assert alone == with_model(tmp_path, config, work)
    assert alone[0][-2][0] is Code.INVALID_ARG and alone[1]["failures"] == {"BACKEND": 2}


@pytest.mark.parametrize(
    "more",
    ["dynamic_batching { max_queue_delay_microseconds: 1000 }", "model_transaction_policy { decoupled: true }"],
)
def test_a_model_whose_requests_may_wait_uses_its_queue(tmp_path: Path, more: str) -> None:
    assert not with_model(tmp_path, f"{ADD_SUB} {more}", lambda model: model._can_infer_inline)  # type: ignore[attr-defined]


class Sending(BatchedInstance):
    """Sends what the first number of a request asks for."""

    max_inline_bytes = 1 << 10

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        raise AssertionError("execute does all")

    def execute(self, requests: Sequence[InferRequest]) -> None:
        for asked in requests:
            response = InferResponse({"OUTPUT0": asked.inputs["INPUT0"], "OUTPUT1": asked.inputs["INPUT1"]})
            match int(asked.inputs["INPUT0"].flat[0]):
                case 0:
                    asked.send(None)
                case 1:
                    asked.send(InferResponse({}), final=False)
                    asked.send(response)
                case 2:
                    asked.send(response, final=False)
                    raise ValueError("late")
                case 3:
                    asked.send(response)
                    asked.send(response)
                case 4:
                    asked.fail(StatusError(Code.NOT_FOUND, ""))
                    asked.send(response)
                case 5:
                    asked.send(response, final=False)


@pytest.mark.parametrize("kind", range(7))
def test_whatever_a_backend_sends(tmp_path: Path, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several responses, none, an empty error, an exception behind a response: as through the queue."""

    async def work(model: Model) -> Any:
        asked = request()
        asked.inputs["INPUT0"] = np.full((1, 16), kind, np.int32)
        return await outcome(model, asked), counts(model)

    monkeypatch.setattr(add_sub, "_AddSub", Sending)
    alone = with_model(tmp_path, ADD_SUB, work)
    monkeypatch.setattr(BackendModel, "_infer_inline", lambda self, asked: None)
    assert alone == with_model(tmp_path, ADD_SUB, work)


def test_a_request_behind_another_one_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(BatchedInstance):
        max_inline_bytes = 1 << 10

        def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            return {name: inputs["INPUT0"] for name in ("OUTPUT0", "OUTPUT1")}

    monkeypatch.setattr(add_sub, "_AddSub", Small)

    def work(model: Model) -> Any:
        large = request(8)
        assert sum(array.nbytes for array in large.inputs.values()) <= Small.max_inline_bytes
        model._n_open += 1  # a request that an instance computes
        assert model._infer_inline(large) is None and large.queued_ns == large.started_ns == 0
        model._n_open -= 1
        responses: list[Any] = []
        model.submit(large, only_response(lambda *response: responses.append(response)))
        assert responses[0][0].outputs["OUTPUT1"].shape == (8, 16)
        assert model._infer_inline(request(9)) is None, "more bytes than are quick"
        return counts(model)

    assert with_model(tmp_path, ADD_SUB, work)["inference_count"] == 8
