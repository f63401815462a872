"""Times of steps fitted to steps that a known law made, and what a server's list is refused for."""

import json
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError, MachineError
from millrace.runtime.scheduling.step_cost_model import StepCost
from millrace.size.fit.steps import StepRow, errors, fit_steps, pace, read_steps, spread

LAW = StepCost(
    ((1, 3e-3), (2, 3.2e-3), (4, 5e-3), (8, 9e-3), (16, 14e-3), (128, 0.1)), 8e-4, 8e-7, 2.4e-6, 5e-4, 1.3e-4
)  # fmt: skip


def rows(n: int, seed: int, noise: float = 0.0, law: StepCost = LAW) -> list[StepRow]:
    """Prompts alone, answers alone, and both, as a server has them; some are much too long."""
    rng, found = np.random.default_rng(seed), []
    for i in range(n):
        kind = i % 3
        prompts = [(int(rng.integers(0, 200)), int(rng.integers(2, 128 if kind == 0 else 8)))] if kind < 2 else []
        n_rows = int(rng.integers(1, 9)) if kind else 0
        step = StepRow(i + 1, 0.0, 0.0, None, prompts, n_rows, n_rows * int(rng.integers(20, 400)))
        took_s = step.predicted_s(law.timed()) * float(np.exp(noise * rng.standard_normal()))
        took_s *= 9.0 if noise and rng.random() < 0.02 else 1.0
        turn_s = took_s + law.between(len(prompts) + n_rows)
        found.append(StepRow(i + 1, 0.0, took_s, turn_s, prompts, n_rows, step.contexts))
    return found


def test_a_law_is_found_again() -> None:
    """To 3 %, of other steps than it was fitted to: pieces of the law end where those of the fit do not."""
    found = fit_steps(rows(1500, 1))
    assert np.quantile(np.abs(errors(found, rows(500, 2))), 0.9) < 0.03
    assert found.host == pytest.approx(LAW.host, rel=1e-6)
    assert found.host_sequence == pytest.approx(LAW.host_sequence, rel=1e-6)
    alone = [StepRow(1, 0.0, LAW.seconds([512], [0], 0, 0), None, [(0, 512)], 0, 0)]
    assert abs(errors(found, alone)[0]) < 0.15, "four times as long as any that was seen"


def test_what_is_usual_is_not_moved_by_what_is_not() -> None:
    """8 % of noise, and each fiftieth step nine times as long: the usual is found to 3 %, the spread has the rest."""
    some = rows(3000, 3, noise=0.08)
    found = fit_steps(some)
    exact = np.array([s.predicted_s(found.timed()) / s.predicted_s(LAW.timed()) for s in rows(500, 4)])
    assert abs(np.median(exact) - 1) < 0.02 and np.quantile(np.abs(exact - 1), 0.9) < 0.05
    drawn = spread(found, some)
    assert list(drawn) == sorted(drawn) and np.median(drawn) == pytest.approx(1, abs=0.01)
    assert np.mean(drawn) == pytest.approx(np.exp(0.08**2 / 2) * (0.98 + 0.02 * 9), rel=0.08)
    assert pace(found, some) == pytest.approx(1, abs=0.02)
    assert pace(found, rows(300, 5, law=LAW.scaled(1.3))) == pytest.approx(1.3, rel=0.03)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="49 steps"):
        fit_steps(rows(49, 1))
    fit_steps(rows(50, 1))


def told() -> dict[str, Any]:
    schedule = {
        "max_step_tokens": 512, "max_sequences": 16, "max_rows": 48, "max_context": 2048, "page_tokens": 64,
        "pages": 512, "gap_limit_s": 0.1, "stretch": 1.9, "chunk_low": 4,
    }  # fmt: skip
    step = {"step": 1, "at_s": 1.0, "took_s": 0.1, "turn_s": None, "waiting": 0, "prompts": [[0, 8]], "rows": 1,
            "contexts": 9}  # fmt: skip
    one = {"model": "m", "engine": "e", "isa": "avx2", "machine": "here", "schedule": schedule, "steps": [step]}
    return {"data": [one], "object": "list"}


def test_a_server_says_what_it_ran() -> None:
    found = read_steps(json.dumps(told()))
    assert found.steps[0].n_tokens == 9 and found.schedule.chunk_low == 4 and found.engine == "e"
    assert read_steps(json.dumps(told()), "m") == found
    with pytest.raises(ConfigError, match="the server has m"):
        read_steps(json.dumps(told()), "other")
    two = told()
    two["data"] *= 2
    with pytest.raises(ConfigError, match="the server has m, m"):
        read_steps(json.dumps(two))


@pytest.mark.parametrize(
    "name, value", [("took_s", -1), ("took_s", 1e300), ("step", 0), ("rows", -1), ("contexts", 1 << 50), ("rows", "x")]
)
def test_steps_that_nobody_ran_are_refused(name: str, value: Any) -> None:
    wrong = told()
    wrong["data"][0]["steps"][0][name] = value
    with pytest.raises(MachineError):
        read_steps(json.dumps(wrong))


@pytest.mark.parametrize("text", ["", "{}", "[]", "<html>", '{"data": 3}'])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(MachineError, match=r"timeline\.json"):
        read_steps(text)
