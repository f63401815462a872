"""The response cache: which requests are the same, what is kept, and what a model says of it."""

import asyncio
import logging
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings

from millrace.errors import ConfigError
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.models.repository_context import RepositoryContext
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.response_cache import _EACH_BYTES, LocalResponseCache, cache_key, input_digest
from millrace.model_repository.scheduling.rate_limiter import InstanceRateLimiter
from tests.support.drawn import SEEDS, examples
from tests.support.loaded import Loaded, asked
from tests.support.prometheus import series
from tests.support.repository import identity, in_process, write_models

CACHED = identity("FP32", "1", "max_batch_size: 8 response_cache { enable: true } %s")
OF_IT = """platform: "ensemble" max_batch_size: 8 response_cache { enable: true }
input { name: "INPUT0" data_type: TYPE_FP32 dims: 1 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step { model_name: "m" input_map { key: "INPUT0" value: "INPUT0" }
                             output_map { key: "OUTPUT0" value: "OUTPUT0" } } }"""


def objects(*values: bytes) -> Any:
    found = np.empty(len(values), np.object_)
    found[:] = values
    return found


def test_a_digest_is_of_everything_that_an_input_is() -> None:
    numbers = np.arange(4, dtype=np.int32)
    different: list[dict[str, Any]] = [
        {"a": numbers},
        {"b": numbers},
        {"a": numbers.reshape(2, 2)},
        {"a": numbers.view(np.uint32)},
        {"a": numbers[::-1]},
        {"a": numbers, "b": numbers},
        {"a": objects(b"x", b"yz")},
        {"a": objects(b"xy", b"z")},
        {"a": objects(b"", b"xyz")},
        {},
    ]
    assert len({input_digest(one) for one in different}) == len(different)
    wide = np.arange(8, dtype=np.int32).reshape(4, 2)
    assert input_digest({"a": wide[:, 0]}) == input_digest({"a": wide[:, 0].copy()}), "however it lies in memory"
    assert input_digest({"a": numbers, "b": wide}) == input_digest({"b": wide, "a": numbers})


def test_a_key_is_of_what_a_model_sees() -> None:
    def key(model: object = 1, outputs: tuple[str, ...] = (), **parameters: Any) -> Any:
        request = InferRequest({}, outputs, request_id=str(random.random()))
        request.parameters = parameters
        return cache_key(model, request)

    assert key() == key() and key(a=1, b=2) == key(b=2, a=1)
    different = [key(), key(2), key(outputs=("O",)), key(a=1), key(a=True), key(a=1.0), key(a="1"), key(b=1)]
    assert len({repr(one) for one in different}) == len(set(different)) == len(different)


@settings(max_examples=examples(5))
@given(SEEDS)
def test_the_least_recently_used_go_first(seed: int) -> None:
    rng, max_bytes = random.Random(seed), 40 * 600
    cache, plain = LocalResponseCache(max_bytes), OrderedDict[tuple[object, ...], int]()
    for _ in range(1000):
        key: tuple[object, ...] = (rng.randrange(4), rng.randrange(60))
        if rng.random() < 0.5:
            assert (cache.get(key) is not None) == (key in plain)
            if key in plain:
                plain.move_to_end(key)
        elif rng.random() < 0.02:
            cache.remove_model(key[0])
            plain = OrderedDict((k, n) for k, n in plain.items() if k[0] != key[0])
        else:
            n = rng.choice([0, 1, 100, 1000, max_bytes])
            cache.put(key, InferResponse({"O": np.zeros(n, np.uint8)}))
            if n + _EACH_BYTES <= max_bytes:
                plain.pop(key, None)
                plain[key] = n + _EACH_BYTES
            while sum(plain.values()) > max_bytes:
                plain.popitem(last=False)
        assert (len(cache), cache.n_bytes) == (len(plain), sum(plain.values()))


def test_what_was_answered_is_answered_again(tmp_path: Path) -> None:
    write_models(tmp_path, {"m": CACHED % "", "plain": identity("FP32", "1", "max_batch_size: 8"), "of_it": OF_IT})
    cache = LocalResponseCache(1 << 20)

    async def run() -> None:
        async with Loaded(
            tmp_path, RepositoryContext(cache=cache), model_control_mode="explicit", load_model=("*",)
        ) as repository:
            model = repository.get("m")
            first = await model.infer(asked(model, 1, 2))
            again = await model.infer(asked(model, 1, 2))
            assert np.array_equal(first.outputs["OUTPUT0"], again.outputs["OUTPUT0"])
            with pytest.raises(ValueError, match="read-only"):
                again.outputs["OUTPUT0"][0] = 5
            await model.infer(asked(model, 1, 3))
            with_more = asked(model, 1, 2)
            with_more.parameters["a"] = 1
            await model.infer(with_more)
            stages = model.statistics.stages
            counts = {stage: stages[stage].count for stage in ("success", "queue", "cache_hit", "cache_miss")}
            assert counts == {"success": 4, "queue": 4, "cache_hit": 1, "cache_miss": 3}
            assert stages["compute_infer"].count == 3 == model.statistics.n_executions
            assert model.statistics.n_inferences == 6, "without what was kept"
            for _ in range(2):
                await repository.get("plain").infer(asked(repository.get("plain"), 1))
            assert repository.get("plain").statistics.n_executions == 2

            outer = repository.get("of_it")
            for _ in range(2):
                await outer.infer(asked(outer, 7))
            assert outer.statistics.stages["cache_hit"].count == 1
            n = len(cache)
            (tmp_path / "m" / "1" / "changed").touch()
            await repository.load("m")
            async with asyncio.timeout(5):
                while len(cache) > n - 4:  # those of the old one, once it is unloaded
                    await asyncio.sleep(0.01)
            await outer.infer(asked(outer, 7))
            assert outer.statistics.stages["cache_hit"].count == 1, "a step may answer otherwise now"
            assert repository.get("m").statistics.n_executions == 1

    asyncio.run(run())


def test_it_is_told_and_small_enough(tmp_path: Path) -> None:
    write_models(tmp_path, {"m": CACHED % "", "plain": identity("FP32", "1")})
    flags = OperationFlags(cache_config=("local,size=2k",), metrics_config=("summary_latencies=true",))
    with in_process(tmp_path, operations=flags) as served:
        for values in ([1], [1], [2], [2], [3], [4], [5], [1]):
            body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": values}]}
            answer = httpx.post(f"{served.url}/v2/models/m/infer", json=body).json()
            assert answer["outputs"][0]["data"] == values
        (stats,) = httpx.get(f"{served.url}/v2/models/m/stats").json()["model_stats"]
        found = {(one.name, one.labels.get("model", "")): one.value for one in series(served.url)}
    assert stats["inference_stats"]["cache_hit"]["count"] == 2, "three answers have room"
    assert stats["inference_stats"]["cache_miss"]["count"] == 6 == stats["inference_count"]
    assert found["nv_cache_num_hits_per_model", "m"] == 2 and found["nv_cache_num_misses_per_model", "m"] == 6
    assert found["nv_cache_hit_duration_per_model", "m"] == stats["inference_stats"]["cache_hit"]["ns"] // 1000
    assert found["nv_cache_hit_summary_us_count", "m"] == 2
    assert not any("cache" in name for name, model in found if model == "plain")
    assert found["millrace:response_cache_answers", ""] == 3
    assert 0 < found["millrace:response_cache_bytes", ""] <= found["millrace:response_cache_size_bytes", ""] == 2048


def test_what_is_not_used_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = "instance_group { count: 1 kind: KIND_CPU rate_limiter { resources { name: 'R' count: 1 } } }"
    write_models(tmp_path, {"m": CACHED % group, "plain": identity("FP32", "1")})

    async def run(common: RepositoryContext) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "millrace"):
            async with Loaded(tmp_path, common):
                return sorted(record.getMessage() for record in caplog.records)

    assert asyncio.run(run(RepositoryContext())) == [
        "m: rate_limiter is not used without --rate-limit execution_count",
        "m: response_cache is not used without --cache-config local,size=N",
    ]
    assert asyncio.run(run(RepositoryContext(cache=LocalResponseCache(1024), limiter=InstanceRateLimiter()))) == []


@pytest.mark.parametrize(
    "said",
    [("local",), ("redis,host=a",), ("local,size=0",), ("local,size=x",), ("local,length=1",), ("local,size=1",) * 2],
)
def test_a_mistake_in_the_flag_is_said(said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--cache-config"):
        RepositoryContext.from_flags(OperationFlags(cache_config=said))
