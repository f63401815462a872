"""Files that other tools' readers take: names, units, columns, and the figures of the run."""

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.bench.analysis.goodput import parse_limits
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.report.exports import write_results
from millrace.bench.report.results import RunResult, report
from millrace.bench.run.plan import make_plan, measure
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from tests.bench.conftest import Null

STATS = {"unit", "avg", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "min", "max", "std"}
UNITS = {
    "time_to_first_token": "ms", "time_to_second_token": "ms", "inter_token_latency": "ms", "request_latency": "ms",
    "output_token_throughput_per_user": "tokens/sec/user", "output_sequence_length": "tokens",
    "input_sequence_length": "tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def done(null: Null) -> RunResult:
    """Every fifth request breaks off."""
    server = null(NullTiming(ttft_ms="8", itl_ms="normal:2,0.5", fault="break", fault_every=5))
    plan = make_plan(
        server.url, TargetSettings(model="m"), LoadSettings(concurrency=4, request_count=20, random_seed=3),
        InputSettings(pattern=("10/8", "20/6")), SessionSettings(),
    )  # fmt: skip
    return RunResult.from_run(plan, asyncio.run(measure(plan)), parse_limits(["ttft:500", "reading-speed"]))


@pytest.fixture(scope="module")
def folder(done: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("results") / "new"
    assert sorted(write_results(found, done)) == sorted(p.name for p in found.iterdir())
    return found


def loaded(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["genai_perf", "aiperf"])
def test_both_json_schemas(folder: Path, name: str) -> None:
    told, lines = loaded(folder / f"profile_export_{name}.json"), requests(folder)
    more, gaps = ({"count", "sum"}, {"inter_chunk_latency": "ms"}) if name == "aiperf" else (set(), {})
    for metric, unit in (UNITS | gaps).items():
        assert set(told[metric]) == STATS | more and told[metric]["unit"] == unit
    ttft = [line["chunk_ms"][0] for line in lines if line["failure"] is None]
    for stat, value in {"avg": np.mean(ttft), "p90": np.percentile(ttft, 90), "std": np.std(ttft)}.items():
        assert told["time_to_first_token"][stat] == pytest.approx(value, abs=1e-3)
    itl = [(a["chunk_ms"][-1] - a["chunk_ms"][0]) / (a["n_output"] - 1) for a in lines if a["failure"] is None]
    assert told["inter_token_latency"]["avg"] == pytest.approx(np.mean(itl), abs=1e-3), "theirs, by n - 1"
    assert told["request_count"]["avg"] == len(ttft) < 20 and told["request_throughput"]["unit"] == "requests/sec"
    assert told["output_token_throughput"]["avg"] > 0
    own = told["millrace" if name == "aiperf" else "input_config"]
    assert own["model"] == "m" and own["written_by"] == "millrace bench"


def test_what_aiperf_reads_itself(folder: Path) -> None:
    """Its own input_config it would parse as its own; of its reader: tools/clients/scripts/aiperf_client.py."""
    told, lines = loaded(folder / "profile_export_aiperf.json"), requests(folder)
    answers = [line["chunk_ms"] for line in lines if line["failure"] is None]
    assert "input_config" not in told and told["schema_version"] == "1.4"
    ttft, gaps = told["time_to_first_token"], told["inter_chunk_latency"]
    assert ttft["count"] == len(answers) and ttft["sum"] == pytest.approx(sum(a[0] for a in answers), abs=0.01)
    assert gaps["count"] == sum(len(a) - 1 for a in answers)
    assert gaps["sum"] == pytest.approx(sum(a[-1] - a[0] for a in answers), abs=0.01)


def test_aiperf_tells_failures(folder: Path) -> None:
    told = loaded(folder / "profile_export_aiperf.json")
    n_failed = sum(line["failure"] is not None for line in requests(folder))
    assert sum(e["count"] for e in told["error_summary"]) == n_failed == told["error_request_count"]["avg"] > 0
    assert {e["error_details"]["type"] for e in told["error_summary"]} == {"broken off"}
    assert told["was_cancelled"] is False and told["start_time"] < told["end_time"]


def requests(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def test_aiperf_lines(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    ours = requests(folder)
    assert [one["metadata"]["x_request_id"] for one in lines] == [line["id"] for line in ours] and len(lines) == 20
    for theirs, line in zip(lines, ours, strict=True):
        span_ms = (theirs["metadata"]["request_end_ns"] - theirs["metadata"]["request_start_ns"]) / 1e6
        assert span_ms == pytest.approx(line["end_ms"], abs=0.01)
        assert (theirs["error"] is None) == (line["failure"] is None) == bool(theirs["metrics"])
        if theirs["metrics"]:
            gaps = theirs["metrics"]["inter_chunk_latency"]["value"]
            assert gaps == pytest.approx(np.diff(line["chunk_ms"]), abs=1e-3)


HEADS = {
    "genai_perf": "avg min max p99 p95 p90 p75 p50 p25",  # 0.0.16
    "aiperf": "avg min max sum p1 p5 p10 p25 p50 p75 p90 p95 p99 std",  # 0.13
}


@pytest.mark.parametrize("name, head", HEADS.items(), ids=HEADS)
def test_both_csv_schemas(folder: Path, name: str, head: str) -> None:
    rows = list(csv.reader((folder / f"profile_export_{name}.csv").read_text().splitlines()))
    gap = rows.index([])
    assert rows[0] == ["Metric", *head.split()] and {len(row) for row in rows[:gap]} == {len(rows[0])}
    assert rows[gap + 1] == ["Metric", "Value"] and all(len(row) == 2 for row in rows[gap + 1 :])
    told = loaded(folder / f"profile_export_{name}.json")
    (latency,) = [row for row in rows if row and row[0] == "Request Latency (ms)"]
    assert [float(v) for v in latency[1:]] == [pytest.approx(told["request_latency"][c], abs=0.01) for c in rows[0][1:]]
    title = "Time To First Token (ms)" if name == "genai_perf" else "Time to First Token (ms)"
    assert title in [row[0] for row in rows if row]


def test_the_report_is_told_for_each_pattern(done: RunResult, folder: Path) -> None:
    told = loaded(folder / "summary.json")
    assert told == json.loads(json.dumps(report(done)))
    parts = told["patterns"]
    assert (
        set(parts) == {"10/8", "20/6"}
        and sum(p["requests"]["whole"] for p in parts.values()) == told["requests"]["whole"]
    )
    lengths = {label: part["metrics"]["output_sequence_length"]["mean"] for label, part in parts.items()}
    assert lengths == {"10/8": 8, "20/6": 6}
    assert [g["limits"] for g in told["goodput"]] == [
        "time_to_first_token <= 500 ms", "inter_token_latency <= 90 ms", "inter_token_latency <= 200 ms",
    ]  # fmt: skip
    assert all(m["definition"] and m["unit"] for m in told["metrics"].values())
    assert any("requests failed (broken off)" in note for note in told["notes"])
