"""Every device that was asked for, as each would be by itself, and which one is taken."""

from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.size import plan
from millrace.size.answer import alternatives
from millrace.size.answer import answer as answer_module
from millrace.size.performance.operating_point import FigureSource
from millrace.size.simulation import capacity


def test_all_gpus_of_the_catalogue_the_cheapest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that fit, as each would be by itself; the cheapest are simulated, and one of them is the answer."""
    asked: dict[str, Any] = {"model": "llama-3-8b", "isl": 300, "osl": 6, "rate": 50, "ttft_ms": 200}
    closed = plan(**asked, hardware=["all"], simulate=False)
    names = [one.device for one in closed.alternatives]
    assert {"T4", "L4", "H100 SXM", "MI300X", "B200"} <= set(names) and len(names) == len(set(names)) > 15
    assert not {"EPYC 9654", "Grace"} & set(names)
    costs = [one.money.cheapest for one in closed.alternatives if one.plan and one.money and one.money.cheapest]
    assert costs == sorted(costs) and len(costs) > 5
    for name in ("L4", "H200 SXM"):
        (beside,) = (one.plan for one in closed.alternatives if one.device == name)
        alone = plan(**asked, hardware=[name], simulate=False).plan
        assert beside is not None and (beside.fractional, beside.point) == (alone.fractional, alone.point)
    monkeypatch.setattr(capacity, "_LEAST", 100)
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)
    monkeypatch.setattr(alternatives, "_MAX_SIMULATED", 1)
    monkeypatch.setattr(answer_module, "sensitivities", lambda *_: ())  # not looked at here
    found = plan(**asked, hardware=["all"])
    first, *rest = found.alternatives
    assert first.plan is found.plan and found.plan.point.source == FigureSource.SIMULATED
    assert first.device == names[0] and [one.device for one in rest] == names[1:]
    assert {one.plan.point.source for one in rest if one.plan} == {FigureSource.ANALYTIC}
    with pytest.raises(ConfigError, match="all beside H100"):
        plan(**asked, hardware=["all", "H100"])
