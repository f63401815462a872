"""What serving adds to steps: found again where it is known, and held to the published serving runs."""

from dataclasses import replace

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size.answer.sizing import instance_of
from millrace.size.fit.overhead import MeasuredRun, fit_stack, leave_one_out, replay, summarize_errors
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.models import PRESETS
from millrace.size.performance.serving_overhead import ENGINE, Stack
from tests.size.tables import needs_tables, served_runs

H100 = find_device("H100")
TRUTH = replace(ENGINE, name="as it was made", prefill=1.3, decode=1.2, cache=2.5, host_s=2e-5, step_tokens=4096)


def made() -> list[MeasuredRun]:
    found = []
    for name, tp in (("llama-3-8b", 1), ("llama-3-70b", 4)):
        for lengths in (Lengths(3000, 1), Lengths(6000, 300), Lengths(60, 60)):
            for n in (1, 64):
                run = MeasuredRun(instance_of(PRESETS[name], H100, "fp8", tp), lengths, n, 1.0)
                found.append(replace(run, rate=replay(run, TRUTH).point.rate))
    return found


def test_a_fit_finds_the_factors_that_made_its_runs() -> None:
    found = fit_stack(made(), replace(ENGINE, step_tokens=4096), rounds=4)
    assert found.factors == pytest.approx(TRUTH.factors, rel=0.02)
    assert found.host_s == pytest.approx(TRUTH.host_s, rel=0.1)


def test_a_run_is_worth_what_its_steps_are() -> None:
    """A request alone: its prompt, and a step for each token after the first, summed up by hand."""
    instance, stack = instance_of(PRESETS["llama-3-8b"], H100, "fp16", 1), replace(TRUTH, front_s=0.01)
    constants = profile(H100, "fp16").constants
    found = replay(MeasuredRun(instance, Lengths(500, 4), 1, 1.0), stack)
    steps = [constants.decode_s(instance, 1, 501 + i) for i in range(3)]
    cached = [constants.cached_s(instance, 1, 501 + i) for i in range(3)]
    ttft_s = 0.01 + 1.3 * constants.prefill_s(instance, [500])
    e2e_s = ttft_s + 1.2 * (sum(steps) - sum(cached)) + 2.5 * sum(cached) + 3 * 2e-5
    assert found.point.mean.ttft_s == pytest.approx(ttft_s)
    assert found.point.mean.e2e_s == pytest.approx(e2e_s)
    assert found.rate_error == pytest.approx(1 / e2e_s - 1)


@needs_tables
def test_the_serving_table_is_met_by_simulation() -> None:
    """Every fifteenth of NIM's runs that were in their steady state, TTFT with the scheduler that the stack names."""
    found = [replay(run, profile(run.instance.device, run.instance.precision).stack) for run in served_runs()[::15]]
    assert len(found) > 20
    held = summarize_errors("all", found)
    assert held.rate.median <= 0.14 and held.ttft.median <= 0.20 and held.itl.median <= 0.14, held
    eights = [one for one in found if one.run.instance.precision == "fp8" and one.run.concurrency >= 100]
    assert abs(np.mean([one.rate_error for one in eights])) < 0.14, "full instances in 8 bits were 60 % too fast"


@needs_tables
def test_a_gpu_that_was_left_out_is_served_as_the_other_would() -> None:
    """A100 by what was fitted to H100."""
    runs = [run for run in served_runs() if run.instance.device.name == "A100 SXM 80GB"][::12]
    held = summarize_errors("A100", [replay(run, profile(H100, "fp16").stack) for run in runs])
    assert held.rate.median <= 0.14 and held.ttft.median <= 0.20, held


def test_what_is_left_out_is_not_seen() -> None:
    """70B was served at half the speed: by a fit to 8B alone its rates are twice as high, and the other way round."""
    runs = [replace(run, rate=run.rate / (2 if run.instance.tp == 4 else 1)) for run in made()]
    small, large = leave_one_out(runs, TRUTH, lambda run: run.instance.model.name, rounds=2)[::-1]
    assert (small.what, large.what) == ("llama-3-8b", "llama-3-70b")
    assert large.rate.bias == pytest.approx(1.0, abs=0.1) and small.rate.bias == pytest.approx(-0.5, abs=0.1)


def test_two_runs_are_too_few() -> None:
    with pytest.raises(ConfigError, match="2 served runs"):
        fit_stack(made()[:2], ENGINE)


@pytest.mark.parametrize("wrong", [
    {"prefill": 0}, {"cache": float("nan")}, {"host_s": -1}, {"front_s": 11}, {"step_tokens": 0},
    {"sequences": 1 << 20},
])  # fmt: skip
def test_stacks_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="x: "):
        Stack(name="x", **wrong)  # type: ignore[arg-type]
