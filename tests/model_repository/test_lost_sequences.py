"""Sequences whose instance dies, and sequences that wait for themselves."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from millrace.model_repository.models.backend_model import BackendModel
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.status_code import Code, StatusError
from tests.model_repository.test_sequence_model import OLDEST, sums
from tests.support.loaded import Loaded, becomes
from tests.support.python_models import OWN, write
from tests.support.sequences import SUMS, accumulator, part

START, END = 1, 2
TWO = "instance_group { kind: KIND_CPU count: 2 }"
LOST = "inference request for sequence %d to model 'm': instance %s, which had the sequence, ended"


def kill(model: Model, number: int) -> str:
    """The process of one of its instances; that one's name."""
    assert isinstance(model, BackendModel)
    worker = model._workers[number]
    os.kill(worker._instance._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    return worker.name


async def refusal(model: Model, id_: int, value: int, flags: int = 0) -> tuple[Code, str]:
    with pytest.raises(StatusError) as refused:
        await model.infer(part(model, id_, value, flags))
    return refused.value.code, str(refused.value)


@pytest.mark.parametrize("strategy", ["direct {}", OLDEST])
def test_a_sequence_does_not_go_on_without_what_was_known_of_it(tmp_path: Path, strategy: str) -> None:
    """1 and 3 are at the instance that dies, 2 at the other one."""
    write(tmp_path, "m", SUMS, accumulator(strategy, size=2, more=OWN + TWO))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            for id_ in (1, 2, 3):
                assert await sums(model, id_, 10, ends=False) == [10]
            gone = kill(model, 0)
            await becomes(lambda: bool(model.unready_reason))
            for id_ in (1, 3, 1):  # each time that it is tried
                code, what = await refusal(model, id_, 1)
                assert code is Code.UNAVAILABLE and what.startswith(LOST % (id_, gone)), what
                assert "begin it again with the START flag" in what
            assert int((await model.infer(part(model, 2, 5, END))).outputs["OUTPUT"].item()) == 15, "the other goes on"
            assert await sums(model, 1, 7, 1) == [7, 8], "and what begins anew does, too"
            await becomes(lambda: not model.unready_reason)
            assert await asyncio.gather(*(sums(model, id_, 1, 2) for id_ in range(4, 12))) == [[1, 3]] * 8
            code, what = await refusal(model, 1, 1)
            assert code is Code.INVALID_ARG and "must specify the START flag" in what, "that one had ended"

    asyncio.run(run())


def test_what_waits_behind_the_request_that_dies_is_told(tmp_path: Path) -> None:
    first = "        answers, told = [], []\n"
    value = 'pb_utils.get_input_tensor_by_name(requests[0], "INPUT").as_numpy()'
    slow = SUMS.replace(first, f"{first}        time.sleep(0.5 * (1 in {value}))\n")
    write(tmp_path, "m", "import time\n" + slow, accumulator(size=2, more=OWN))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            flags = (START, 0, 0, END)
            asking = [asyncio.ensure_future(model.infer(part(model, 1, 1, flag))) for flag in flags]
            await becomes(lambda: model.n_pending == 3)
            kill(model, 0)
            computed, *waited = await asyncio.gather(*asking, return_exceptions=True)
            assert "is not healthy" in str(computed)
            assert all(isinstance(e, StatusError) and LOST % (1, "m_0") in str(e) for e in waited), waited
            assert await sums(model, 1, 2, 3) == [2, 5] and model.n_pending == 0

    asyncio.run(run())


# Asks itself for what its input says: 1 the next of this sequence, 2 a sequence of its own. 0: nothing.
ITSELF = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = int(request.inputs()[0].as_numpy().item())
            if value:
                id_, flags = (request.correlation_id(), 0) if value == 1 else (request.correlation_id() + 100, 3)
                asking = pb_utils.InferenceRequest(
                    model_name="m", requested_output_names=["OUTPUT"], correlation_id=id_, flags=flags,
                    inputs=[pb_utils.Tensor("INPUT", np.zeros((1, 1), np.int32))])
                response = asking.exec()
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.zeros((1, 1), np.int32))]) for _ in requests]
"""


@pytest.mark.parametrize("strategy", ["direct {}", OLDEST])
@pytest.mark.usefixtures("short_bls_timeout")
def test_a_sequence_that_waits_for_itself_is_named(tmp_path: Path, strategy: str) -> None:
    """The other instance is idle, and can do nothing for it; a sequence of its own finds a slot there."""
    config = accumulator(strategy, size=1, more=TWO, idle_us=500_000)  # which a sequence may wait for, too
    config = config[: config.index("control_input")] + "}"
    write(tmp_path, "m", ITSELF, config)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            await model.infer(part(model, 1, 0, START))
            async with asyncio.timeout(10):
                _, what = await refusal(model, 1, 1)
                assert "model 'm' gave no response for" in what, what
                await model.infer(part(model, 1, 2, START))  # anew: what waited of it was cancelled, which ends it
                asking = [model.infer(part(model, id_, 2, flags)) for id_, flags in ((1, 0), (2, START))]
                found = await asyncio.gather(*asking, return_exceptions=True)
            errors = [str(e) for e in found if isinstance(e, BaseException)]
            assert all("gave no response" in error for error in errors), errors
            assert errors or strategy == OLDEST, "two slots in all, which both wait for one"
            async with asyncio.timeout(10):
                await model.infer(part(model, 3, 0, START))

    asyncio.run(run())
