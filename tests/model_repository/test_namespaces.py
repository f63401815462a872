"""Two repositories with models of the same names (`--model-namespacing`): whom a name means, and which steps ensembles
take. The cases are those of Triton's own tests of it, and the edges between them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.lifecycle.load_source import read_for_load
from millrace.model_repository.metrics.triton_metrics import model_metrics
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.prometheus import metrics_text
from tests.support.ensembles import asking
from tests.support.loaded import becomes
from tests.support.namespaces import AMBIGUOUS, CONFIG, pipe, plus, roots_of
from tests.support.python_models import write

BLS = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        asked = pb_utils.InferenceRequest(model_name="m", inputs=request.inputs(), requested_output_names=["OUTPUT0"])
        return [asked.exec()]
"""


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return roots_of(tmp_path, (1, 2))


@asynccontextmanager
async def served(roots: list[Path], mode: str = "explicit", **flags: Any) -> AsyncIterator[ModelRepository]:
    said = RepositoryFlags(
        model_repository=tuple(map(str, roots)), model_namespacing=True, model_control_mode=mode, **flags
    )
    repository = ModelRepository(said)
    try:
        assert await repository.start() == []
        yield repository
    finally:
        await repository.close(5.0)


async def adds(repository: ModelRepository, name: str) -> int:
    """What the model adds to 10."""
    model = repository.get(name)
    response = await model.infer(asking(model, INPUT0=np.full(4, 10, np.int32)))
    return int(response.outputs["OUTPUT0"][0]) - 10


def refusal(repository: ModelRepository, name: str) -> tuple[Code, str]:
    with pytest.raises(StatusError) as found:
        repository.get(name)
    return found.value.code, found.value.message


def there(repository: ModelRepository) -> list[str]:
    return [f"{Path(model.namespace).name}::{model.name}" for model in repository.models()]


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_ensembles_take_the_model_beside_them_and_a_name_of_two_is_refused(roots: list[Path], mode: str) -> None:
    async def run() -> None:
        async with served(roots, mode) as repository:
            if mode == "explicit":
                await repository.load("pipe_a")
                assert there(repository) == ["a::m", "a::pipe_a"] and await adds(repository, "m") == 1, "the only one"
                await repository.load("pipe_b")
            assert [await adds(repository, name) for name in ("pipe_a", "pipe_b")] == [1, 2]
            assert refusal(repository, "m") == (Code.INVALID_ARG, AMBIGUOUS % "m")
            assert repository.is_ready()
            assert [one["name"] for one in await repository.index(only_ready=True)] == ["m", "m", "pipe_a", "pipe_b"]
            told = metrics_text(model_metrics(repository.models(), repository.common.metrics_config))
            for root in roots:
                assert f'nv_inference_request_success{{namespace="{root}",model="m",version="1"}} ' in told

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["none", "explicit"])
def test_two_ensembles_of_one_name(tmp_path: Path, mode: str) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root, n in zip(roots, (1, 2), strict=True):
        plus(root, f"m_{root.name}", n)
        pipe(root, "pipe", f"m_{root.name}")

    async def run() -> None:
        async with served(roots, mode) as repository:
            if mode == "explicit":
                await repository.load("pipe")
            assert [await adds(repository, name) for name in ("m_a", "m_b")] == [1, 2]
            assert refusal(repository, "pipe") == (Code.INVALID_ARG, AMBIGUOUS % "pipe")

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_a_member_comes_back_beside_its_ensemble(roots: list[Path], mode: str) -> None:
    """Triton's test_dynamic_resolution: until then the ensemble takes the only one of that name."""
    away = roots[0].parent / "away"

    async def run() -> None:
        async with served(roots, mode, repository_poll_secs=0.1) as repository:
            (roots[0] / "m").rename(away)
            if mode == "explicit":
                for name in ("pipe_a", "pipe_b"):
                    await repository.load(name)
            await becomes(lambda: there(repository) == ["b::m", "a::pipe_a", "b::pipe_b"])
            assert [await adds(repository, name) for name in ("pipe_a", "pipe_b", "m")] == [2, 2, 2]
            away.rename(roots[0] / "m")
            if mode == "explicit":
                await repository.load("pipe_a")
            await becomes(lambda: there(repository) == ["a::m", "b::m", "a::pipe_a", "b::pipe_b"])
            assert [await adds(repository, name) for name in ("pipe_a", "pipe_b")] == [1, 2]
            assert refusal(repository, "m") == (Code.INVALID_ARG, AMBIGUOUS % "m")

    asyncio.run(run())


def test_a_member_that_became_ambiguous_ends_its_ensemble(roots: list[Path], tmp_path: Path) -> None:
    pipe(tmp_path / "c", "pipe_c")

    async def run() -> None:
        async with served([*roots, tmp_path / "c"]) as repository:
            with pytest.raises(StatusError) as lost:
                await repository.load("pipe_c")
            what = f"ensemble {tmp_path / 'c'}::pipe_c contains models that are not available or ambiguous: m"
            assert what in lost.value.message and there(repository) == [], "nothing was loaded for it"
        async with served([roots[1], tmp_path / "c"], load_model=("pipe_c",)) as repository:
            assert await adds(repository, "pipe_c") == 2
            plus(tmp_path / "c", "m", 3)
            await repository.load("m")
            assert there(repository) == ["b::m", "c::m", "c::pipe_c"] and await adds(repository, "pipe_c") == 3
            await repository.unload("m")
            assert there(repository) == [] and repository.is_ready(), "by the wish of whoever unloaded it"
            reasons = {one["name"]: one.get("reason") for one in await repository.index(only_ready=False)}
            lacks = f"ensemble '{tmp_path / 'c'}::pipe_c' depends on '{tmp_path / 'c'}::m' which has no loaded version"
            assert (reasons["pipe_b"], reasons["pipe_c"]) == (None, lacks)

    asyncio.run(run())


def test_a_load_and_an_unload_mean_all_models_of_a_name(roots: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with served(roots) as repository:
            await repository.load("m")
            assert there(repository) == ["a::m", "b::m"]
            (roots[1] / "m" / "config.pbtxt").write_text(CONFIG % "max_batch_size: -1")
            with pytest.raises(StatusError) as failed:
                await repository.load("m")
            assert failed.value.message.startswith(f"failed to load '{roots[1]}::m', failed to poll"), "b's alone"
            assert there(repository) == ["a::m", "b::m"], "the old one stays"
            would = await repository.would_load("m")
            assert [(one["namespace"], one["would"]) for one in would["models"]] == [
                (str(roots[0]), "change nothing"), (str(roots[1]), "fail")
            ]  # fmt: skip
            alone = await repository.would_load("pipe_a")
            assert (alone["would"], alone["namespace"]) == ("load", str(roots[0]))
            await repository.unload("m")
            assert there(repository) == [] and refusal(repository, "m")[0] is Code.NOT_FOUND
            await repository.unload("m")
            await repository.unload("none")
            assert "nothing to unload: no model 'none' is there" in caplog.messages

    asyncio.run(run())


def test_an_unload_means_those_that_are_there(roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's LoadUnloadModels takes every identifier that it knows of a name. Of one that a load is just looking for,
    which no folder has any more, there is nothing to unload, and the others go."""
    is_reading, may_read = threading.Event(), threading.Event()

    def waits(folders: Any, one: ModelId, *given: Any) -> Any:
        is_reading.set()
        assert may_read.wait(10)
        return read_for_load(folders, one, *given)

    async def run() -> None:
        async with served(roots, load_model=("m",)) as repository:
            for root in roots:
                (root / "m").rename(root / "away")
            monkeypatch.setattr("millrace.model_repository.lifecycle.model_changes.read_for_load", waits)
            loading = asyncio.create_task(repository.load("m"))
            await becomes(is_reading.is_set)
            unloading = asyncio.create_task(repository.unload("m"))
            await becomes(lambda: there(repository) == [])
            may_read.set()
            await unloading
            with pytest.raises(StatusError, match="failed to load 'm', failed to poll"):
                await loading

    asyncio.run(run())


def test_members_go_with_their_own_ensemble_alone(roots: list[Path]) -> None:
    async def run() -> None:
        async with served(roots, load_model=("pipe_a", "pipe_b")) as repository:
            await repository.unload("pipe_a", with_members=True)
            assert there(repository) == ["b::m", "b::pipe_b"] and await adds(repository, "m") == 2

    asyncio.run(run())


def test_what_a_client_brings_is_in_no_repository(roots: list[Path]) -> None:
    brought: dict[str, Any] = {
        "backend": "identity", "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [4]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [4]}],
    }  # fmt: skip

    async def run() -> None:
        async with served(roots, load_model=("pipe_a",)) as repository:
            await repository.load("own", brought, {"1/x": b""})
            assert await adds(repository, "own") == 0
            await repository.load("m", brought, {"1/x": b""})
            assert there(repository) == ["::m", "a::m", "::own", "a::pipe_a"]
            assert refusal(repository, "m") == (Code.INVALID_ARG, AMBIGUOUS % "m")
            assert await adds(repository, "pipe_a") == 1

    asyncio.run(run())


def test_a_model_that_asks_by_a_name_of_two_is_told(roots: list[Path]) -> None:
    write(roots[0], "asks", BLS, CONFIG % "")

    async def run() -> None:
        async with served(roots, load_model=("asks", "pipe_a")) as repository:
            assert await adds(repository, "asks") == 1
            await repository.load("m")
            with pytest.raises(StatusError) as refused:
                await adds(repository, "asks")
            assert AMBIGUOUS % "m" in refused.value.message

    asyncio.run(run())


@pytest.mark.parametrize("late_s", [{}, {"b x": 0.05}, {"b y": 0.05}, {"a x": 0.03, "b x": 0.09}])
def test_rings_are_those_of_models_and_not_of_names(
    late_s: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a's `x` is made of b's `y`, which is made of b's `x`: no ring, though the names are one; whichever of their files
    is read last."""

    def slowly(folders: Any, one: ModelId, *given: Any) -> Any:
        time.sleep(late_s.get(f"{Path(one.namespace).name} {one.name}", 0))
        return read_for_load(folders, one, *given)

    monkeypatch.setattr("millrace.model_repository.lifecycle.model_changes.read_for_load", slowly)
    pipe(tmp_path / "a", "x", "y")
    pipe(tmp_path / "b", "y", "x")
    plus(tmp_path / "b", "x", 5)

    async def run() -> None:
        async with served([tmp_path / "a", tmp_path / "b"], "none") as repository:
            assert there(repository) == ["a::x", "b::x", "b::y"] and await adds(repository, "y") == 5
            (of_a,) = (model for model in repository.models() if model.namespace == str(tmp_path / "a"))
            response = await of_a.infer(asking(of_a, INPUT0=np.zeros(4, np.int32)))
            assert response.outputs["OUTPUT0"].tolist() == [5] * 4

    asyncio.run(run())
