"""The page and its verdicts: answers that were written by hand, with slopes and drifts that are known."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from millrace.bench.analysis.goodput import parse_limits
from millrace.bench.analysis.latency_breakdown import Waterfall
from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.load.inputs import Turn
from millrace.bench.report.page import bench_page, waterfall
from millrace.bench.report.plot_summaries import fit_line, gaps_by_position, itl_drift, spread_percent, ttft_by_length
from millrace.bench.report.results import RunResult, report
from millrace.bench.run.plan import make_plan
from millrace.bench.run.run import Run, RunLoad, TurnRecord
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings

RNG = np.random.default_rng(1)


def answer(sent_s: float, n_prompt: int, ttft_s: float, gaps_s: list[float]) -> BenchRecord:
    chunks = (sent_s + ttft_s + np.cumsum([0, *gaps_s])).tolist()
    return BenchRecord(
        "x", sent_s, sent_s, chunks, [], chunks[-1], n_prompt, len(chunks), status=200, finish_reason="stop"
    )


def prefill(n: int = 60) -> list[BenchRecord]:
    """40 ms and 0.25 ms an input token, with noise of 5 ms; a token every 20 ms, that slow down from 18 to 22."""
    found = []
    for i, n_prompt in enumerate(RNG.integers(100, 2000, n).tolist()):
        ttft_s = 0.04 + 0.00025 * n_prompt + RNG.normal(0, 0.005)
        found.append(answer(i * 0.05, n_prompt, ttft_s, [0.018] * 10 + [0.022] * 10))
    return found


def test_the_slope_of_ttft_is_found_with_its_interval() -> None:
    answers = prefill()
    fit = ttft_by_length(answers)
    assert fit is not None and fit.interval is not None and fit.interval[0] <= 0.25 <= fit.interval[1]
    x, y = [a.n_prompt for a in answers], [1e3 * (a.chunk_s[0] - a.sent_s) for a in answers]
    (slope, start), covariance = np.polyfit(np.array(x, dtype=float), y, 1, cov=True)
    assert (fit.slope, fit.start) == pytest.approx((slope, start))
    half = 2.0017 * covariance[0, 0] ** 0.5  # Student's t of 58 degrees of freedom
    assert fit.interval == pytest.approx((slope - half, slope + half), rel=1e-4)


def test_intervals_of_slopes_hold_what_they_promise() -> None:
    held, x = 0, np.linspace(0, 10, 20)
    for _ in range(400):
        fit = fit_line(x, 3 + 2 * x + RNG.normal(0, 1, 20))
        assert fit is not None and fit.interval is not None
        held += fit.interval[0] <= 2 <= fit.interval[1]
    assert 0.92 <= held / 400 <= 0.98


def test_no_slope_where_nothing_varies() -> None:
    assert ttft_by_length([answer(0, 100, 0.1, [0.01])] * 20) is None and ttft_by_length([]) is None
    few = fit_line(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert few is not None and few.slope == pytest.approx(1) and few.interval is None


def test_the_drift_along_an_answer() -> None:
    drift = itl_drift(prefill())
    assert drift is not None and drift.percent == pytest.approx(100 * 4 / 20)
    assert itl_drift([answer(0, 1, 0.1, [0.01] * 3)]) is None
    noise = [answer(0, 1, 0.1, RNG.exponential(0.01, 20).tolist()) for _ in range(300)]
    steady = itl_drift(noise)
    assert steady is not None and steady.interval is not None and steady.interval[0] <= 0 <= steady.interval[1]


def test_gaps_are_by_token() -> None:
    a = answer(0, 1, 0.1, [0.03, 0.01])
    a.chunk_tokens, a.n_reported = [2, 5, 6], 6
    at, gaps = gaps_by_position([a])
    assert at.tolist() == [5, 6] and gaps.tolist() == pytest.approx([10, 10])


def test_the_spread() -> None:
    assert spread_percent(list(range(101))) == pytest.approx(160) and spread_percent([]) is None


def finished(records: list[TurnRecord], model: str = "m") -> RunResult:
    settings = TargetSettings(model=model), LoadSettings(concurrency=2), InputSettings(), SessionSettings()
    plan = make_plan("http://x", *settings)
    run = Run(Client(BenchTarget("http://x", CHAT)), RunLoad())
    run.records += records
    return RunResult.from_run(plan, run, parse_limits(["reading-speed"]))


def test_every_plot_has_its_verdict() -> None:
    records = [TurnRecord(Turn("a"), a, i, 0, "short" if i % 2 else "long") for i, a in enumerate(prefill())]
    records[7].answer.failure = Failure.BROKEN_OFF
    page = bench_page(finished(records, "<script>alert(1)</script>"))
    assert "<script" not in page and "http:" not in re.sub("http://(x|www.w3.org)", "", page)
    text = unescape(re.sub("<[^>]+>", " ", page))
    for said in (r"\+2[45]\d\.\d ms per 1,000 input tokens \(95 %", r"\+20\.0 % longer", "59 answers: ",
                 r"% of the median \(long\)", "Latency grows by", "1 requests failed|1 failed"):  # fmt: skip
        assert re.search(said, text), said
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        drawing = ET.fromstring(svg)
        assert drawing.attrib["aria-label"]
        for shape in drawing.iter():
            for name in ("x", "cx", "x1", "x2"):
                assert 0 <= float(shape.attrib.get(name, 0)) <= 1080, shape.attrib
    assert page.count("<svg") == 6


def test_where_the_time_went_is_drawn_stage_by_stage() -> None:
    rows = np.tile([2.0, 3.0, 5.0, 70.0, 1.0], (100, 1))
    rows[98:, 2] = 400
    done = replace(
        finished([TurnRecord(Turn("a"), prefill(1)[0], 0, 0)]), waterfall=Waterfall(rows, np.c_[rows, rows[:, 0]])
    )
    drawn = waterfall(done.waterfall)
    assert drawn is not None and "263.3 ms in queue" in drawn["verdict"], "395 ms more in two of the three slowest"
    boxes = [
        b.attrib for b in ET.fromstring(drawn["svg"]).iter() if b.tag.endswith("rect") and "k" in b.attrib["class"]
    ]
    widths = np.array([float(b["width"]) for b in boxes]).reshape(2, 5)
    slow = rows[-3:].mean(axis=0)
    assert widths[0] / widths[0].sum() == pytest.approx(slow / slow.sum(), abs=0.005)
    assert widths[1].sum() / widths[0].sum() == pytest.approx(81 / slow.sum(), abs=0.005)
    assert "Where the time went" in bench_page(done) and report(done)["waterfall"]["n"] == 100
    assert waterfall(None) is None and report(finished([]))["waterfall"] is None


def test_a_page_of_nothing_says_so() -> None:
    lost = BenchRecord("x", 1.0, 1.0, end_s=1.1, failure=Failure.UNREACHABLE, detail="nobody")
    page = bench_page(finished([TurnRecord(Turn("a"), lost, 0, 0)]))
    assert "1 requests failed (unreachable), the first: nobody" in unescape(page)
