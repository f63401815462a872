"""The page of an answer: every part of it, drawings that hold their data, and nothing from elsewhere."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from millrace.size import plan
from millrace.size.answer.answer import SizingAnswer
from millrace.size.load.load_forecast import forecast_demand
from millrace.size.question.settings import DemandSettings
from millrace.size.report.answer_json import headline
from millrace.size.report.answer_tables import tables
from millrace.size.report.page import arrivals_plot, hours_plot, size_page, ttft_plot, why_plot

COMMON: dict[str, Any] = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "ttft_ms": 500, "simulate": False}


def bars(svg: str) -> list[tuple[str, float]]:
    """Of each rectangle that says something: what, and its height in the drawing."""
    tree = ET.fromstring(svg)
    found = [(rect.findtext("title") or "", float(rect.attrib["height"])) for rect in tree.iter("rect")]
    return [(says, height) for says, height in found if says]


@pytest.fixture(scope="module")
def day() -> SizingAnswer:
    return plan(**COMMON, average=100, hours=8, burst=2, spare=1)


def test_a_page_has_every_part_and_needs_nothing(day: SizingAnswer) -> None:
    page = size_page(day)
    text = unescape(re.sub(r"<[^>]*>", " ", page))
    for said in (
        "Throughput against latency", "Time to the first token against load", "Arrivals", "Why ", "Costs",
        "Hours of a day", "What would change it", "latency-optimal", "throughput-optimal", day.plan.provenance,
        headline(day), "95 % stay within", *(step.why for step in day.waterfall),
    ):  # fmt: skip
        assert said in text, said
    for part in tables(day):
        for words in (part.name, part.more, *part.header, *(cell for row in part.rows for cell in row), *part.notes):
            assert words in text, f"all of what a screen has: {words}"
    assert not re.search(r'(src|href)="', page) and "<script" not in page and page.count('<svg viewBox="0 0 1080') == 6


def test_waits_of_a_load_stand_beside_those_of_full_systems() -> None:
    """5 requests/s on a system for 112: nobody waits the 17 s that it could come to."""
    found = plan(**COMMON, rate=5)
    (waits,) = (part for part in tables(found) if part.key == "waits")
    load = found.operating.mean
    assert load.e2e_s < 2 < 10 < found.plan.point.mean.e2e_s and "as busy as they may be" in waits.more
    assert waits.notes[-1].endswith(f"E2E {load.e2e_s * 1e3:,.1f} ms") and "at this load" in waits.notes[-1]
    (waits,) = (part for part in tables(plan(**COMMON, systems="1")) if part.key == "waits")
    assert not waits.notes, "what they serve is the load"


def test_devices_that_are_hardly_used_can_be_told_apart() -> None:
    """0.1 requests/s on machines for 100 and more: 0.00 of each says nothing."""
    found = plan(**COMMON, rate=0.1, hardware=["H100", "H200", "L40S"])
    (devices,) = (part for part in tables(found) if part.key == "devices")
    told = [float(row[1]) for row in devices.rows]
    plans = [one.plan.fractional for one in found.alternatives if one.plan]
    assert len(set(told)) == 3 and told == pytest.approx(plans, rel=0.05)


def test_a_page_of_stages_has_parts_that_a_plain_one_has_not() -> None:
    """Stages of an instance, memory, devices beside each other, those that do not do, what rows were left out."""
    found = plan(**{**COMMON, "model": "llama-3.1-405b", "ttft_ms": 5000}, rate=1, pp=2, hardware=["H100", "T4"])
    text = unescape(re.sub(r"<[^>]*>", " ", size_page(found)))
    assert f"{found.instances} x {found.plan.point.parallel}" in text and "PP2" in found.plan.point.parallel
    assert {"memory", "devices", "follows", "waits"} <= {part.key for part in tables(found)}
    for said in ("Memory of an instance", "weights", "On each hardware", "T4", "takes", "users", "TTFT, ms", "p99"):
        assert said in text, said


def test_what_is_named_is_escaped(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    head = "model,gpu,precision,tp,isl,osl,concurrency,ttft_ms,itl_ms,e2e_ms,req_s"
    runs.write_text(f"{head}\n<b>m</b>,<i>H100</i>,fp8,1,100,11,10,100,10,200,50\n")
    found = plan(isl=100, osl=11, ttft_ms=500, rate=5, measured=str(runs))
    page = size_page(found)
    assert "<b>m</b>" not in page and "<i>H100" not in page and "&lt;i&gt;H100" in page
    assert found.money is None and "Costs" not in page and "Arrivals" not in page


def test_arrivals_are_poisson() -> None:
    """Shares of windows in percent, in the bars' words: those of a Poisson process of mean 64, together all."""
    asked = DemandSettings(average=32, burst=2)
    svg = arrivals_plot(asked, forecast_demand(asked))
    assert svg is not None and "95 % stay within 77" in svg
    shares = {int(n): float(share) for n, share in (says.removesuffix(" %").split(": ") for says, _ in bars(svg))}
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert shares[64] == pytest.approx(100 * math.exp(-64) * 64**64 / math.factorial(64), rel=0.05)
    heights = dict(bars(svg))
    assert max(heights, key=lambda says: heights[says]).startswith(("63: ", "64: "))
    alone = DemandSettings(rate=5)
    assert arrivals_plot(alone, forecast_demand(alone)) is None


def test_arrivals_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    times = [*range(101), *(0.1 + 0.01 * i for i in range(9))]
    path.write_text("".join(json.dumps({"timestamp": 1e3 * t, "input_length": 9, "output_length": 2}) + "\n"
                            for t in times))  # fmt: skip
    asked = DemandSettings(trace=str(path), percentile=99.5)
    svg = arrivals_plot(asked, forecast_demand(asked))
    assert svg is not None and "99.5 % stay within 10" in svg
    assert [says for says, height in bars(svg) if height > 0] == ["1: 99 %", "10: 1 %"]


def test_hours_and_steps_are_as_high_as_they_say(day: SizingAnswer) -> None:
    assert day.money is not None
    heights = [height for _, height in bars(hours_plot(day.money.hourly))]
    assert heights == pytest.approx([n / max(day.money.hourly) * max(heights) for n in day.money.hourly], abs=0.02)
    added = [height for _, height in bars(why_plot(day))]
    assert sum(added) / added[0] == pytest.approx(day.plan.systems / day.waterfall[0].systems, rel=0.02)


def test_the_limit_is_drawn_where_it_is(day: SizingAnswer) -> None:
    """On the axis of milliseconds, beside the points of the chosen configuration."""
    svg = ttft_plot(day.offers.points, day.plan.point, day.plan.limits)
    mean, limit = re.findall(r'class="stroke s[01]" points="([^"]*)"', svg)
    ys = {float(pair.split(",")[1]) for pair in limit.split()}
    assert len(ys) == 1
    drawn = [float(pair.split(",")[1]) for pair in mean.split()]
    ttft = sorted((p.concurrency, p.mean.ttft_s) for p in day.offers.points
                  if p.configuration == day.plan.point.configuration)  # fmt: skip
    below = [height > ys.copy().pop() for height in drawn]  # further down is less
    assert below == [seconds < 0.5 for _, seconds in ttft] and len(set(below)) == 2


def test_the_other_way_round_there_is_nothing_to_buy() -> None:
    """What some systems serve: no waterfall, and the band is of requests."""
    given = plan(**COMMON, systems="2 x H100")
    rate, error = given.consequences.rate, given.plan.error
    assert headline(given) == (
        f"2 systems of 8 x H100 SXM serve {rate:.4g} requests/s ({rate * (1 - error):.4g} to {rate * (1 + error):.4g}) "
        "of llama-3-8b"
    )
    page = size_page(given)
    assert "Why this number of systems" not in page and headline(given) in unescape(page)
    assert headline(plan(**COMMON, systems="2 x H100", rate=1)).startswith("Nothing is to be bought")
