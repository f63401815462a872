"""Result files, including the formats of GenAI-Perf and AIPerf (JSON, CSV, JSON lines).

In those, names, units and the definition of inter-token latency, (t_e - t_1) / (n - 1), follow the other tools.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from millrace.bench.analysis.goodput import goodput
from millrace.bench.analysis.intervals import PERCENTILES, Summary
from millrace.bench.analysis.metrics import CHUNK_GAP, OTHER_TOOLS, OURS
from millrace.bench.load.length_histogram import NAME as HISTOGRAM
from millrace.bench.load.length_histogram import histogram_to_dict
from millrace.bench.report.page import bench_page, pictures
from millrace.bench.report.results import RunResult, line_of, report
from millrace.bench.run.run import TurnRecord

_THEIR_ITL = "inter_token_latency_genai_perf"
_SHARED = (
    ("time_to_first_token", "time_to_first_token", "ms"), ("time_to_second_token", "time_to_second_token", "ms"),
    ("inter_token_latency", _THEIR_ITL, "ms"), ("request_latency", "request_latency", "ms"),
    ("output_token_throughput_per_user", "output_token_throughput_per_user", "tokens/sec/user"),
    ("output_sequence_length", "output_sequence_length", "tokens"),
    ("input_sequence_length", "input_sequence_length", "tokens"),
)  # fmt: skip
AIPERF_SCHEMA = "1.4"  # of AIPerf 0.13
_PERCENTILES = [f"p{p}" for p in PERCENTILES]
_GENAI_COLUMNS = ["avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "p25"]
_AIPERF_COLUMNS = ["avg", "min", "max", "sum", *_PERCENTILES, "std"]
_VALUES = {m.name: m.value for m in (*OURS, *OTHER_TOOLS)}
Table = Mapping[str, Mapping[str, Any]]
PAGE, SUMMARY, REQUESTS = "report.html", "summary.json", "requests.jsonl"
GENAI_PERF, AIPERF = "profile_export_genai_perf", "profile_export_aiperf"
NAMES = (
    REQUESTS, SUMMARY, PAGE, f"{GENAI_PERF}.json", f"{GENAI_PERF}.csv", f"{AIPERF}.json", f"{AIPERF}.csv",
    "profile_export.jsonl", HISTOGRAM,
)  # fmt: skip


def write_results(folder: Path, result: RunResult, with_pictures: bool = False) -> list[str]:
    """Create the folder, write all files and return their names, sources of the others first.

    with_pictures: plots as PNG. raises OSError
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, text in _files(result):
        (folder / name).write_text(text, encoding="utf-8", newline="")
        names.append(name)
    for name, data in pictures(result).items() if with_pictures else ():
        (folder / name).write_bytes(data)
        names.append(name)
    return names


def _files(result: RunResult) -> Iterator[tuple[str, str]]:
    """Yield names and contents of the files, in the order of NAMES."""
    records = sorted(result.run.records, key=lambda r: r.answer.sent_s)
    yield REQUESTS, "".join(line_of(r, result.epoch_s) + "\n" for r in records)
    yield SUMMARY, json.dumps(report(result), indent=2)
    yield PAGE, bench_page(result)
    genai, aiperf = genai_perf(result), aiperf_metrics(result)
    yield f"{GENAI_PERF}.json", json.dumps({**genai, "input_config": _config(result)}, indent=2)
    yield f"{GENAI_PERF}.csv", _genai_csv(genai)
    yield f"{AIPERF}.json", json.dumps(aiperf_json(result, aiperf), indent=2)
    yield f"{AIPERF}.csv", _aiperf_csv(aiperf)
    yield "profile_export.jsonl", "".join(json.dumps(aiperf_record(r, result.epoch_s)) + "\n" for r in records)
    lengths = histogram_to_dict([r.answer for r in records])
    if lengths is not None:
        yield HISTOGRAM, json.dumps(lengths)


def _summary(stats: Summary, unit: str) -> dict[str, Any]:
    percentiles = {f"p{p}": value for p, value in stats.percentiles.items()}
    return {"unit": unit, "avg": stats.mean, **percentiles, "min": stats.min, "max": stats.max, "std": stats.std}


def _shared_metrics(result: RunResult) -> dict[str, dict[str, Any]]:
    stats = result.metrics.of_requests
    return {theirs: _summary(stats[ours], unit) for theirs, ours, unit in _SHARED if ours in stats}


def _good_rate(result: RunResult) -> float | None:
    if not result.limits:
        return None
    return goodput(result.run.records, result.limits[0], result.metrics.duration_s).requests_per_s


def genai_perf(result: RunResult) -> dict[str, dict[str, Any]]:
    metrics, good = result.metrics, _good_rate(result)
    goodputs = {} if good is None else {"request_goodput": {"unit": "requests/sec", "avg": good}}
    return {
        "request_throughput": {"unit": "requests/sec", "avg": metrics.requests_per_s.value},
        **_shared_metrics(result),
        "output_token_throughput": {"unit": "tokens/sec", "avg": metrics.output_tokens_per_s.value},
        **goodputs,
        "request_count": {"unit": "count", "avg": float(metrics.n)},
    }


def aiperf_metrics(result: RunResult) -> dict[str, dict[str, Any]]:
    """Return the metrics like GenAI-Perf's, with count and sum of each."""
    metrics, good = result.metrics, _good_rate(result)
    shared = {
        theirs: {**_summary(stats, unit), "count": stats.n, "sum": stats.mean * stats.n}
        for theirs, ours, unit in (*_SHARED, (CHUNK_GAP, CHUNK_GAP, "ms"))
        if (stats := metrics.of_requests.get(ours)) is not None
    }
    answers = [r.answer for r in result.run.records if r.answer.failure is None]
    single = {
        "request_throughput": ("requests/sec", metrics.requests_per_s.value),
        "output_token_throughput": ("tokens/sec", metrics.output_tokens_per_s.value),
        "benchmark_duration": ("sec", metrics.duration_s),
        "request_count": ("requests", float(metrics.n)),
        "total_isl": ("tokens", float(sum(a.n_prompt or 0 for a in answers))),
        "total_osl": ("tokens", float(sum(a.n_output for a in answers))),
        **({} if good is None else {"goodput": ("requests/sec", good)}),
        **({"error_request_count": ("requests", float(metrics.n_failed))} if metrics.n_failed else {}),
    }
    return {**shared, **{name: {"unit": unit, "avg": value} for name, (unit, value) in single.items()}}


def aiperf_json(result: RunResult, metrics: Table) -> dict[str, Any]:
    records = result.run.records
    counts: dict[tuple[int, str, str], int] = {}
    for record in records:
        if record.answer.failure is not None:
            error = _error(record)
            key = (error["code"], error["type"], error["message"])
            counts[key] = counts.get(key, 0) + 1
    start_s = min((r.answer.sent_s for r in records), default=result.run.started_s)
    end_s = max((r.answer.end_s for r in records), default=start_s)
    return {
        "schema_version": AIPERF_SCHEMA,
        **metrics,
        "millrace": _config(result),  # not `input_config`, which AIPerf parses as its own
        "was_cancelled": bool(result.run.ended),
        "error_summary": [
            {"error_details": dict(zip(("code", "type", "message"), key, strict=True)), "count": n}
            for key, n in counts.items()
        ],
        "start_time": datetime.fromtimestamp(result.epoch_s + start_s).isoformat(),
        "end_time": datetime.fromtimestamp(result.epoch_s + end_s).isoformat(),
    }


def aiperf_record(record: TurnRecord, epoch_s: float) -> dict[str, Any]:
    answer, failed = record.answer, record.answer.failure is not None
    metrics: dict[str, Any] = {}
    if not failed:
        for theirs, ours, unit in _SHARED:
            value = _VALUES[ours](answer)
            if value is not None:
                metrics[theirs] = {"value": value, "unit": unit}
        gaps = [1e3 * (b - a) for a, b in zip(answer.chunk_s, answer.chunk_s[1:], strict=False)]
        metrics |= {"inter_chunk_latency": {"value": gaps, "unit": "ms"}} if gaps else {}
    was_cancelled = answer.failure is not None and answer.failure.value == "cancelled"
    end_ns = round(1e9 * (epoch_s + answer.end_s))
    metadata = {
        "session_num": record.session, "x_request_id": answer.id, "x_correlation_id": f"session-{record.session}",
        "conversation_id": f"session-{record.session}", "turn_index": record.number,
        "request_start_ns": round(1e9 * (epoch_s + answer.sent_s)), "request_ack_ns": None, "request_end_ns": end_ns,
        "worker_id": "millrace-bench", "record_processor_id": "millrace-bench", "benchmark_phase": "profiling",
        "was_cancelled": was_cancelled, "cancellation_time_ns": end_ns if was_cancelled else None,
    }  # fmt: skip
    return {"metadata": metadata, "metrics": metrics, "error": _error(record) if failed else None}


def _error(record: TurnRecord) -> dict[str, Any]:
    answer = record.answer
    assert answer.failure is not None
    code = 499 if answer.failure.value == "cancelled" else answer.status
    return {"code": code, "type": answer.failure.value, "message": answer.detail}


def _config(result: RunResult) -> dict[str, Any]:
    document = report(result)
    return {
        "written_by": "millrace bench",
        **{name: document[name] for name in ("url", "endpoint", "model", "engine", "load")},
    }


def _genai_csv(metrics: Table) -> str:
    """Format metrics of requests, an empty line, and totals."""
    rows: list[list[str]] = [["Metric", *_GENAI_COLUMNS]]
    for name, values in metrics.items():
        if "p50" in values:
            unit = "" if values["unit"] == "tokens" else f" ({values['unit']})"
            rows.append([_title(name) + unit, *(f"{values[c]:,.2f}" for c in _GENAI_COLUMNS)])
    rows += [[], ["Metric", "Value"]]
    rows += [[f"{_title(n)} ({v['unit']})", f"{v['avg']:.2f}"] for n, v in metrics.items() if "p50" not in v]
    return _csv(rows)


def _aiperf_csv(metrics: Table) -> str:
    rows: list[list[str]] = [["Metric", *_AIPERF_COLUMNS]]
    for name, values in sorted(metrics.items()):
        if "p50" in values:
            rows.append([f"{_header(name)} ({values['unit']})", *(f"{values[c]:.2f}" for c in _AIPERF_COLUMNS)])
    rows += [[], ["Metric", "Value"]]
    for name, values in sorted(metrics.items()):
        if "p50" not in values:
            unit = "" if values["unit"] == "requests" else f" ({values['unit']})"
            rows.append([_header(name) + unit, f"{values['avg']:.2f}"])
    return _csv(rows)


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def _header(name: str) -> str:
    words = {"total_isl": "Total Input Sequence Length", "total_osl": "Total Output Sequence Length"}
    return words.get(name) or _title(name).replace(" To ", " to ").replace(" Per ", " Per ")


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
