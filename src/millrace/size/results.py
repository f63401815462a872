"""Results of benchmarks as operating points: of `millrace bench`, GenAI-Perf, AIPerf and `vllm bench serve`.

Their files do not say on what a server ran: device, precision and TP are told beside them. Definitions differ: ITL is
(E2E - TTFT) / (output tokens - 1) here, which is vLLM's TPOT.
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from millrace.errors import ConfigError, plain
from millrace.settings import read_given
from millrace.size.constants import profile
from millrace.size.cost import Instance
from millrace.size.fit import Step, check_possible
from millrace.size.points import Point, Source, Waits
from millrace.size.served import served

_MOST_BYTES, _MOST = 64 << 20, 1e9
_ALONE = 1.5  # requests in flight, below which a first token waits for its own prompt alone
COLUMNS = ("model", "gpu", "precision", "tp", "isl", "osl", "concurrency", "ttft_ms", "itl_ms", "e2e_ms", "req_s",
           "ttft_p95_ms", "itl_p95_ms", "e2e_p95_ms")  # fmt: skip
SUMMARY = "summary.json"  # in a folder of `millrace bench -o`
Read = Callable[[Mapping[str, Any]], dict[str, Any]]


def read_result(path: Path, instance: Instance) -> Point:
    """path: a file, or the folder of `millrace bench -o`. raises ConfigError, also for what no such device can do"""
    file = path / SUMMARY if path.is_dir() else path
    told = _json(file)
    tool, read = _tool(told, file)
    try:
        found = {name: _number(value, name) for name, value in read(told).items() if value is not None}
        point = _point(found, instance)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{file}: {plain(why)}", f"a whole result of {tool}", "measure again") from None
    _check(point, instance, file)
    return point


def _json(file: Path) -> Mapping[str, Any]:
    try:
        data = read_given(file, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{file} is larger than {_MOST_BYTES} bytes", "a result", "check the file")
        told = json.loads(data)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "a result", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {plain(str(error))}", "a result", "check the file") from None
    if not isinstance(told, dict):
        raise ConfigError(f"{file} holds no result", "a JSON object", "check the file")
    return told


def _tool(told: Mapping[str, Any], file: Path) -> tuple[str, Read]:
    if "requests_per_s" in told and "metrics" in told:
        return "millrace bench", _ours
    if "mean_ttft_ms" in told and "request_throughput" in told:
        return "vllm bench serve", _vllm
    if "request_throughput" in told and "time_to_first_token" in told:
        return "GenAI-Perf or AIPerf", _genai_perf
    raise ConfigError(
        f"{file} is no result that is known", "JSON of millrace bench, GenAI-Perf, AIPerf or vllm bench serve",
        "give summary.json, profile_export_*.json, or what --save-result wrote",
    )  # fmt: skip


def _ours(told: Mapping[str, Any]) -> dict[str, Any]:
    if told["valid"] is False:
        raise ValueError("its client did not keep up, so that it measured itself")
    metrics = told["metrics"]
    return {
        "req_s": told["requests_per_s"]["value"], **_means(metrics, "mean"),
        "isl": metrics["input_sequence_length"]["mean"], "osl": metrics["output_sequence_length"]["mean"],
    }  # fmt: skip


def _genai_perf(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "req_s": told["request_throughput"]["avg"], **_means(told, "avg"),
        "isl": told["input_sequence_length"]["avg"], "osl": told["output_sequence_length"]["avg"],
    }  # fmt: skip


def _means(metrics: Mapping[str, Any], mean: str) -> dict[str, Any]:
    ttft, e2e = metrics["time_to_first_token"], metrics["request_latency"]
    return {
        "ttft_ms": ttft[mean], "e2e_ms": e2e[mean], "ttft_p95_ms": ttft.get("p95"), "e2e_p95_ms": e2e.get("p95"),
        "itl_p95_ms": metrics.get("inter_token_latency", {}).get("p95"),
    }  # fmt: skip


def _vllm(told: Mapping[str, Any]) -> dict[str, Any]:
    n = told["completed"]
    osl = told["total_output_tokens"] / n
    ttft_ms, itl_ms = told["mean_ttft_ms"], told["mean_tpot_ms"]
    return {
        "req_s": told["request_throughput"], "ttft_ms": ttft_ms, "isl": told["total_input_tokens"] / n, "osl": osl,
        "e2e_ms": told.get("mean_e2el_ms", ttft_ms + itl_ms * (osl - 1)), "ttft_p95_ms": told.get("p95_ttft_ms"),
        "itl_p95_ms": told.get("p95_tpot_ms"), "e2e_p95_ms": told.get("p95_e2el_ms"),
    }  # fmt: skip


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise ValueError(f"{name} is {value!r:.40}")
    return float(value)


def _point(found: Mapping[str, float], instance: Instance) -> Point:
    isl, osl = round(found["isl"], 1), round(found["osl"], 1)
    ttft_s, e2e_s = found["ttft_ms"] / 1e3, found["e2e_ms"] / 1e3
    if ttft_s > e2e_s:
        raise ValueError(f"the first token comes after the last: {ttft_s:g} s and {e2e_s:g} s")
    p95 = [found.get(name) for name in COLUMNS[-3:]]
    return Point(
        model=instance.model.name, device=instance.device.name, precision=instance.precision, tp=instance.tp,
        input_tokens=isl, output_tokens=osl, concurrency=round(found["req_s"] * e2e_s, 3), rate=found["req_s"],
        mean=Waits(ttft_s, (e2e_s - ttft_s) / max(1.0, osl - 1), e2e_s),
        p95=Waits(*(ms / 1e3 for ms in p95 if ms is not None)) if None not in p95 else None, source=Source.MEASURED,
    )  # fmt: skip


def _check(point: Point, instance: Instance, file: Path) -> None:
    """By the datasheet: a faster one is of other hardware, a smaller model, sparse peaks, or cached prompts."""
    alone = point.concurrency < _ALONE
    step = Step(
        instance, max(1, int(point.concurrency)), round(point.input_tokens),
        point.input_tokens + point.output_tokens / 2, point.mean.ttft_s if alone else None,
        point.mean.itl_s if point.output_tokens > 1 else None,
    )  # fmt: skip
    try:
        check_possible([step])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.what}", error.expected, error.mend) from None


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured point beside what is computed for it, by the profile as it comes along."""

    name: str
    measured: Point
    computed: Point

    @property
    def slower(self) -> float:
        """How many times the computed time a request took."""
        return self.measured.mean.e2e_s / self.computed.mean.e2e_s


@dataclass(frozen=True, slots=True)
class Fitted:
    """factor: on every time, so that the median request takes what was measured; for `--factor`

    before, after: mean relative error of requests/s, without and with it
    """

    factor: float
    before: float
    after: float
    provenance: str


def compared(name: str, measured: Point, instance: Instance) -> Compared:
    """At the same number in flight. raises ConfigError"""
    known = profile(instance.device, instance.precision)
    lengths = measured.input_tokens, measured.output_tokens
    return Compared(name, measured, served(instance, known, lengths, max(1.0, measured.concurrency)))


def fitted(rows: Sequence[Compared], instance: Instance) -> Fitted:
    factor = median(row.slower for row in rows)

    def error(times: float) -> float:
        return sum(abs(row.computed.rate / times / row.measured.rate - 1) for row in rows) / len(rows)

    return Fitted(factor, error(1.0), error(factor), profile(instance.device, instance.precision).source)


def write_table(file: Path, points: Sequence[Point]) -> None:
    """As `--measured` reads it. raises OSError"""
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(COLUMNS)
        for p in points:
            waits = [p.mean.ttft_s, p.mean.itl_s, p.mean.e2e_s]
            p95 = [p.p95.ttft_s, p.p95.itl_s, p.p95.e2e_s] if p.p95 else []
            rows.writerow([
                p.model, p.device, p.precision, p.tp, f"{p.input_tokens:g}", f"{p.output_tokens:g}", p.concurrency,
                *(f"{s * 1e3:.6g}" for s in waits), f"{p.rate:.6g}", *(f"{s * 1e3:.6g}" for s in p95 or ()),
                *([""] * (3 - len(p95))),
            ])  # fmt: skip
