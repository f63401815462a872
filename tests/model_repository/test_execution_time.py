"""Which instances are computed in the event loop's thread: those that took less time than waking another would."""

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository import backends
from millrace.model_repository.backends.backend import BatchedInstance, Instance, InstanceContext, ModelBackend
from millrace.model_repository.backends.framework_backend import FrameworkModel
from millrace.model_repository.execution import execution_time
from millrace.model_repository.execution.execution_time import MAX_BYTES, QUICK_NS, Pace
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.tensors import Array
from tests.support.python_models import loaded
from tests.support.repository import identity, write_models


def test_so_many_quick_ones_in_a_row() -> None:
    one = Pace()
    for i in range(execution_time._N_QUICK):
        assert one.max_inline_bytes == 0
        one.record(100 + i % 2, QUICK_NS)
    assert one.max_inline_bytes == 101
    one.record(MAX_BYTES + 1, 10 * QUICK_NS)
    assert one.max_inline_bytes == 101, "large inputs say nothing of small ones"
    one.record(100, execution_time._VERY_SLOW_NS + 1)
    assert one.max_inline_bytes == 0
    for _ in range(execution_time._PAUSE):
        one.record(7, 1)
    assert one.max_inline_bytes == 0, "after a very slow one it takes longer"
    for _ in range(execution_time._N_QUICK):
        one.record(7, 1)
    assert one.max_inline_bytes == 7


@pytest.mark.parametrize(("every", "is_quick"), [(30, True), (10, False)])
def test_seldom_interruptions_change_nothing(every: int, is_quick: bool) -> None:
    """Of one in 30 computations on a busy machine; one in 10 is slow by itself."""
    one = Pace()
    for i in range(1, 3001):
        one.record(8, QUICK_NS + 1 if i % every == 0 else 1)
    assert (one.max_inline_bytes == 8) is is_quick
    for _ in range(3):
        one.record(8, QUICK_NS + 1)
    assert one.max_inline_bytes == 0


def test_a_thread_that_waits_for_the_interpreter_is_judged_by_its_own_time() -> None:
    one, other = Pace(), Pace()
    for _ in range(execution_time._N_QUICK):
        one.record(8, 3 * QUICK_NS, QUICK_NS // 2)
        other.record(8, 11 * QUICK_NS, QUICK_NS // 2)  # a library's own threads compute
    assert (one.max_inline_bytes, other.max_inline_bytes) == (8, 0)


class Measured(FrameworkModel):
    """Its time is what the test says, whatever the machine does meanwhile."""

    threads: list[str] = []  # noqa: RUF012
    took_ns = 1

    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given)

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.threads.append(threading.current_thread().name)
        return {"OUTPUT0": inputs["INPUT0"] + 1}

    def record_time(self, n_bytes: int, took_ns: int, cpu_ns: int | None = None) -> None:
        super().record_time(n_bytes, type(self).took_ns)


class Measuring(ModelBackend):
    def instance(self, given: InstanceContext) -> Instance:
        return Measured(given)


@pytest.mark.timing
def test_a_quick_network_is_computed_in_the_loops_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.model_repository.lifecycle.loader.create_backend", lambda name: Measuring())
    monkeypatch.setattr(Measured, "threads", [])
    write_models(tmp_path, {"m": identity("FP32", "-1").replace("identity", "onnxruntime")})
    (tmp_path / "m" / "1" / "model.onnx").touch()

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")

            async def ask(n: int) -> str:
                request = InferRequest({})
                model.checker.attach_inputs(request, [RawInput("INPUT0", "FP32", (n,), np.zeros(n, np.float32))])
                assert (await model.infer(request)).outputs["OUTPUT0"].tolist() == [1.0] * n
                return Measured.threads[-1]

            ours = threading.current_thread().name
            until_s = time.monotonic() + 20
            while await ask(4) != ours:
                assert time.monotonic() < until_s
            assert len(Measured.threads) > execution_time._N_QUICK
            assert await ask(5) != ours, "larger inputs are not known to be quick"
            assert await ask(4) == ours
            monkeypatch.setattr(Measured, "took_ns", QUICK_NS + 1)
            for _ in range(3):
                assert await ask(4) == ours, "it is found out by computing"
            assert await ask(4) != ours

    asyncio.run(run())


def test_backends_that_run_a_models_code_stay_in_their_threads() -> None:
    """It may wait for whatever it likes, for other models, too."""
    assert not issubclass(backends.create_backend("python").__class__, BatchedInstance)
    assert Instance.max_inline_bytes == 0 == BatchedInstance.max_inline_bytes
