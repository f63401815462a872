"""What a server says of its own load, against the null server's queue, and against texts as servers write them."""

import asyncio
import time
from dataclasses import replace

import pytest

from millrace.bench.client.client import BenchTarget
from millrace.bench.client.endpoints import CHAT
from millrace.bench.null_server.ledger import Ledger, NullTiming
from millrace.bench.run import server_load as watching
from millrace.bench.run.plan import make_plan, measure
from millrace.bench.run.run import Run
from millrace.bench.run.server_load import NOTHING, Sample, ServerLoad, Watch, read_metrics, server_load
from millrace.bench.run.sweep import SweepLimits, limiting_factor
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from tests.bench.conftest import Null
from tests.bench.test_sweep import levels

TEXT = """# HELP vllm:num_requests_running Sequences that hold KV pages
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a",engine="0"} 3.0
vllm:num_requests_running{model_name="b",engine="0"} 5.0
vllm:num_requests_waiting{model_name="a",engine="0"} 2.0
vllm:num_requests_waiting{model_name="b",engine="0"} 0.0
vllm:kv_cache_usage_perc{model_name="a"} 0.25
vllm:kv_cache_usage_perc{model_name="b"} 0.5
vllm:num_preemptions_total{model_name="a"} 7.0
vllm:num_preemptions_created{model_name="a"} 1.7e+09
vllm:num_requests_running_more 9
"""


def test_the_figures_of_the_model_that_is_asked() -> None:
    assert read_metrics(TEXT, "a", 1.0) == Sample(1.0, 3, 2, 0.25, 7)
    assert read_metrics(TEXT, "b", 1.0) == Sample(1.0, 5, 0, 0.5, 7)
    assert read_metrics(TEXT, "alias", 1.0) == Sample(1.0, 8, 2, 0.5, 7), "one of another name: all of them"
    older = TEXT.replace("kv_cache", "gpu_cache").replace(" 0.25", " NaN")
    assert read_metrics(older, "b", 0.0) == Sample(0.0, 5, 0, 0.5, 7)
    bare = "vllm:num_requests_running 1\nvllm:num_requests_waiting 1e1\n"
    assert read_metrics(bare, "a", 0.0) == Sample(0.0, 1, 10)


@pytest.mark.parametrize("text", ["", "<html>", "vllm:num_requests_running 1", TEXT.replace("waiting", "swapped"),
                                  "vllm:num_requests_running x\nvllm:num_requests_waiting y"])  # fmt: skip
def test_pages_that_tell_nothing(text: str) -> None:
    assert read_metrics(text, "a", 0.0) is None


def test_means_and_the_most_of_a_run() -> None:
    samples = [Sample(0, 2, 0, 0.1, 5), Sample(1, 4, 6, 0.9, 8), Sample(2, 3, 0, None, None)]
    assert server_load(samples) == ServerLoad(3, 3, 4, 2, 6, 0.9, 3) and server_load([]) is None


@pytest.mark.parametrize(
    "kv, preemptions, waiting, says",
    [(0.95, 0, 3.0, "The KV cache limits it: "), (0.5, 2, 0.0, "The KV cache limits it: "),
     (0.5, 0, 3.0, "Requests wait for a place"), (None, None, 0.5, "Requests wait for a place"),
     (0.95, 0, 0.2, "Computing limits it"), (None, None, 0.0, "Computing limits it")],
)  # fmt: skip
def test_one_sentence_says_what_limits_it(kv: float | None, preemptions: int | None, waiting: float, says: str) -> None:
    said = ServerLoad(9, 4.5, 6, waiting, 7, kv, preemptions).description
    assert said.startswith(says) and f"4.5 requests ran in the mean, 6 at most, and {waiting:.1f} waited" in said
    assert ("95% full at most" in said) == (kv == 0.95) and ("does not tell" in said) == (kv is None)
    assert ("2 preemptions" in said) == (preemptions == 2)


def watched(url: str, concurrency: int, count: int) -> tuple[Run, ServerLoad | None]:
    load = LoadSettings(concurrency=concurrency, request_count=count)
    plan = make_plan(url, TargetSettings(), load, InputSettings(isl=30, osl=5), SessionSettings())

    async def run() -> tuple[Run, ServerLoad | None]:
        async with Watch(plan.target) as watch:
            done = await measure(plan)
        return done, watch.during(done)

    return asyncio.run(run())


def test_the_queue_of_a_server_is_seen(null: Null, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve at a time on four places: four run and eight wait, until the last twelve, whom nobody follows."""
    monkeypatch.setattr(watching, "EVERY_S", 0.02)
    url = null(NullTiming(ttft_ms="100", itl_ms="5", instances=4, kv_tokens=1000)).url
    for _ in range(3):  # where this machine has other things to do, some moments are not looked at
        run, found = watched(url, 12, 24)
        if found is not None and found.n_samples >= 15:
            break
    assert found is not None and run.ended == ""
    assert found.max_running == 4 and found.max_waiting == 8 and 3.2 < found.running <= 4
    assert found.waiting == pytest.approx((3 * 8 + 2 * 4 + 1 * 0 + 0) / 6, abs=1.5), "in steps of four"
    assert found.kv == pytest.approx(4 * 34 / 1000, abs=0.01) and found.preemptions is None
    assert found.description.startswith("Requests wait for a place")
    _, light = watched(url, 2, 4)
    assert light is not None and light.max_running == 2 and light.max_waiting == 0
    assert light.description.startswith("Computing limits it")


def test_a_server_without_metrics_tells_nothing(null: Null) -> None:
    _, found = watched(null(NullTiming(ttft_ms="5", itl_ms="1")).url, 2, 4)
    assert found is None

    async def gone() -> ServerLoad | None:
        async with Watch(BenchTarget("http://127.0.0.1:1", CHAT)) as watch:
            await asyncio.sleep(0.05)
        run = Run(None, None)  # type: ignore[arg-type]
        run.wall_s = 1e9
        return watch.during(run)

    assert asyncio.run(gone()) is None


def test_the_level_that_breaks_the_limit_is_told_of() -> None:
    points = levels(1, 64, SweepLimits(ttft_ms=10))
    assert limiting_factor(points) == NOTHING == limiting_factor([])
    told = [replace(p, server=ServerLoad(1, p.level, p.level, 0, 0, None, None)) for p in points]
    first = min(p.level for p in points if not p.meets)
    assert limiting_factor(told).startswith(
        f"At {first:g}: Computing limits it"
    ) and f"{first:.1f} requests ran" in limiting_factor(told)
    kept = levels(1, 64, SweepLimits())
    told = [replace(p, server=ServerLoad(1, p.level, p.level, 0, 0, None, None)) for p in kept]
    assert limiting_factor(told).startswith("At 64: "), "nothing broke: where most tokens/s were"


def test_the_null_servers_load_is_its_queue() -> None:
    ledger = Ledger(NullTiming(ttft_ms="1000", itl_ms="100", instances=2, kv_tokens=40))
    for _ in range(5):
        ledger.record_request("", "chat", 10, 3)
    now_s = ledger.truth[0].arrived_s
    assert time.perf_counter() - now_s < 0.5
    assert ledger.load(now_s + 0.6) == (2, 3, 20 / 40) and ledger.load(now_s + 1.15) == (2, 3, 24 / 40)
    assert ledger.load(now_s + 1.8) == (2, 1, 20 / 40) and ledger.load(now_s + 3.0) == (1, 0, 10 / 40)
    assert ledger.load(now_s + 9) == (0, 0, 0)
