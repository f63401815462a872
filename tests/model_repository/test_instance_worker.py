"""Instances that are lost: what was given to one that is gone goes to the next, and nothing is lost but what ran."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.backends import BACKENDS
from millrace.model_repository.backends.backend import Instance, InstanceContext, InstanceLostError, ModelBackend
from millrace.model_repository.execution import instance_worker
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import asked, loaded

CONFIG = """backend: "goes" max_batch_size: 4 dynamic_batching { preserve_ordering: true }
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


class _Goes(Instance):
    """Gone before its second batch; whoever makes it counts."""

    def __init__(self, of: "Goes") -> None:
        self._of, self._n = of, 0
        self._tell: Callable[[str], None] | None = None
        of.n_made += 1
        if of.n_made in of.fails:
            raise ValueError("not yet")

    def execute(self, requests: Sequence[InferRequest]) -> None:
        self._n += 1
        if self._n == 2:
            assert self._tell is not None
            self._tell("it went")
            raise InstanceLostError
        for request in requests:
            request.send(InferResponse({"OUT": request.inputs["IN"]}))

    def on_lost(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def close(self) -> None:
        self._of.n_closed += 1


class Goes(ModelBackend):
    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.n_made = self.n_closed = 0
        self.fails = fails

    def instance(self, given: InstanceContext) -> Instance:
        return _Goes(self)


def test_what_is_given_to_a_gone_instance_goes_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Goes(fails=(3,))
    monkeypatch.setitem(BACKENDS, "goes", lambda: backend)
    monkeypatch.setattr(instance_worker, "RESTARTS_S", (0.001, 0.002))
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, order = repository.get("m"), list[float]()
            done = asyncio.Event()

            def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
                assert response is not None and final, error
                order.append(float(response.outputs["OUT"][0, 0]))
                if len(order) == 30:
                    done.set()

            for i in range(30):
                model.submit(asked(model, IN=np.full((1, 1), i, np.float32)), receive)
            await asyncio.wait_for(done.wait(), 10)
            assert order == list(range(30)), "in their order, each once"
            assert backend.n_made > 5 and backend.n_closed >= backend.n_made - 2
            statistics = model.statistics
            assert statistics.n_inferences == 30 and sum(statistics.failures.values()) == 0
        assert backend.n_made - len(backend.fails) == backend.n_closed, "each that was made was closed"

    asyncio.run(run())


def test_one_that_cannot_be_made_again_is_given_up_and_unloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Goes(fails=range(2, 100))
    monkeypatch.setitem(BACKENDS, "goes", lambda: backend)
    monkeypatch.setattr(instance_worker, "RESTARTS_S", (0.001, 0.002))
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            requests = [asked(model, IN=np.full((1, 1), i, np.float32)) for i in range(12)]
            found = await asyncio.wait_for(
                asyncio.gather(*(model.infer(r) for r in requests), return_exceptions=True), 10
            )
            errors = [e for e in found if isinstance(e, StatusError)]
            assert len(errors) == 11, "all but the first, which an idle instance took alone"
            assert all(
                "all instances of model 'm' ended again and again: ValueError: not yet" in str(e) for e in errors
            )
            assert backend.n_made == 3 and not repository.is_ready()
            await repository.unload("m")
            await asyncio.wait_for(model.retire(), 5)

    asyncio.run(run())
