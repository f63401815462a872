"""Models that wait for one another: what could never end is named, and what can end is left alone."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models import bls
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import HEAD, asked, loaded, write
from tests.support.triton_models import SQUARE_CONFIG

pytestmark = pytest.mark.usefixtures("quick_looks")

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
ASYNC = """
    async def execute(self, requests):
        responses = []
        for request in requests:
            asking = [pb_utils.InferenceRequest(model_name=%r, requested_output_names=["OUT"], inputs=request.inputs())
                      for _ in range(2)]
            found = await asyncio.gather(*(one.async_exec() for one in asking))
            for response in found:
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
            responses.append(pb_utils.InferenceResponse(found[0].output_tensors()))
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


def test_a_model_that_asks_itself(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + NEXT % "m", SQUARE_CONFIG % instances(3))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            assert await ask(repository, "m", 2) == 2, "three instances are enough for that"
            with pytest.raises(StatusError) as failed:
                await ask(repository, "m", 3)
            assert "model 'm' asks model 'm', all of whose instances wait, in the end for one another (m -> m" in str(
                failed.value
            )
            assert await ask(repository, "m", 2) == 2, "and they are free again"

    asyncio.run(run())


def test_rings_of_models_are_named(tmp_path: Path) -> None:
    for name, following in (("a", "b"), ("b", "pipe"), ("c", "a")):
        write(tmp_path, name, HEAD + NEXT % following, SQUARE_CONFIG % "")
    write(tmp_path, "pipe", "", PIPE % "c")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in ("a", "b", "c", "pipe"):
                await repository.load(name)
            assert await ask(repository, "a", 2) == 2
            with pytest.raises(
                StatusError, match=r"deadlock: model 'c' asks model 'a', .*\(c -> a -> b -> pipe -> c\)"
            ):
                await ask(repository, "a", 7)
            several = await asyncio.gather(*(ask(repository, "a", n) for n in (7, 0, 0, 0)), return_exceptions=True)
            assert isinstance(several[0], StatusError) and several[1:] == [0, 0, 0], "only what closes the ring is lost"

    asyncio.run(run())


def test_rings_in_async_models_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a", HEAD + ASYNC % "b", SQUARE_CONFIG % "")
    write(tmp_path, "b", HEAD + ASYNC % "a", SQUARE_CONFIG % instances(2))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("a")
            await repository.load("b")
            with pytest.raises(StatusError, match="deadlock: model 'b' asks model 'a'"):
                await ask(repository, "a", 1)

    asyncio.run(run())


THREADS = """
    def execute(self, requests):
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor() as pool:
            asking = [pb_utils.InferenceRequest(model_name=%r, requested_output_names=["OUT"], inputs=r.inputs())
                      for r in requests]
            found = list(pool.map(lambda one: one.exec(), asking))
        for response in found:
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
        return [pb_utils.InferenceResponse(response.output_tensors()) for response in found]
"""


def test_rings_through_threads_of_models_are_named_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bls, "MAX_POSSIBLE_RINGS", 4)
    write(tmp_path, "a", HEAD + THREADS % "b", SQUARE_CONFIG % "")
    write(tmp_path, "b", HEAD + ASYNC % "a", SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("a")
            await repository.load("b")
            began_s = time.monotonic()
            with pytest.raises(StatusError, match="deadlock: model 'b' asks model 'a'"):
                await ask(repository, "a", 1)
            assert time.monotonic() - began_s > 4 * bls.CHECK_INTERVAL_S, "it may not have waited for them"

    asyncio.run(run())


def test_what_only_takes_long_is_no_ring(tmp_path: Path) -> None:
    slow = "    def execute(self, requests):\n        import time\n        time.sleep(0.3)\n" + (
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', r.inputs()[0].as_numpy())])"
        " for r in requests]\n"
    )
    for name, following in (("a", "b"), ("b", "slow")):
        write(tmp_path, name, HEAD + NEXT % following, SQUARE_CONFIG % "")
    write(tmp_path, "slow", HEAD + slow, SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in ("a", "b", "slow"):
                await repository.load(name)
            assert list(await asyncio.gather(ask(repository, "a", 2), ask(repository, "a", 2))) == [2, 2]

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
            ring = ("a -> b -> pipe -> a", "b -> pipe -> a -> b", "pipe -> a -> b -> pipe")  # whoever closes it tells
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
