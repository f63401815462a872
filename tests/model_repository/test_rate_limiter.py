"""The rate limiter: who computes with what is shared, against a plain list of what is held; models that share."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from millrace.errors import ConfigError
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import InstanceGroup, Resource
from millrace.model_repository.config.model_config import RateLimiter as Said
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.scheduling.dynamic_batcher import Batch
from millrace.model_repository.scheduling.rate_limiter import InstanceRateLimiter
from tests.support.drawn import SEEDS, examples
from tests.support.ensembles import asking
from tests.support.loaded import Loaded, asked
from tests.support.python_models import HEAD, write
from tests.support.repository import identity, write_models


def group(priority: int = 0, is_global: bool = False, **counts: int) -> InstanceGroup:
    resources = tuple(Resource(name=name, is_global=is_global, count=n) for name, n in counts.items())
    return replace(empty(InstanceGroup), rate_limiter=Said(resources=resources, priority=priority), count=1)


@dataclass(eq=False)
class Slot:
    """An instance that has always something to compute, or never."""

    name: str
    limiter: InstanceRateLimiter
    wants: bool = True
    n_runs: int = 0
    is_running: bool = False
    batch: Batch | None = None
    log: list[str] = field(default_factory=list)

    def on_resources_available(self) -> None:
        for one in self.limiter.select_runnable([self] if not self.is_running else [], self.wants):
            self.limiter.begin(one)
            one.is_running = True
            one.n_runs += 1
            self.log.append(self.name)

    def end(self) -> None:
        self.is_running = False
        self.limiter.end(self)


def slots(limiter: InstanceRateLimiter, **groups: InstanceGroup) -> dict[str, Slot]:
    log: list[str] = []
    found = {name: Slot(name, limiter, log=log) for name in groups}
    for name, one in found.items():
        limiter.check([groups[name]])
        limiter.add(one, groups[name], one)
    return found


@settings(max_examples=examples(4))
@given(SEEDS)
def test_nobody_holds_what_is_not_there(seed: int) -> None:
    rng, limits = random.Random(seed), {"A": 5, "B": 3}
    needs = {f"m{i}": {"A": rng.randint(0, 5), "B": rng.randint(0, 3)} for i in range(6)}

    async def run() -> None:
        found = slots(
            InstanceRateLimiter(limits), **{n: group(rng.randint(1, 3), False, **c) for n, c in needs.items()}
        )
        for one in found.values():
            one.wants = False
        for _ in range(600):
            one = rng.choice(list(found.values()))
            if one.is_running:
                one.end()
                one.wants = False
            else:
                one.wants = rng.random() < 0.8
                one.on_resources_available()
            await asyncio.sleep(0)
            held = sum((Counter(needs[s.name]) for s in found.values() if s.is_running), Counter())
            assert all(held[name] <= n for name, n in limits.items())
            idle = [s for s in found.values() if s.wants and not s.is_running]
            for s in idle:  # who waits does so for what others hold, or others before it wait for
                fits = all(held[name] + n <= limits[name] for name, n in needs[s.name].items())
                others = [
                    o for o in idle if o is not s and any(needs[o.name][k] and n for k, n in needs[s.name].items())
                ]
                assert not fits or others, s
        for s in found.values():
            assert s.n_runs > 3, "nobody is starved"

    asyncio.run(run())


def test_turns_are_by_priority() -> None:
    async def run() -> None:
        found = slots(InstanceRateLimiter(), a=group(1, R=1), b=group(2, R=1), c=group(4, R=1))
        for one in found.values():
            one.on_resources_available()
        for _ in range(700):
            (running,) = (one for one in found.values() if one.is_running)
            running.end()
            running.on_resources_available()
            await asyncio.sleep(0)
        assert [round(one.n_runs / 100) for one in found.values()] == [4, 2, 1]

    asyncio.run(run())


def test_a_large_one_is_not_starved_and_holds_up_nobody_else() -> None:
    async def run() -> None:
        limiter = InstanceRateLimiter()
        found = slots(limiter, small=group(R=1), other=group(R=1), large=group(R=2), apart=group(Q=1))
        for name in ("small", "other"):
            found[name].on_resources_available()
        found["small"].n_runs += 1
        found["large"].on_resources_available()
        found["small"].end()
        found["small"].on_resources_available()
        assert not found["small"].is_running, "one R is free, for which the large one waits"
        found["apart"].on_resources_available()
        assert found["apart"].is_running
        found["other"].end()
        await asyncio.sleep(0)
        assert found["large"].is_running and not found["small"].is_running
        found["large"].end()
        await asyncio.sleep(0)
        assert found["small"].is_running

    asyncio.run(run())


def test_there_is_as_much_as_the_largest_wants() -> None:
    async def run() -> None:
        limiter = InstanceRateLimiter()
        found = slots(limiter, a=group(R1=4, R2=4), b=group(R2=5, R3=10), c=group(R1=1, R3=7))
        found["a"].on_resources_available()
        found["b"].on_resources_available()
        assert found["a"].is_running and not found["b"].is_running
        found["a"].end()
        await asyncio.sleep(0)
        assert found["b"].is_running
        found["c"].on_resources_available()
        assert not found["c"].is_running, "3 of R3 are left"
        limiter.remove([found["b"]])
        await asyncio.sleep(0)
        assert found["c"].is_running, "what is unloaded holds nothing"

    asyncio.run(run())


def test_what_could_never_compute_is_refused() -> None:
    limiter = InstanceRateLimiter({"R": 5})
    what = 'Resource count for "R" is limited to 5 which will prevent scheduling of one or more model instances, the '
    with pytest.raises(StatusError, match=f"{what}minimum required count is 6"):
        limiter.check([group(R=6)])
    limiter.check([group(R=5, is_global=True)])
    with pytest.raises(StatusError, match='Resource "R" is present as both global and device-specific resource'):
        limiter.check([group(R=1)])


LIMITED = """max_batch_size: 8 instance_group { count: %d kind: KIND_CPU
rate_limiter { resources { name: "cores" count: %d } priority: %d } }
parameters { key: "execute_delay_ms" value { string_value: "10" } }"""


@pytest.mark.parametrize("is_idle", [False, pytest.param(True, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_models_compute_one_after_the_other(tmp_path: Path, is_idle: bool) -> None:
    models = {name: identity("FP32", "1", LIMITED % (2, 1, priority)) for name, priority in (("a", 1), ("b", 2))}
    write_models(tmp_path, models)

    async def timed(common: RepositoryContext) -> float:
        async with Loaded(tmp_path, common) as repository:
            both = [repository.get(name) for name in ("a", "b") for _ in range(4)]
            began_s = time.monotonic()
            answers = await asyncio.gather(*(model.infer(asked(model, i)) for i, model in enumerate(both)))
            assert [int(answer.outputs["OUTPUT0"][0, 0]) for answer in answers] == list(range(8))
            return time.monotonic() - began_s

    limited_s = asyncio.run(timed(RepositoryContext(limiter=InstanceRateLimiter())))
    at_once_s = min(asyncio.run(timed(RepositoryContext())) for _ in range(1 if is_idle else 5))
    assert at_once_s < (0.08 if is_idle else limited_s), "four at a time: 0.02 s, if nobody else computes"
    assert limited_s >= 0.08
    assert asyncio.run(timed(RepositoryContext(limiter=InstanceRateLimiter({"cores": 2})))) >= 0.04


def test_cancelled_requests_and_unloaded_models_leave_the_others_going(tmp_path: Path) -> None:
    write_models(tmp_path, {name: identity("FP32", "1", LIMITED % (1, 1, 1)) for name in "ab"})

    async def run() -> None:
        flags: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
        async with Loaded(tmp_path, RepositoryContext(limiter=InstanceRateLimiter()), **flags) as repository:
            a, b = repository.get("a"), repository.get("b")
            first = asyncio.create_task(a.infer(asked(a, 1)))
            await asyncio.sleep(0)
            waits, other = asyncio.create_task(b.infer(asked(b, 2))), asyncio.create_task(a.infer(asked(a, 3)))
            await asyncio.sleep(0)
            waits.cancel()
            await repository.unload("b")
            async with asyncio.timeout(5):
                await asyncio.gather(first, other)
            await repository.load("b")
            async with asyncio.timeout(5):
                await repository.get("b").infer(asked(repository.get("b"), 4))

    asyncio.run(run())


ASKS = f"""{HEAD}
    def execute(self, requests):
        return [self.asked(request) for request in requests]

    def asked(self, request):
        found = pb_utils.InferenceRequest(
            model_name="inner", requested_output_names=["OUTPUT0"], inputs=request.inputs()).exec()
        return pb_utils.InferenceResponse(found.output_tensors(), found.error())
"""


@pytest.mark.usefixtures("short_bls_timeout")
def test_a_model_that_asks_one_that_waits_for_its_resources_gets_an_error(tmp_path: Path) -> None:
    config = identity("INT32", "4", LIMITED % (1, 1, 1))
    write_models(tmp_path, {"inner": config})
    write(tmp_path, "outer", ASKS, config.replace('"identity"', '"python"'))

    async def run() -> None:
        async with Loaded(tmp_path, RepositoryContext(limiter=InstanceRateLimiter())) as repository:
            outer = repository.get("outer")
            async with asyncio.timeout(10):
                with pytest.raises(StatusError, match="gave no response for"):
                    await outer.infer(asking(outer, INPUT0=np.zeros((1, 4), np.int32)))
            inner = repository.get("inner")
            await inner.infer(asking(inner, INPUT0=np.zeros((1, 4), np.int32)))

    asyncio.run(run())


def test_flags_are_tritons() -> None:
    flags = OperationFlags(rate_limit="execution_count", rate_limit_resource=("R1:10", "R2:5:0"))
    assert (
        RepositoryContext.from_flags(flags).limiter is not None
        and RepositoryContext.from_flags(OperationFlags()).limiter is None
    )


@pytest.mark.parametrize(
    "mode, said, fragment",
    [
        ("off", ("R:1",), "add it"),
        ("execution_count", ("R",), "NAME:COUNT"),
        ("execution_count", ("R:x",), "NAME:COUNT"),
        ("execution_count", ("R:1:1",), "device 1"),
        ("execution_count", ("R:1", "R:2"), "twice"),
    ],
)
def test_a_mistake_in_a_flag_is_said(mode: str, said: tuple[str, ...], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        InstanceRateLimiter.from_flags(mode, said)
