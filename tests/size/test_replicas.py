"""Replicas behind routers beside single ones, and traces as arrivals."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millrace.engine.executor import ExecutorLimits
from millrace.errors import ConfigError
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.load.trace_arrivals import Replay, arrivals
from millrace.size.simulation.replicas import Router, least_loaded, merge_routed, prefix_aware, random_router, simulate
from millrace.size.simulation.simulator import Simulation
from millrace.size.simulation.virtual_clock import Arrival
from millrace.tune.recorded_requests import read_recording
from tests.support.shared import shared

ROOMS = ExecutorLimits(
    max_step_tokens=512, max_sequences=16, max_rows=16, max_context=4096, page_tokens=16, n_pages=2000,
    vocab_size=1 << 15,
)  # fmt: skip


def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
    """1 ms a step, 20 us a prompt token, 0.1 ms a running answer."""
    return 1e-3 + 20e-6 * sum(prompts) + n * 1e-4


def replica(prefix_cache: bool = True) -> Simulation:
    return Simulation(ROOMS, seconds, TokenBudget.unhurried(512), prefix_cache, front_s=1e-3)


def drawn(n: int, rate: float, seed: int = 1, families: int = 0) -> list[Arrival]:
    """families: so many beginnings of 1,024 tokens that requests share"""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    blocks = [(family, family, 10**6 + i) for i, family in enumerate(rng.integers(0, families + 1, n).tolist())]
    return [Arrival(t, 1100, 20, b if families else ()) for t, b in zip(at_s, blocks, strict=True)]


@pytest.mark.parametrize("route", [random_router(), least_loaded, prefix_aware])
def test_one_replica_behind_a_router_is_that_replica(route: Router) -> None:
    coming = drawn(150, 30, families=4)
    (found,) = simulate([replica()], coming, route)
    assert found == replica().run(coming)


def test_replicas_do_not_know_of_each_other() -> None:
    """Requests by turns: two simulations of every second one, bit for bit."""
    coming = drawn(200, 60)
    found = simulate([replica(), replica()], coming, lambda one, _: coming.index(one) % 2)
    alone = [replica().run(coming[::2]), replica().run(coming[1::2])]
    assert [(one.requests, one.steps, one.prefix_hits) for one in found] == [
        (one.requests, one.steps, one.prefix_hits) for one in alone
    ]


@pytest.mark.parametrize("route", [random_router(), least_loaded, prefix_aware])
def test_all_is_answered_and_littles_law_holds(route: Router) -> None:
    found = simulate([replica() for _ in range(3)], drawn(300, 90, families=6), route)
    whole = merge_routed(found)
    assert len(whole.requests) == 300 == len(whole.values("e2e_s"))
    for one in (*found, whole):
        assert one.in_system_s == pytest.approx(one.values("e2e_s").sum(), rel=1e-9)
    assert [one.arrival.at_s for one in whole.requests] == sorted(one.arrival.at_s for one in whole.requests)


def test_what_a_router_knows_shortens_waits() -> None:
    """At 85 % of four replicas: fewest requests beats chance; with shared beginnings, knowing them beats both."""
    coming = drawn(500, 120, families=80)

    def of(route: Router, cached: bool) -> tuple[float, int]:
        found = merge_routed(simulate([replica(cached) for _ in range(4)], coming, route))
        return float(found.values("ttft_s", after_s=2.0).mean()), found.prefix_hits

    assert of(least_loaded, False)[0] < 0.8 * of(random_router(), False)[0]
    aware, least = of(prefix_aware, True), of(least_loaded, True)
    assert aware[1] > 1.3 * least[1] and aware[0] < 0.9 * least[0]


def test_a_crowd_is_spread_although_one_replica_knows_the_beginning() -> None:
    coming = [replace(one, at_s=0.0) for one in drawn(40, 1.0, families=1)]
    found = simulate([replica(), replica()], coming, prefix_aware)
    assert min(len(one.requests) for one in found) >= 10


@pytest.mark.parametrize("n", [0, 5000])
def test_numbers_of_replicas_are_checked(n: int) -> None:
    with pytest.raises(ConfigError, match=f"{n} replicas"):
        simulate([replica()] * n, [], least_loaded)


def test_a_trace_by_hand(tmp_path: Path) -> None:
    """In order after the jitter, from 0 on, faster by the speed, without what is too long or empty."""
    told: list[dict[str, object]] = [
        {"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 9000, "input_length": 10, "output_length": 0},
        {"timestamp": 12000, "input_length": 5000, "output_length": 9},
        {"timestamp": 15000, "input_length": 20, "output_length": 6, "hash_ids": [7]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    found, left_out = arrivals(read_recording(path), Replay(4096, speed=2.0))
    assert found == [Arrival(0.0, 600, 5, (7, 8)), Arrival(3.0, 20, 6, (7,))] and left_out == 2
    spread, _ = arrivals(read_recording(path), Replay(4096, jitter_s=3.0))
    assert 0 <= spread[0].at_s <= 3 and 6 <= spread[1].at_s <= 9 and spread[0].at_s not in (0, 3)
    with pytest.raises(ConfigError, match="no request of the trace fits"):
        arrivals(read_recording(path), Replay(8))


def test_a_published_trace_has_credit_for_its_beginnings() -> None:
    """Mooncake's first requests, jittered: hits of a cache that holds all are those counted from the ids alone."""
    found, _ = arrivals(
        read_recording(shared("data/traces/mooncake_conversation_trace.jsonl")), Replay(131072, jitter_s=3.0)
    )
    first = [replace(one, n_output=2) for one in found[:60]]
    seen: set[tuple[int, ...]] = set()
    expected = 0
    for one in first:
        whole = one.blocks[: (one.n_input - 1) // 512]
        expected += 512 * next((i for i in range(len(whole), 0, -1) if one.blocks[:i] in seen), 0)
        seen.update(one.blocks[: i + 1] for i in range(one.n_input // 512))
    rooms = replace(ROOMS, max_context=131072, n_pages=200_000, max_step_tokens=8192)
    quick = Simulation(rooms, lambda p, s, n, c: 1e-4, TokenBudget.unhurried(8192))
    assert quick.run(first).prefix_hits == pytest.approx(expected, rel=0.02) and expected > 30_000


@pytest.mark.parametrize("wrong", [{"speed": 0}, {"jitter_s": -1}, {"speed": float("nan")}, {"context": 1}])
def test_replays_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a replay"):
        Replay(**{"context": 4096, **wrong})  # type: ignore[arg-type]
