"""A fitted stack as a file: what is written is read, decides what is computed, and what is none is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size import plan
from millrace.size.fit.overhead_file import FittedStack, read_stack, write_stack
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.measured_points import read_points, write_points
from millrace.size.performance.operating_point import FigureSource, OperatingPoint, Waits
from millrace.size.performance.serving_overhead import ENGINE
from millrace.size.simulation import capacity

COMMON: dict[str, Any] = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "mode": "offline", "simulate": False,
                          "precision": "fp8", "rate": 100}  # fmt: skip
OWN = FittedStack("H100 SXM", "fp8", replace(ENGINE, name="ours", prefill=1.5, host_s=2e-5), 0.031)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_stack(tmp_path / "s.json", OWN)
    assert read_stack(tmp_path / "s.json") == OWN
    assert OWN.stack_for("H100 SXM", "fp8") is OWN.stack and OWN.stack_for("H100 SXM", "fp16") is None is OWN.stack_for(
        "L4", "fp8"
    )


def test_it_decides_what_is_computed(tmp_path: Path) -> None:
    """All that serving adds twice as long, host too: half of the requests of a stack with half of it."""
    usual = profile(find_device("H100"), "fp8").stack
    own = []
    for times in (1.0, 2.0):
        slower = replace(usual, prefill=usual.prefill * times, decode=usual.decode * times, cache=usual.cache * times,
                         host_s=usual.host_s * times)  # fmt: skip
        write_stack(tmp_path / "s.json", FittedStack("H100 SXM", "fp8", slower, 0.01))
        own.append(plan(**COMMON, stack=str(tmp_path / "s.json")).plan)
    assert own[0].point == plan(**COMMON).plan.point
    assert own[1].point.rate < 0.55 * own[0].point.rate and "(1.0% off on average)" in own[1].provenance
    with pytest.raises(ConfigError, match="is of H100 SXM"):
        plan(**{**COMMON, "hardware": "L4"}, stack=str(tmp_path / "s.json"))


def test_an_answer_is_of_that_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its precision, as nothing is known of it in another; its scheduler, where time goes, and what the fit leaves."""
    monkeypatch.setattr(capacity, "_LEAST", 100)
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)
    slow = replace(OWN.stack, prefill=20.0, step_tokens=4096, sequences=32)
    write_stack(tmp_path / "s.json", replace(OWN, stack=slow))
    asked: dict[str, Any] = {**COMMON, "precision": (), "isl": 500, "osl": 5, "stack": str(tmp_path / "s.json")}
    closed = plan(**asked)
    found = plan(**{**asked, "simulate": True}).plan
    assert {p.precision for p in closed.offers.points} == {"fp8"}, "in 16 bits another's software would be quicker"
    assert "16 bits alone" not in {change.what for change in closed.changes}
    assert found.binding == "prefill arithmetic" and found.shares["prefill arithmetic"] > 0.9
    for said in ("ours (3.1% off on average)", "Poisson arrivals", "at most 4096 tokens and 32 sequences"):
        assert said in found.provenance
    assert found.error == pytest.approx(0.101) and closed.plan.error == pytest.approx(0.131)
    with_two = plan(**{**asked, "hardware": ("H100", "L40S")})
    (other,) = (one.offers for one in with_two.alternatives if one.device == "L40S")
    assert {p.precision for p in other.points} == {"fp16", "fp8"}


@pytest.mark.parametrize("error", [0.9, 1.0, 5.0])
def test_a_fit_that_leaves_as_much_as_there_is_still_has_a_band(tmp_path: Path, error: float) -> None:
    """With what a closed form adds, 0.9 is all of a figure: then nothing is known below it but that one is needed."""
    write_stack(tmp_path / "s.json", replace(OWN, error=error))
    found = plan(**{**COMMON, "rate": 50_000}, stack=str(tmp_path / "s.json"))
    assert found.plan.error == pytest.approx(error + 0.1) and found.plan.low == 1 < found.plan.systems < found.plan.high
    assert found.money is not None and found.money.band is not None and found.money.cheapest is not None
    assert 0 < found.money.band[0] < found.money.cheapest < found.money.band[1]


@pytest.mark.parametrize("change, said", [
    ({"version": 2}, "no stack of version 1"), ({"stack": 5}, "no stack of version 1"), ({"error": -1}, "error is -1"),
    ({"device": 5}, "names are"), ({"stack": {**asdict(OWN.stack), "prefil": 1}}, 'did you mean "prefill"'),
    ({"stack": {**asdict(OWN.stack), "prefill": "x"}}, "prefill is 'x'"), ({"stack": {"name": "x"}}, "is None"),
    ({"stack": {**asdict(OWN.stack), "prefill": 0}}, "above 0"),
])  # fmt: skip
def test_what_is_no_stack_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    write_stack(tmp_path / "s.json", OWN)
    told = json.loads((tmp_path / "s.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps({**told, **change}))
    with pytest.raises(ConfigError) as found:
        read_stack(tmp_path / "s.json")
    assert said in str(found.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_stack(tmp_path / "none")
    (tmp_path / "x").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        read_stack(tmp_path / "x")


def test_points_are_written_as_they_are_read(tmp_path: Path) -> None:
    one = OperatingPoint(
        model="m", device="H100", precision="fp8", tp=2, input_tokens=2000, output_tokens=200, concurrency=25.0,
        rate=8.85, mean=Waits(0.4895, 0.011736, 2.825), p95=Waits(0.64, 0.013, 3.0), source=FigureSource.MEASURED,
    )  # fmt: skip
    write_points(tmp_path / "runs.csv", [one, replace(one, p95=None)])
    assert read_points(tmp_path / "runs.csv") == ([one, replace(one, p95=None)], 0)
