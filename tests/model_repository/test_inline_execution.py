"""Requests that are answered in the call that brings them: as `infer` answers them, and counted as it counts them."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.backends import add_sub
from millrace.model_repository.backends.backend import BatchedInstance
from millrace.model_repository.models.model_version import Answered, Model
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.dynamic_batcher import CloseReason
from tests.support.loaded import Loaded
from tests.support.repository import ADD_SUB, write_models


def inputs() -> dict[str, Array]:
    return {name: np.arange(16, dtype=np.int32)[None] * factor for name, factor in (("INPUT0", 3), ("INPUT1", 1))}


def like(outputs: tuple[str, ...] = ()) -> InferRequest:
    request = InferRequest({}, outputs, "r")
    request.batch_size = 1
    return request


def of_model(root: Path, work: Callable[[Model], Any]) -> Any:
    write_models(root, {"m": ADD_SUB})

    async def run() -> Any:
        async with Loaded(root) as repository:
            model = repository.get("m")
            assert model.can_run_inline(128)
            return work(model) if not asyncio.iscoroutinefunction(work) else await work(model)

    return asyncio.run(run())


def plain(answered: Answered) -> tuple[Any, Any]:
    return {name: array.tolist() for name, array in answered[0].items()}, dict(answered[1])


def counted(model: Model) -> dict[str, Any]:
    """All that is told but times."""
    told = model.statistics_dict()
    stages = {stage: one["count"] for stage, one in told["inference_stats"].items()}
    sizes = [(s["batch_size"], s["compute_input"]["count"], s["compute_output"]["count"]) for s in told["batch_stats"]]
    return {"stages": stages, "sizes": sizes, **{k: told[k] for k in ("inference_count", "execution_count")},
            "closed": told["batch_closed"], "failures": dict(model.statistics.failures)}  # fmt: skip


@pytest.mark.parametrize("outputs", [(), ("OUTPUT1",), ("OUTPUT1", "OUTPUT0")])
def test_answers_and_counts_are_those_of_the_usual_way(tmp_path: Path, outputs: tuple[str, ...]) -> None:
    async def usual(model: Model) -> Any:
        found = await model.infer(like(outputs).copy_with(inputs()))
        return plain((found.outputs, found.parameters)), list(found.outputs), counted(model)

    def at_once(model: Model) -> Any:
        found = model.infer_inline(like(outputs), inputs(), time.monotonic_ns())
        return plain(found), list(found[0]), counted(model)

    assert of_model(tmp_path, at_once) == of_model(tmp_path, usual)


def test_what_is_counted_later_is_there_for_whoever_reads(tmp_path: Path) -> None:
    def work(model: Model) -> None:
        began_ns, began_ms = time.monotonic_ns(), time.time_ns() // 1_000_000
        for _ in range(3):
            model.infer_inline(like(), inputs(), began_ns - 5_000_000)
        told = model.statistics_dict()
        assert told["inference_count"] == told["execution_count"] == 3
        took = {stage: one["ns"] for stage, one in told["inference_stats"].items()}
        assert took["compute_input"] >= 3 * 5_000_000 and took["compute_infer"] > 0 == took["queue"]
        assert took["success"] == took["compute_input"] + took["compute_infer"] + took["compute_output"]
        assert 0 <= told["last_inference"] - began_ms < 10_000
        assert model.statistics_dict()["inference_count"] == 3, "once"

    of_model(tmp_path, work)


def test_they_are_counted_though_nobody_reads(tmp_path: Path) -> None:
    async def work(model: Model) -> None:
        model.infer_inline(like(), inputs(), time.monotonic_ns())
        assert model.statistics.n_inferences == 0
        await asyncio.sleep(0.3)
        assert model.statistics.n_inferences == 1 and not model.statistics.inline_times

    of_model(tmp_path, work)


def test_what_a_model_raises_is_its_answer_and_is_counted(tmp_path: Path) -> None:
    wrong = {**inputs(), "INPUT1": np.zeros((1, 3), np.int32)}

    async def usual(model: Model) -> Any:
        with pytest.raises(StatusError) as failed:
            await model.infer(like().copy_with(wrong))
        return failed.value.code, str(failed.value), counted(model)

    def at_once(model: Model) -> Any:
        with pytest.raises(StatusError) as failed:
            model.infer_inline(like(), wrong, time.monotonic_ns())
        return failed.value.code, str(failed.value), counted(model)

    found = of_model(tmp_path, at_once)
    assert found == of_model(tmp_path, usual)
    assert found[0] is Code.INVALID_ARG and found[2]["failures"] == {"BACKEND": 1}
    assert found[2]["closed"] == {CloseReason.SINGLE.value: 1}


def test_an_output_that_was_not_computed_is_an_error_of_its_request(tmp_path: Path) -> None:
    def work(model: Model) -> None:
        with pytest.raises(StatusError, match=r"\[request id: r\] the model computed no output 'NONE'"):
            model.infer_inline(like(("NONE",)), inputs(), time.monotonic_ns())

    of_model(tmp_path, work)


def test_an_instance_that_answers_requests_itself_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Own(BatchedInstance):
        quick_bytes = 1 << 10

        def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            return {name: inputs["INPUT0"] for name in ("OUTPUT0", "OUTPUT1")}

        def execute(self, requests):  # type: ignore[no-untyped-def]
            seen.extend(request.id for request in requests)
            super().execute(requests)

    monkeypatch.setattr(add_sub, "_AddSub", Own)

    def work(model: Model) -> Any:
        found = plain(model.infer_inline(like(), inputs(), time.monotonic_ns()))
        return found, counted(model)

    found, counts = of_model(tmp_path, work)
    assert seen == ["r"] and found[0]["OUTPUT1"] == inputs()["INPUT0"].tolist()
    assert counts["inference_count"] == counts["stages"]["success"] == 1
