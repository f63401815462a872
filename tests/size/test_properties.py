"""What holds of every question, on drawn ones: seeds are fixed, so that each failure is found again."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import DEVICES, GB, Device, find_device
from millrace.size.answer.sizing import Fleet, SizingPlan, instance_of
from millrace.size.answer.sizing import plan as planned
from millrace.size.fit.user_runs import UserRun, check_possible
from millrace.size.load.load_forecast import forecast_demand
from millrace.size.load.token_lengths import Lengths, parse_length
from millrace.size.performance.closed_form import estimate_point, kv_capacity, memory
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import Limits, OperatingPoint
from millrace.size.performance.roofline_cost import WEIGHT_BYTES, ModelInstance, decode_terms, prefill_terms
from millrace.size.performance.serving_overhead import Stack
from millrace.size.performance.step_time import least_time, step_time
from millrace.size.question.settings import DemandSettings
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.serving_model import make_serving
from tests.size.offered import analytic_points

SEEDS = range(10)
GPUS = [one for one in DEVICES if "fp16" in one.peaks]
SMALL = Stack(
    name="small", prefill=1.1, decode=1.1, cache=1.5, host_s=1e-5, front_s=1e-3, step_tokens=2048, sequences=8
)


def drawn_instance(rng: Random) -> ModelInstance:
    """Whose weights fit."""
    while True:
        device = rng.choice(GPUS)
        precision = rng.choice([name for name in ("fp16", "fp8", "int4") if name in device.peaks or name == "int4"])
        made = instance_of(rng.choice([*PRESETS.values()]), device, precision, rng.choice((1, 2, 4, 8)),
                           rng.choice((1, 1, 2, 4)))  # fmt: skip
        try:
            if kv_capacity(made) > 64:
                return made
        except ConfigError:
            continue


def drawn_points(rng: Random) -> list[OperatingPoint]:
    while True:
        shape, device = rng.choice([*PRESETS]), rng.choice(GPUS)
        lengths = float(rng.randint(1, 1500)), float(rng.randint(1, 400))
        try:
            return analytic_points(shape, [device.name], rng.choice(([], ["fp16"])), lengths)
        except ConfigError:
            continue


def drawn_limits(rng: Random, points: list[OperatingPoint]) -> Limits:
    """That something keeps."""
    waits = rng.choice(points).mean

    def above(seconds: float) -> float | None:
        return rng.choice((None, seconds * rng.uniform(1, 3) + 1e-6))

    return Limits(above(waits.ttft_s), above(waits.itl_s), above(waits.e2e_s))


def at_load(points: list[OperatingPoint], made: SizingPlan, systems: int) -> OperatingPoint:
    """What users feel where so many systems share the load: the least point of that configuration that bears it."""
    each = made.rate / (systems * made.point.system / made.point.devices)
    alike = [p for p in points if p.configuration == made.point.configuration and p.rate >= each * (1 - 1e-9)]
    return min(alike, key=lambda p: p.concurrency)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_load_more_systems_looser_limits_fewer(seed: int) -> None:
    rng = Random(seed)
    points = drawn_points(rng)
    limits, rate = drawn_limits(rng, points), 10 ** rng.uniform(-2, 4)
    made = [planned(rate * times, points, limits, Fleet(0.8, 1)) for times in (1, 1.01, 2, 10)]
    assert all(a.systems <= b.systems and a.fractional < b.fractional for a, b in pairwise(made))
    fewer = [planned(rate, points, some, Fleet())
             for some in (limits, limits.scale(1.01), limits.scale(2), limits.scale(10), Limits())]  # fmt: skip
    assert all(a.systems >= b.systems and a.fractional >= b.fractional for a, b in pairwise(fewer))
    assert all(one.low <= one.systems <= one.high for one in (*made, *fewer))


@pytest.mark.parametrize("seed", range(16))
def test_more_systems_never_wait_longer(seed: int) -> None:
    rng = Random(seed)
    points = drawn_points(rng)
    made = planned(10 ** rng.uniform(0, 4), points, drawn_limits(rng, points), Fleet())
    felt = [at_load(points, made, made.systems + more).mean for more in (0, 1, 2, 5, 50, 5000)]
    for one, other in pairwise(felt):
        assert other.e2e_s <= one.e2e_s * (1 + 1e-9) and other.ttft_s <= one.ttft_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_less_load_waits_less_where_it_is_simulated(seed: int) -> None:
    rng = Random(seed)
    device = find_device(rng.choice(("A100", "H100", "L40S")))
    instance = instance_of(PRESETS["llama-3-8b"], device, "fp16", 1)
    lengths = Lengths(rng.randint(50, 1500), rng.randint(2, 20))
    one = Replica(make_serving(instance, profile(device, "fp16"), lengths, SMALL))
    waits = [one.at(one.full.rate * share, seed) for share in (0.9, 0.6, 0.3, 0.05)]
    for more, less in pairwise(waits):
        assert more is not None and less is not None and more.p95 is not None and less.p95 is not None
        assert less.mean.e2e_s < more.mean.e2e_s and less.p95.ttft_s <= more.p95.ttft_s


@pytest.mark.parametrize("seed", range(16))
def test_a_longer_context_never_takes_less(seed: int) -> None:
    """Memory, time and room; also in stages, with windows and experts."""
    rng = Random(seed)
    one = drawn_instance(rng)
    known = profile(one.device, one.precision)
    most = min(one.model.max_context, int(kv_capacity(one)) - 1)
    lengths = sorted(rng.sample(range(2, most), 4)) if most > 8 else [2, 3]
    held, rates, times = [], [], []
    for n_in in lengths:
        point = estimate_point(one, known, (n_in, 1.0), 8)
        made = memory(one, point)
        assert made.total >= made.kept_back + made.weights * (1 - 1e-9) and made.kv_in_use >= 0 and made.free >= -1e-3
        held.append(made.kv_in_use)
        rates.append(point.rate)
        times.append(step_time(one, known.constants)((), (), 8, n_in))
    assert held == sorted(held) and times == sorted(times)
    assert all(less <= more * (1 + 1e-9) for more, less in pairwise(rates))


@pytest.mark.parametrize("seed", range(16))
def test_no_step_is_quicker_than_the_least(seed: int) -> None:
    """On which the search's bounds rest; and more work never takes less."""
    rng = Random(seed)
    one = drawn_instance(rng)
    constants = profile(one.device, one.precision).constants
    takes, least = step_time(one, constants, SMALL), least_time(one, constants, SMALL)
    prompts = [float(rng.randint(1, 3000)) for _ in range(rng.randint(0, 3))]
    starts, n, context = [float(rng.randint(0, 999)) for _ in prompts], rng.randint(0, 300), rng.uniform(1, 5000)
    seconds = takes(prompts, starts, n, context)
    assert least(prompts, starts, n, context) <= seconds * (1 + 1e-9)
    assert seconds <= takes([*prompts, 64.0], [*starts, 0.0], n, context) * (1 + 1e-9)
    if n:  # the first running answer starts a step for the prompts, whose own start may take a little longer
        assert seconds <= takes(prompts, starts, n + 1, context) * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_users_make_no_lower_peak(seed: int) -> None:
    rng = Random(seed)
    asked = DemandSettings(
        users=10 ** rng.uniform(1, 8), hours=rng.choice((None, 8.0)), burst=rng.choice((1.0, 7.0)),
        window_s=rng.choice((1.0, 30.0)), split=rng.choice((1, 8)), percentile=rng.choice((50.0, 95.0, 99.9)),
    )  # fmt: skip
    assert asked.users is not None
    peaks = [forecast_demand(replace(asked, users=asked.users * times)).peak for times in (1, 1.1, 3, 30)]
    assert peaks == sorted(peaks)
    stricter = [forecast_demand(replace(asked, percentile=percent)).peak for percent in (50.0, 95.0, 99.9)]
    assert stricter == sorted(stricter)
    found = forecast_demand(asked)
    assert found.busy is not None and found.average is not None
    assert found.average <= found.busy * (1 + 1e-9) <= found.peak * (1 + 1e-6)
    assert sum(found.hours) / 24 == pytest.approx(found.average)


@pytest.mark.parametrize("device", GPUS, ids=lambda one: one.name)
def test_units_of_the_catalogue(device: Device) -> None:
    """GB are 10^9: GiB would be a number of whole GB 7 % above. Peaks are dense: half the bits, at most twice as many
    (four times on cards that accumulate 16 bits at half the rate), and never what sparse weights are quoted with."""
    assert device.memory_bytes / GB == int(device.memory_bytes / GB) and device.memory_bytes < 300 * GB
    peaks = device.peaks
    assert 1 <= peaks.get("fp8", 2 * peaks["fp16"]) / peaks["fp16"] <= 2.05
    assert 1.9 <= peaks.get("fp4", 2 * peaks.get("fp8", 1.0)) / peaks.get("fp8", 1.0) <= 2.05
    assert 1 <= peaks.get("int8", 2 * peaks["fp16"]) / peaks["fp16"] <= 4
    a_watt = peaks["fp16"] / device.watts / 1e12  # dense figures of all: 0.2 to 3 of 10^12
    assert 0.2 < a_watt < 3 and 100e9 < device.bandwidth < 10e12


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_of_sparse_peaks_or_of_a_server_are_refused(seed: int) -> None:
    """A run at all of what is possible is taken; at twice its arithmetic, or eight times its rate, it is not."""
    rng = Random(seed)
    one = replace(drawn_instance(rng), pp=1)
    n_in, n_out = float(rng.randint(500, 4000)), float(rng.randint(2, 50))
    most = 0.99 / prefill_terms(one, [n_in + n_out]).arithmetic_s
    itl_s = 1.01 * decode_terms(one, 1, n_in)[0]
    e2e_s = 1.0 + itl_s * (n_out - 1)
    check_possible(UserRun(n_in, n_out, most, 1.0, e2e_s, "a run"), one)
    for rate, faster, said in ((2 * most, 1.0, "MFU"), (8 * most, 1.0, "MFU"), (most, 0.5, "MBU")):
        with pytest.raises(ConfigError, match=said):
            check_possible(UserRun(n_in, n_out, rate, 1.0, 1.0 + faster * itl_s * (n_out - 1), "a run"), one)


@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_never_taken_for_tokens(seed: int) -> None:
    rng = Random(seed)
    n, share = rng.randint(10, 10**6), rng.uniform(0.1, 0.95)
    words, tokens = parse_length(f"{n} words", "input", share)[0], parse_length(f"{n:,} tokens", "input", share)[0]
    assert words == pytest.approx(n / share) and tokens == n and parse_length(f"{n} characters", "input", 0.75)[0] < n
    with pytest.raises(ConfigError, match="of what"):
        parse_length(str(n), "input", share)


def test_weights_of_half_the_bits_take_half() -> None:
    assert {name: WEIGHT_BYTES[name] for name in ("fp16", "fp8", "fp4")} == {"fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
