"""Layers in stages one after another (PP): times by a pipeline that is gone through, memory by addition."""

from dataclasses import replace
from itertools import pairwise

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import GB, find_device
from millrace.size import plan
from millrace.size.answer.sizing import PPS, instance_of
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.closed_form import estimate_point, kv_capacity, shares
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import Limits
from millrace.size.performance.roofline_cost import Constants, ModelInstance
from millrace.size.performance.serving_overhead import ENGINE, Stack
from millrace.size.performance.step_time import hop_rate, least_time, step_time
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.serving_model import make_serving

H100, L40S = find_device("H100"), find_device("L40S")
SEVENTY = PRESETS["llama-3-70b"]
STEPS = (
    ((2000.0,), (0.0,), 0, 0.0),
    ((), (), 64, 2100.0),
    ((512.0, 3000.0), (0.0, 1000.0), 31, 900.0),
    ((), (), 1, 9.0),
)
STACK = Stack(name="slower", prefill=1.2, decode=1.1, cache=1.5, host_s=1e-5)


def pipelined(stages_s: list[float], hop_s: float, parts: int) -> float:
    """Each stage has one part at a time, and keeps it until it was sent."""
    free = [0.0] * len(stages_s)
    for _ in range(parts):
        ready = 0.0
        for i, took_s in enumerate(stages_s):
            sent_s = hop_s if i < len(stages_s) - 1 else 0.0
            free[i] = ready = max(ready, free[i]) + took_s + sent_s
    return free[-1]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("pp", [2, 4, 16])
def test_a_step_is_a_pipeline(step: tuple[tuple[float, ...], tuple[float, ...], int, float], pp: int) -> None:
    """Cut as is best; the host has each sequence once."""
    prompts, starts, n, context = step
    whole = instance_of(SEVENTY, H100, "fp8", 2, pp)
    known = profile(H100, "fp8").constants
    *device, host_s = known.decode
    without, engine = Constants(known.prefill, (*device, 0.0)), replace(STACK, host_s=0.0)
    layers = replace(SEVENTY, n_layers=80 // pp, tied=True)
    body, last = (instance_of(model, H100, "fp8", 2) for model in (replace(layers, vocab=1), layers))
    tokens = sum(prompts) + n
    times = []
    for parts in (1, 2, 4, 8, 16, 32):
        if parts <= tokens:
            hop_s = 10e-6 + tokens / parts * SEVENTY.hidden * 2 / hop_rate(whole)
            stages = [_part(one, without, engine, step, parts) for one in (*[body] * (pp - 1), last)]
            times.append(pipelined(stages, hop_s, parts))
    host = (STACK.decode * host_s + STACK.host_s) * n
    assert step_time(whole, known, STACK)(prompts, starts, n, context) == pytest.approx(min(times) + host)
    assert least_time(whole, known, STACK)(prompts, starts, n, context) <= min(times) + host


def _part(
    one: ModelInstance,
    constants: Constants,
    stack: Stack,
    step: tuple[tuple[float, ...], tuple[float, ...], int, float],
    parts: int,
) -> float:
    prompts, starts, n, context = step
    cached_s = constants.cached_s(one, n / parts, context) if n else 0.0
    rest_s = constants.decode_s(one, n / parts, 0.0) if n else 0.0
    chunks_s = constants.chunks_s(one, prompts, starts, n > 0, parts) if prompts else 0.0
    return stack.prefill * chunks_s + stack.decode * rest_s + stack.cache * cached_s


def test_a_bubble_is_what_the_literature_says() -> None:
    """GPipe: of equal stages and no fixed times, m / (m + p - 1) of the time is work."""
    layers = replace(PRESETS["llama-2-70b"], vocab=1)
    ideal = Constants((1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    device = replace(H100, link_rate=1e18, bandwidth=1e18)
    for pp in (2, 4, 8):
        alone = step_time(instance_of(layers, device, "fp16", 1), ideal)((8192.0,), (0.0,), 0, 0.0)
        took = step_time(instance_of(layers, device, "fp16", 1, pp), ideal)((8192.0,), (0.0,), 0, 0.0)
        assert alone / (pp * took) == pytest.approx(32 / (32 + pp - 1), rel=5e-3), "hops are 10 us each"


def test_one_stage_is_none() -> None:
    one = instance_of(SEVENTY, H100, "fp8", 4)
    assert one.stage is one and instance_of(SEVENTY, H100, "fp8", 4, 1) == one
    known = profile(H100, "fp8").constants
    for prompts, starts, n, context in STEPS:
        assert least_time(one, known)(prompts, starts, n, context) == step_time(one, known)(prompts, starts, n, context)


def test_memory_of_stages_is_that_of_the_fullest() -> None:
    """812 GB of 405B do not fit into 8 x 80 GB; of two stages each has half of the layers, and one of two tables."""
    large = PRESETS["llama-3.1-405b"]
    with pytest.raises(ConfigError, match=r"812 GB[^|]*--pp 2: layers in stages"):
        kv_capacity(instance_of(large, H100, "fp16", 8))
    layers = 63 * (2 * large.hidden * large.head_dim * (128 + 8) + 3 * large.hidden * large.ffn)
    left = 8 * (0.9 * 80 - 3) * GB - 2 * layers - 2 * large.hidden * large.vocab
    assert kv_capacity(instance_of(large, H100, "fp16", 8, 2)) == pytest.approx(left / (2 * 63 * 8 * 128 * 2))
    uneven = replace(large, n_layers=127)  # the fuller stage has 64
    assert kv_capacity(instance_of(uneven, H100, "fp16", 8, 2)) < left / (2 * 64 * 8 * 128 * 2)


def test_more_stages_hold_more() -> None:
    rooms = [kv_capacity(instance_of(SEVENTY, L40S, "fp8", 4, pp)) for pp in PPS]
    assert all(more > 1.9 * fewer for fewer, more in pairwise(rooms))


@pytest.mark.parametrize("name, tp, pp, gb", [
    ("H100", 1, 2, 450), ("H100", 8, 2, 50), ("L40S", 1, 2, 32), ("L40S", 4, 4, 32), ("H100 NVL", 1, 2, 300),
    ("H100 NVL", 2, 2, 32),
])  # fmt: skip
def test_a_hop_is_over_the_slowest_link(name: str, tp: int, pp: int, gb: float) -> None:
    """One way: NVLink, PCIe 4.0, a bridge of two, and 400 Gbit/s between systems."""
    assert hop_rate(instance_of(SEVENTY, find_device(name), "fp16", tp, pp)) == gb * GB


def test_stages_spare_pcie_what_shared_layers_cost() -> None:
    """On cards that share no fast link, prompts of 70B go through stages quicker than through shared layers."""
    known = profile(L40S, "fp8")
    rates = {(tp, pp): estimate_point(instance_of(SEVENTY, L40S, "fp8", tp, pp), known, (3500, 100), 128).rate
             for tp, pp in ((4, 1), (2, 2), (1, 4))}  # fmt: skip
    assert min(rates[1, 4], rates[2, 2]) > 1.15 * rates[4, 1]
    one = instance_of(SEVENTY, L40S, "fp8", 1, 4)
    told = shares(one, known, estimate_point(one, known, (3500, 100), 128))
    assert sum(told.values()) == pytest.approx(1) and 0 < told["bubbles and links of stages"] < 0.7


def test_nothing_is_simulated_faster_than_bounded() -> None:
    """Branch and bound leaves out what could not be best: so no schedule may exceed the bound."""
    one = Replica(
        make_serving(instance_of(SEVENTY, L40S, "fp8", 1, 4), profile(L40S, "fp8"), Lengths(1500, 20), ENGINE)
    )
    assert one.run_closed(64).rate < one.bound(Limits())


def test_an_instance_over_two_systems() -> None:
    found = plan(model="llama-3.1-405b", isl=2000, osl=200, rate=4, mode="offline", precision=["fp16"], pp=2, spare=1,
                 simulate=False)  # fmt: skip
    assert found.plan.point.configuration == "fp16 TP8 PP2 on H100 SXM" and found.instances == 2
    assert 2 < found.plan.fractional < 4 and found.plan.systems == 5, "two for each instance, and one to spare"
    assert "2 stages by their bubbles and links, not measured" in found.plan.provenance and found.plan.error >= 0.25
    assert found.memory is not None and found.memory.total == 16 * 80 * GB and found.memory.kv_in_use > 0
    assert all(change.systems is None or (change.systems - 1) % 2 == 0 for change in found.changes) and found.changes
    assert {step.why: step.systems for step in found.waterfall}["whole systems"] == 4
    steps = [step.systems for step in found.waterfall]
    assert steps == sorted(steps) and steps[-1] == 5


def test_systems_that_are_there_serve_whole_instances() -> None:
    asked = {"model": "llama-3.1-405b", "isl": 2000, "osl": 200, "mode": "offline", "precision": ["fp16"], "pp": 2,
             "simulate": False}  # fmt: skip
    two, three = (plan(**asked, systems=n).consequences.rate for n in ("2", "3"))
    assert two == pytest.approx(three) and plan(**asked, systems="4").consequences.rate == pytest.approx(2 * two)
    beside = plan(**asked, systems="3", rate=2 * two)
    assert beside.plan.systems == 2 and beside.existing[0].rate == pytest.approx(two)
    with pytest.raises(ConfigError, match=r"an instance \(fp16 TP8 PP2 on H100 SXM\) takes 2 systems"):
        plan(**asked, systems="1")


def test_stages_are_told_where_layers_are_shared_over_pcie() -> None:
    asked = {"model": "llama-3-70b", "isl": 2000, "osl": 50, "rate": 20, "mode": "offline", "simulate": False}
    told = {change.what: change.fractional for change in plan(**asked, hardware=["L40S"]).changes}
    other = plan(**asked, hardware=["L40S"], pp=4)
    assert told["layers in 4 stages (--pp 4)"] == pytest.approx(other.plan.fractional)
    assert not [change for change in plan(**asked).changes if "stages" in change.what], "NVLink"


@pytest.mark.parametrize("more, said", [
    ({"pp": 3}, "--pp 3[^|]*1, 2, 4, 8, 16"), ({"pp": 2, "hardware": ["this"]}, "--pp with --hardware this"),
    ({"pp": 2, "hardware": ["H100 3g"]}, "--pp 2 on H100 SXM 3g, which is linked to no other"),
    ({"pp": 2, "measured": "runs.csv"}, "--pp 2 with --measured"), ({"pp": 17}, "--pp is 17"),
    ({"pp": 2, "profile": "p.json", "hardware": ["this"]}, "--pp 2 with --profile"),
    ({"pp": 2, "system_size": 3, "tp": 2}, "does not fit on"),
])  # fmt: skip
def test_stages_that_are_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(model="llama-3-8b", isl=100, osl=10, rate=1, mode="offline", simulate=False, **more)
