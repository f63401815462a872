"""What is told of the cost model beside published runs: the worst device, the worst part, errors by hand."""

from typing import Any

import numpy as np
import pytest

from benchmarks.sizing import goals, of_engines, summary
from millrace.machine.devices import find_device
from millrace.size.performance.fitted_devices import profile
from tests.size.tables import engine_steps, needs_tables


def engines(device: str, by_switch: bool, fitted: float, left_out: tuple[float, ...]) -> dict[str, Any]:
    return {
        "device": device, "precision": "fp8", "by_switch": by_switch, "fitted": [fitted, fitted / 2],
        "shipped": [0.1, 0.1], "held_model": [0.05, 0.1],
        "left_out": {str(i): [error, 2 * error] for i, error in enumerate(left_out)},
    }  # fmt: skip


def test_goals_are_of_the_worst_device_and_of_the_worst_part_left_out() -> None:
    """Cards on PCIe have a goal of their own, and no part in the others."""
    told = [engines("a", True, 0.04, (0.01, 0.03)), engines("b", True, 0.09, (0.08,)),
            engines("c", False, 0.2, (9.0,))]  # fmt: skip
    errors = {"median": 0.05, "mape": 0.06, "n": 3}
    served = {"of": "all", "what": "x", "rate": {**errors, "median": 0.15}, "ttft": errors, "itl": errors}
    found = goals(told, served)
    assert [one["reached"] for one in found] == [0.09, 0.08, 0.16, 0.2, 0.15, 0.05]
    assert [one["verdict"] for one in found] == ["goal met"] * 2 + ["missed", "missed", "missed", "goal met"]
    said = summary({"engines": told, "server": [served], "goals": found})
    assert "0 1.0% and 2.0%; 1 3.0% and 6.0%" in said and "requests/s: 15.0%, at most 14%: missed" in said


@needs_tables
@pytest.mark.parametrize("device, precision", [("H200 SXM", "fp8"), ("L40S", "fp8")])
def test_errors_of_the_product_are_those_by_hand(device: str, precision: str) -> None:
    steps = engine_steps()[device, precision]
    found, ours = of_engines(steps), profile(find_device(device), precision).constants
    errors = [
        (abs(ours.prefill_s(s.instance, [s.prompt] * s.n) / (s.prefill_s or 0) - 1),
         abs(ours.decode_s(s.instance, s.n, s.context) / (s.decode_s or 0) - 1))
        for s in steps
    ]  # fmt: skip
    assert found["shipped"] == pytest.approx(np.mean(errors, axis=0).tolist()) and found["n"] == len(steps)
    assert set(found["left_out"]) == {"llama-2-7b", "llama-2-70b", "mistral-7b"}
    assert found["by_switch"] == (device == "H200 SXM")
    assert min(*found["fitted"], *found["held_model"]) > 0.01, "measured, and no echo of itself"
