"""Requests from model to model end: at a depth, or without a response after a time. Loads in a circle are refused."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models import bls
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import Code, StatusError
from tests.support.python_models import HEAD, asked, loaded, write
from tests.support.triton_models import SQUARE_CONFIG

pytestmark = pytest.mark.usefixtures("short_bls_timeout")

# Asks `model` with what it was asked, until IN is 0.
NEXT = """
    def execute(self, requests):
        responses = []
        for request in requests:
            n = request.inputs()[0].as_numpy()
            if n[0]:
                asking = pb_utils.InferenceRequest(model_name=%r, requested_output_names=["OUT"],
                                                   inputs=[pb_utils.Tensor("IN", n - 1)])
                response = asking.exec()
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                n = response.output_tensors()[0].as_numpy() + 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", n)]))
        return responses
"""
PIPE = """platform: "ensemble"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "%s" input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
} }
"""


def instances(n: int) -> str:
    return f"instance_group {{ kind: KIND_CPU count: {n} }}"


async def ask(repository: ModelRepository, name: str, n: int) -> int:
    model = repository.get(name)
    found = await asyncio.wait_for(model.infer(asked(model, IN=np.array([n], np.int32))), 10)
    return int(found.outputs["OUT"][0])


def test_a_model_that_waits_for_itself_times_out(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + NEXT % "m", SQUARE_CONFIG % instances(3))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            assert await ask(repository, "m", 2) == 2, "three instances are enough for that"
            with pytest.raises(
                StatusError, match=r"model 'm' gave no response for 0.4 s \(m -> m.*more instances"
            ) as failed:
                await ask(repository, "m", 3)
            assert failed.value.code is Code.INTERNAL, "it is the model's exception"
            assert await ask(repository, "m", 2) == 2, "and they are free again"

    asyncio.run(run())


def test_what_waits_behind_a_request_that_timed_out_ends(tmp_path: Path) -> None:
    for name, following in (("a", "b"), ("b", "pipe"), ("c", "a")):
        write(tmp_path, name, HEAD + NEXT % following, SQUARE_CONFIG % "")
    write(tmp_path, "pipe", "", PIPE % "c")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in ("a", "b", "c", "pipe"):
                await repository.load(name)
            assert await ask(repository, "a", 2) == 2
            several = await asyncio.gather(*(ask(repository, "a", n) for n in (7, 0, 0, 0)), return_exceptions=True)
            assert "model 'b' gave no response for 0.4 s (a -> b)" in str(several[0]) and several[1:] == [0, 0, 0]
            assert await ask(repository, "a", 2) == 2

    asyncio.run(run())


def test_models_that_call_each_other_without_end_reach_a_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bls, "MAX_DEPTH", 4)
    write(tmp_path, "a", HEAD + NEXT % "pipe", SQUARE_CONFIG % instances(4))
    write(tmp_path, "pipe", "", PIPE % "a")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("a")
            await repository.load("pipe")
            assert await ask(repository, "a", 2) == 2
            says = r"more models than 4, the limit of nested requests \(a -> pipe -> a -> pipe -> a -> pipe\)"
            with pytest.raises(StatusError, match=says):
                await ask(repository, "a", 3)

    asyncio.run(run())


TIMES = """
    def execute(self, requests):
        asking = pb_utils.InferenceRequest(model_name="slow", requested_output_names=["OUT"],
                                           inputs=requests[0].inputs(), timeout=%d)
        return [pb_utils.InferenceResponse(r.output_tensors(), r.error()) for r in [asking.exec()]]
"""


def test_a_request_may_have_its_own_timeout(tmp_path: Path) -> None:
    slow = "    def execute(self, requests):\n        import time\n        time.sleep(1)\n" + (
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', r.inputs()[0].as_numpy())])"
        " for r in requests]\n"
    )
    write(tmp_path, "brief", HEAD + TIMES % 100_000, SQUARE_CONFIG % "")
    write(tmp_path, "patient", HEAD + TIMES % 9_000_000, SQUARE_CONFIG % "")
    write(tmp_path, "slow", HEAD + slow, SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in ("brief", "patient", "slow"):
                await repository.load(name)
            with pytest.raises(StatusError, match=r"no response for 0.1 s \(brief -> slow\)") as failed:
                await ask(repository, "brief", 2)
            assert failed.value.code is Code.UNAVAILABLE
            assert await ask(repository, "patient", 2) == 2

    asyncio.run(run())


LOADS = """
    def initialize(self, args):
        self.was_ready = pb_utils.is_model_ready(%r)
        pb_utils.load_model(%r)

    def execute(self, requests):
        ready = [self.was_ready, pb_utils.is_model_ready(%r), pb_utils.is_model_ready("other", "2")]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(ready, np.int32))])]

    def finalize(self):
        pb_utils.unload_model(%r)
"""


def test_models_load_and_unload_models(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + LOADS.replace("%r", '"other"'), SQUARE_CONFIG % "")
    write(tmp_path, "other", HEAD + NEXT % "m", SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            found = await model.infer(asked(model, IN=np.array([1], np.int32)))
            assert found.outputs["OUT"].tolist() == [0, 1, 0]
            await repository.unload("m")
            await asyncio.wait_for(model.retire(), 5)
            with pytest.raises(StatusError, match="'other' has no available versions"):
                repository.get("other")

    asyncio.run(run())


def test_models_that_load_one_another(tmp_path: Path) -> None:
    for name, following in (("a", "b"), ("b", "pipe"), ("self", "self")):
        write(tmp_path, name, HEAD + LOADS.replace("%r", f'"{following}"'), SQUARE_CONFIG % "")
    write(tmp_path, "pipe", "", PIPE % "a")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            ring = ("a -> b -> pipe -> a", "b -> pipe -> a -> b", "pipe -> a -> b -> pipe")  # the first to look tells
            for name, ways in (("self", ("self -> self",)), ("a", ring)):
                with pytest.raises(StatusError) as failed:
                    await asyncio.wait_for(repository.load(name), 60)
                assert "deadlock: model" in str(failed.value) and any(f"({way})" in str(failed.value) for way in ways)

    asyncio.run(run())


def test_none_is_loaded_where_clients_may_not(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + LOADS.replace("%r", '"none"'), SQUARE_CONFIG % "")

    async def run() -> list[str]:
        repository = ModelRepository(RepositoryFlags(model_repository=(str(tmp_path),)))
        found = await asyncio.wait_for(repository.start(), 10)
        await repository.close(5)
        return found

    (error,) = asyncio.run(run())
    assert "explicit model load / unload is not allowed" in error
