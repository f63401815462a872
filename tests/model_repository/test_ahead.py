"""Batches that a quick instance is given while it computes: in order, each once, and withdrawn as if it had none."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.backends import BACKENDS
from millrace.model_repository.backends.backend import Instance, InstanceContext, ModelBackend
from millrace.model_repository.execution import instance_worker
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from tests.support.loaded import becomes
from tests.support.python_models import HEAD, asked, loaded, write
from tests.support.triton_models import SQUARE_CONFIG

CONFIG = """backend: "gated" %s
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: %d }
"""
BATCHES = "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 1 ] }"
CLOSED = -1.0  # an input that is computed once the gate is open
ASKS_ITSELF = """
    def execute(self, requests):
        responses = []
        for request in requests:
            n = request.inputs()[0].as_numpy()
            if n[0] < 0:
                inner = pb_utils.InferenceRequest(model_name="m", requested_output_names=["OUT"],
                                                  inputs=[pb_utils.Tensor("IN", n + 1)])
                response = inner.exec()
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", n * n)]))
        return responses
"""


class _Gated(Instance):
    def __init__(self, of: "Gated") -> None:
        self._of, self.is_independent = of, of.is_independent

    def execute(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            value = float(request.inputs["IN"].flat[0])
            self._of.executed.append(value)
            if value == CLOSED:
                assert self._of.gate.wait(20)
            request.send(InferResponse({"OUT": request.inputs["IN"]}))


class Gated(ModelBackend):
    def __init__(self, *, is_independent: bool = True) -> None:
        self.is_independent, self.gate, self.executed = is_independent, threading.Event(), list[float]()

    def instance(self, given: InstanceContext) -> Instance:
        return _Gated(self)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Gated:
    made = Gated()
    monkeypatch.setitem(BACKENDS, "gated", lambda: made)
    monkeypatch.setattr(instance_worker, "_SOON_NS", 10**10)  # on a busy machine anything may take long
    return made


async def started(root: Path, repository: ModelRepository, more: str = "", count: int = 1) -> Model:
    """The model, whose instances have computed enough to be known as quick."""
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    (root / "m" / "config.pbtxt").write_text(CONFIG % (more, count))
    await repository.load("m")
    model = repository.get("m")
    for i in range(20 * count):
        await model.infer(request(model, i))
    await becomes(lambda: not model._n_busy)  # type: ignore[attr-defined]
    return model


def request(model: Model, value: float) -> InferRequest:
    return asked(model, IN=np.array([[value]] if model.config.max_batch_size else [value], np.float32))


class Answers:
    """What came, in order: the value of a request, and its output or the code of its error."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float | Code]] = []

    def receive(self, value: float) -> Callable[[InferResponse | None, StatusError | None, bool], None]:
        return partial(self._received, value)

    def _received(self, value: float, response: InferResponse | None, error: StatusError | None, final: bool) -> None:
        assert final and (response is None) != (error is None)
        told: Any = error.code if error is not None else float(response.outputs["OUT"].flat[0])  # type: ignore[union-attr]
        self.found.append((value, told))


def test_one_that_is_withdrawn_is_answered_at_once_and_never_computed(tmp_path: Path, backend: Gated) -> None:
    async def run() -> None:
        async with loaded(tmp_path) as repository:
            model, answers = await started(tmp_path, repository), Answers()
            n_before, given = model.statistics.n_executions, {v: request(model, v) for v in (CLOSED, 101, 102, 103)}
            for value, one in given.items():
                model.submit(one, answers.receive(value))
            await becomes(lambda: backend.executed[-1] == CLOSED)
            assert all(one.started_ns for one in given.values()), "all are given to the instance"
            assert model.n_pending == 3
            model.cancel(given[102])
            assert answers.found == [(102, Code.CANCELLED)] and model.n_pending == 2
            backend.gate.set()
            await becomes(lambda: len(answers.found) == 4)
            assert answers.found[1:] == [(CLOSED, CLOSED), (101, 101), (103, 103)]
            await becomes(lambda: model.n_pending == 0)
            assert backend.executed[-3:] == [CLOSED, 101, 103]
            statistics = model.statistics
            assert statistics.n_executions - n_before == 3 and statistics.failures == {"CANCELED": 1}
            await model.infer(request(model, 104))  # the instance is idle again

    asyncio.run(run())


def test_those_not_begun_end_with_the_server(tmp_path: Path, backend: Gated) -> None:
    async def run() -> None:
        async with loaded(tmp_path) as repository:
            model, answers = await started(tmp_path, repository), Answers()
            for value in (CLOSED, 101, 102):
                model.submit(request(model, value), answers.receive(value))
            await becomes(lambda: backend.executed[-1] == CLOSED)
            model.abort()
            assert answers.found == [(101, Code.UNAVAILABLE), (102, Code.UNAVAILABLE)]
            backend.gate.set()
            await becomes(lambda: len(answers.found) == 3)
        assert backend.executed[-1] == CLOSED

    asyncio.run(run())


def test_however_many_wait_only_some_are_given_ahead_and_all_are_answered_in_order(
    tmp_path: Path, backend: Gated
) -> None:
    async def run() -> None:
        async with loaded(tmp_path) as repository:
            model, answers = await started(tmp_path, repository), Answers()
            values = [CLOSED, *range(100, 150)]
            given = [request(model, value) for value in values]
            for value, one in zip(values, given, strict=True):
                model.submit(one, answers.receive(value))
            assert sum(one.started_ns > 0 for one in given) == 1 + instance_worker._MAX_AHEAD and model.n_pending == 50
            backend.gate.set()
            await becomes(lambda: len(answers.found) == 51)
            assert answers.found == [(value, value) for value in values]
            await repository.unload("m")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("more", "count", "is_independent", "soon_ns"),
    [
        pytest.param("", 2, True, 10**10, id="two-instances"),
        pytest.param("", 1, False, 10**10, id="waits-for-others"),
        pytest.param("", 1, True, 0, id="slow"),
        pytest.param(BATCHES, 1, True, 10**10, id="batches"),
    ],
)  # fmt: skip
def test_who_may_not_be_given_ahead(
    tmp_path: Path, backend: Gated, monkeypatch: pytest.MonkeyPatch, more: str, count: int, is_independent: bool,
    soon_ns: int,
) -> None:  # fmt: skip
    """Where another instance may be free first, requests may have to be computed together, or the next one is slow."""
    backend.is_independent = is_independent
    monkeypatch.setattr(instance_worker, "_SOON_NS", soon_ns)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            model, answers = await started(tmp_path, repository, more, count), Answers()
            given = [request(model, CLOSED) for _ in range(count)] + [request(model, v) for v in (101, 102)]
            for one in given:
                model.submit(one, answers.receive(float(one.inputs["IN"].flat[0])))
            assert [one.started_ns > 0 for one in given] == [True] * count + [False, False]
            backend.gate.set()
            await becomes(lambda: len(answers.found) == len(given))

    asyncio.run(run())


@pytest.mark.usefixtures("short_bls_timeout")
def test_a_quick_model_that_asks_itself_is_told_so_and_those_behind_it_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_worker, "_SOON_NS", 10**10)
    write(tmp_path, "m", HEAD + ASKS_ITSELF, SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")

            def of(n: int) -> InferRequest:
                return asked(model, IN=np.array([n], np.int32))

            for _ in range(20):
                await model.infer(of(3))
            asking = [asyncio.ensure_future(model.infer(of(n))) for n in (-1, 4, 5)]
            failed, *others = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 20)
            assert isinstance(failed, StatusError) and "gave no response for" in str(failed)
            assert [int(one.outputs["OUT"][0]) for one in others if isinstance(one, InferResponse)] == [16, 25]

    asyncio.run(run())
