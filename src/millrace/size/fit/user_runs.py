"""Fits a serving stack to a user's runs: JSON results of `millrace bench`, GenAI-Perf, AIPerf and vLLM.

Each file gives mean lengths, requests/s and latencies; the concurrency is rate x time (Little's law). Runs that exceed
what the devices can do are refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError, sanitize
from millrace.machine.devices import find_device
from millrace.report.format_numbers import pluralize
from millrace.settings import read_bounded
from millrace.size.answer.sizing import instance_of
from millrace.size.fit.overhead import LeaveOneOutResult, MeasuredRun, Replayed, fit_stack, replay, summarize_errors
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.models import ModelShape
from millrace.size.performance.operating_point import OperatingPoint
from millrace.size.performance.roofline_cost import WEIGHT_BYTES, ModelInstance, decode_terms, prefill_terms
from millrace.size.performance.serving_overhead import Stack

_MAX_BYTES, _MAX_FILES = 8 << 20, 1000
_MAX_FIGURE = 1e9  # of any figure
_MAX_IN_FLIGHT = 4096  # limit of the simulation
_FEW = 4  # with fewer distinct runs, a single common factor is fitted
_EXPECTED = "summary.json of millrace bench -o, or the JSON of GenAI-Perf, AIPerf or vllm bench serve"


@dataclass(frozen=True, slots=True)
class UserRun:
    """Means of a load generator's run in tokens, requests/s and seconds. source: tool and file

    p95: of TTFT, ITL and E2E in seconds, if the file has all of them
    """

    n_input: float
    n_output: float
    rate: float
    ttft_s: float
    e2e_s: float
    source: str
    p95: tuple[float, float, float] | None = None

    @property
    def itl_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1.0, self.n_output - 1)

    @property
    def concurrency(self) -> float:
        return self.rate * self.e2e_s


@dataclass(frozen=True, slots=True)
class Refit:
    """A refitted stack. runs: replayed with it; before, after: errors with the old stack and the new one"""

    stack: Stack
    runs: tuple[Replayed, ...]
    before: LeaveOneOutResult
    after: LeaveOneOutResult


def refit(results: Sequence[UserRun], instance: ModelInstance, start: Stack | None = None) -> Refit:
    """Refit a stack to results of one instance. raises ConfigError if there are none, or impossible ones"""
    if not results:
        raise ConfigError("no results", "one file at least", "name it")
    start = start or profile(instance.device, instance.precision).stack
    runs = [_run(result, instance) for result in results]
    before = summarize_errors("before", [replay(run, start) for run in runs])
    if len({(run.concurrency, run.lengths) for run in runs}) >= _FEW:
        stack = fit_stack(runs, start)
    else:
        stack = _fit_common_factor(runs, start)
    replays = tuple(replay(run, stack) for run in runs)
    stack = replace(stack, name=f"{start.name}, refitted to {pluralize(len(runs), 'run')}")
    return Refit(stack, replays, before, summarize_errors("after", replays))


def _fit_common_factor(runs: Sequence[MeasuredRun], start: Stack) -> Stack:
    """Fit one common factor on all step times."""
    stack = start
    for _ in range(4):
        slower = 1 + float(np.median([replay(run, stack).rate_error for run in runs]))
        stack = replace(
            stack, prefill=stack.prefill * slower, decode=stack.decode * slower, cache=stack.cache * slower,
            host_s=stack.host_s * slower,
        )  # fmt: skip
    return stack


def _run(result: UserRun, instance: ModelInstance) -> MeasuredRun:
    check_possible(result, instance)
    concurrency = max(1, round(result.concurrency))
    if concurrency > _MAX_IN_FLIGHT:
        raise ConfigError(
            f"{result.source}: {concurrency} requests in flight", f"at most {_MAX_IN_FLIGHT}", "leave the run out"
        )
    lengths = Lengths(max(1, round(result.n_input)), max(1, round(result.n_output)))
    return MeasuredRun(instance, lengths, concurrency, result.rate, result.ttft_s, result.itl_s)


def check_possible(result: UserRun, instance: ModelInstance) -> None:
    """Refuse results that exceed the devices' arithmetic or bandwidth. raises ConfigError"""
    tokens = [result.n_input + result.n_output]
    shares = {
        "arithmetic (MFU)": result.rate * prefill_terms(instance, tokens).arithmetic_s,
        "bandwidth (MBU)": decode_terms(instance, 1, result.n_input)[0] / result.itl_s if result.n_output > 1 else 0.0,
    }
    for resource, share in shares.items():
        if share > 1:
            raise ConfigError(
                f"{result.source}: {share:.2f} times all {resource} of {instance.tp} x {instance.device.name} for "
                f"{instance.model.name} in {instance.precision}",
                "at most 1",
                "name what it ran on (devices of one instance, not of the server; model; precision), or leave it out",
            )  # fmt: skip


def check_point(point: OperatingPoint, model: ModelShape, location: str) -> None:
    """location: file and line. raises ConfigError where an instance was measured to do more than its devices can, as
    figures of a whole server or of another model would have it; of what the catalogue has not nothing is known
    """
    if point.precision not in WEIGHT_BYTES:
        return
    try:
        precision = "fp16" if point.precision == "bf16" else point.precision
        instance = instance_of(model, find_device(point.device), precision, point.tp)
        instance.device.peak("fp16" if precision == "int4" else precision)
    except ConfigError:
        return
    waits = point.mean
    check_possible(UserRun(point.input_tokens, point.output_tokens, point.rate, waits.ttft_s, waits.e2e_s, location),
                   instance)  # fmt: skip


def read_results(paths: Sequence[Path]) -> list[UserRun]:
    """Read files, or folders of `millrace bench -o`. raises ConfigError with file and reason"""
    if len(paths) > _MAX_FILES:
        raise ConfigError(f"{len(paths)} results", f"at most {_MAX_FILES}", "name fewer")
    return [read_result(path) for path in paths]


def read_result(path: Path) -> UserRun:
    """Read a result of any supported tool. raises ConfigError"""
    path = path / "summary.json" if path.is_dir() else path
    document = _json(path)
    if document.get("schema") == 1 and "requests_per_s" in document:
        return _read_millrace(document, path)
    if "request_throughput" in document and isinstance(document["request_throughput"], dict):
        return _read_genai_perf(document, path, "AIPerf" if "schema_version" in document else "GenAI-Perf")
    if "request_throughput" in document and "total_input_tokens" in document:
        return _read_vllm(document, path)
    raise ConfigError(f"{path} is of no load generator that is known", _EXPECTED, "give such a file")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        data = read_bounded(path, _MAX_BYTES)
        document = json.loads(data) if len(data) <= _MAX_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", _EXPECTED, "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {sanitize(str(error))}", _EXPECTED, "check the file") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no object of at most {_MAX_BYTES} bytes", _EXPECTED, "check the file")
    return document


def _read_millrace(document: Mapping[str, Any], path: Path) -> UserRun:
    if document.get("valid") is False:
        raise ConfigError(f"{path}: the client did not keep up", "a run that is valid", "measure again")
    names = ("input_sequence_length", "output_sequence_length", "time_to_first_token", "request_latency")
    n_in, n_out, ttft_ms, e2e_ms = (_number(document, path, "metrics", name, "mean") for name in names)
    rate = _number(document, path, "requests_per_s", "value")
    p95 = _p95(document["metrics"], path, 1e-3)
    return _check_order(UserRun(n_in, n_out, rate, ttft_ms / 1e3, e2e_ms / 1e3, f"millrace bench, {path}", p95))


def _p95(metrics: Mapping[str, Any], path: Path, unit: float) -> tuple[float, float, float] | None:
    names = ("time_to_first_token", "inter_token_latency", "request_latency")
    if not all(isinstance(one := metrics.get(name), dict) and "p95" in one for name in names):
        return None
    ttft, itl, e2e = (_number(metrics, path, name, "p95") * unit for name in names)
    return ttft, itl, e2e


def _read_genai_perf(document: Mapping[str, Any], path: Path, tool: str) -> UserRun:
    names = ("input_sequence_length", "output_sequence_length", "time_to_first_token", "request_latency")
    n_in, n_out, ttft, e2e = (_number(document, path, name, "avg") for name in names)
    ttft_s, e2e_s = ttft * _unit(document, path, names[2]), e2e * _unit(document, path, names[3])
    return _check_order(
        UserRun(
            n_in, n_out, _number(document, path, "request_throughput", "avg"), ttft_s, e2e_s, f"{tool}, {path}",
            _p95(document, path, _unit(document, path, names[2])),
        )
    )  # fmt: skip


def _unit(document: Mapping[str, Any], path: Path, name: str) -> float:
    unit = document[name].get("unit")
    units = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
    if unit not in units:
        raise ConfigError(f"{path}: {name} in {unit!r:.40}", f"one of {', '.join(units)}", "check the file")
    return units[unit]


def _read_vllm(document: Mapping[str, Any], path: Path) -> UserRun:
    completed = _number(document, path, "completed")
    n_in, n_out = (_number(document, path, name) / completed for name in ("total_input_tokens", "total_output_tokens"))
    ttft_ms, tpot_ms = _number(document, path, "mean_ttft_ms"), _number(document, path, "mean_tpot_ms")
    e2e_ms = ttft_ms + tpot_ms * max(0.0, n_out - 1)  # vLLM's TPOT is without the first token
    rate = _number(document, path, "request_throughput")
    return _check_order(UserRun(n_in, n_out, rate, ttft_ms / 1e3, e2e_ms / 1e3, f"vLLM, {path}"))


def _number(document: Mapping[str, Any], path: Path, *names: str) -> float:
    value: Any = document
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_FIGURE:
        where = ".".join(names)
        raise ConfigError(
            f"{path}: {where} is {value!r:.40}", f"a number above 0, at most {_MAX_FIGURE:g}", "measure again"
        )
    return float(value)


def _check_order(result: UserRun) -> UserRun:
    if result.ttft_s > result.e2e_s:
        raise ConfigError(
            f"{result.source}: {result.ttft_s:.3g} s to the first token, {result.e2e_s:.3g} s to the last",
            "the first before the last", "check the file",
        )  # fmt: skip
    return result
