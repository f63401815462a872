"""Results of four tools are one run; what no hardware can do is refused; factors that made runs are found again."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size.answer.sizing import instance_of
from millrace.size.fit.overhead import MeasuredRun, replay
from millrace.size.fit.user_runs import UserRun, check_point, read_result, read_results, refit
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.measured_points import read_points
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import Waits
from tests.size.tables import SIZING, needs_tables

H100 = find_device("H100")
EIGHT = instance_of(PRESETS["llama-3-8b"], H100, "fp8", 1)
STACK = replace(profile(H100, "fp8").stack, sequences=64)
AVG: Mapping[str, tuple[float, str]] = {
    "input_sequence_length": (2000, "tokens"), "output_sequence_length": (200, "tokens"),
    "time_to_first_token": (489, "ms"), "request_latency": (2825, "ms"), "request_throughput": (8.85, "requests/sec"),
}  # fmt: skip
GENAI = {name: {"avg": value, "unit": unit} for name, (value, unit) in AVG.items()}
OURS = {
    "schema": 1, "valid": True, "requests_per_s": {"value": 8.85, "interval": None},
    "metrics": {name: {"unit": unit, "mean": value} for name, (value, unit) in AVG.items() if "throughput" not in name},
}  # fmt: skip
VLLM = {
    "completed": 500, "total_input_tokens": 1_000_000, "total_output_tokens": 100_000, "request_throughput": 8.85,
    "mean_ttft_ms": 489.0, "mean_tpot_ms": (2825 - 489) / 199, "max_concurrency": 25,
}  # fmt: skip


def written(path: Path, told: object) -> Path:
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("told, tool", [
    (OURS, "millrace bench"), (GENAI, "GenAI-Perf"), ({**GENAI, "schema_version": "1.4"}, "AIPerf"), (VLLM, "vLLM"),
])  # fmt: skip
def test_four_tools_tell_of_the_same_run(tmp_path: Path, told: object, tool: str) -> None:
    found = read_result(written(tmp_path / "summary.json", told))
    assert (found.n_input, found.n_output, found.rate) == (2000, 200, 8.85) and found.source.startswith(tool)
    assert (found.ttft_s, found.e2e_s, found.itl_s) == pytest.approx((0.489, 2.825, 2.336 / 199))
    assert found.concurrency == pytest.approx(25, rel=1e-3)
    assert read_results([tmp_path]) == [found], "a folder is its summary"


def test_units_are_read(tmp_path: Path) -> None:
    told = {
        **GENAI,
        "time_to_first_token": {"avg": 489e6, "unit": "ns"},
        "request_latency": {"avg": 2.825, "unit": "s"},
    }
    found = read_result(written(tmp_path / "a.json", told))
    assert (found.ttft_s, found.e2e_s) == pytest.approx((0.489, 2.825))


def of_runs(slower: float) -> list[UserRun]:
    """Runs of a stack that takes so many times as long for its steps."""
    stack = replace(
        STACK, prefill=STACK.prefill * slower, decode=STACK.decode * slower, cache=STACK.cache * slower,
        host_s=STACK.host_s * slower,
    )  # fmt: skip
    found = []
    for n, n_in, n_out in ((1, 400, 30), (8, 400, 30), (32, 400, 30), (32, 1500, 20), (16, 50, 60)):
        point = replay(MeasuredRun(EIGHT, Lengths(n_in, n_out), n, 1.0), stack).point
        found.append(UserRun(n_in, n_out, point.rate, point.mean.ttft_s, point.mean.e2e_s, f"run {n}"))
    return found


@pytest.mark.parametrize("n_runs", [1, 3, 5])
def test_a_refit_finds_how_much_slower_a_stack_is(n_runs: int) -> None:
    found = refit(of_runs(1.31)[-n_runs:], EIGHT, STACK)
    assert len(found.runs) == n_runs and found.before.rate.bias == pytest.approx(0.31, abs=0.06)
    assert found.after.rate.mape < 0.01 and "refitted to" in found.stack.name
    assert found.stack.prefill == pytest.approx(1.31 * STACK.prefill, rel=0.15)


@pytest.mark.parametrize("name, precision, tp, tokens_s, n_in", [
    ("llama-3-70b", "fp8", 1, 120, 100),  # published; bandwidth allows 47 at one request in flight
    ("llama-2-70b", "fp16", 2, 85, 100),  # published; two devices allow 48
    ("llama-3-8b", "fp8", 1, 6000, 100),
])  # fmt: skip
def test_published_runs_that_no_such_hardware_can_do(
    name: str, precision: str, tp: int, tokens_s: float, n_in: int
) -> None:
    e2e_s = 100 / tokens_s
    instance = instance_of(PRESETS[name], H100, precision, tp)
    with pytest.raises(ConfigError, match=r"page 7: [0-9.]+ times all bandwidth \(MBU\)"):
        refit([UserRun(n_in, 100, 1 / e2e_s, e2e_s / 100, e2e_s, "page 7")], instance)


def test_more_prompts_than_arithmetic_allows() -> None:
    with pytest.raises(ConfigError, match=r"times all arithmetic \(MFU\)"):
        refit([UserRun(8000, 10, 40.0, 0.2, 1.0, "a")], EIGHT)


@needs_tables
def test_figures_of_a_server_are_none_of_an_instance() -> None:
    """All published runs are possible; with the rate and speed of 8 GPUs on one, or of another model, none is."""
    points, _ = read_points(SIZING / "nim_dli_concurrency.csv")
    for name, size in (("llama-3-8b", "8b"), ("llama-3-70b", "70b")):
        ours = [p for p in points if size in p.model]
        for point in ours:
            check_point(point, PRESETS[name], "a row")
            waits = Waits(point.mean.ttft_s / 8, point.mean.itl_s / 8, point.mean.e2e_s / 8)
            if point.concurrency == 1 and point.tp == 1:
                with pytest.raises(ConfigError, match=r"of one instance, not of the server"):
                    check_point(replace(point, rate=point.rate * 8, mean=waits), PRESETS[name], "a row")
    large = [p for p in points if "8b" in p.model and p.concurrency == 1 and p.tp == 1]
    assert large
    for point in large:
        with pytest.raises(ConfigError, match="for llama-3-70b"):
            check_point(point, PRESETS["llama-3-70b"], "a row")


@pytest.mark.parametrize("told, said", [
    ([], "no object"), ({}, "no load generator that is known"), ({**OURS, "valid": False}, "did not keep up"),
    ({**GENAI, "request_latency": {"avg": -1, "unit": "ms"}}, "request_latency.avg is -1"),
    ({**GENAI, "request_latency": {"avg": 3, "unit": "fortnights"}}, "in 'fortnights'"),
    ({**GENAI, "request_latency": {"avg": 3, "unit": "ms"}}, "first before the last"),
    ({**GENAI, "time_to_first_token": 5}, "time_to_first_token.avg is None"),
    ({**VLLM, "completed": 0}, "completed is 0"), ({**VLLM, "mean_ttft_ms": "fast"}, "mean_ttft_ms is 'fast'"),
    ({**VLLM, "request_throughput": 1e999}, "request_throughput is inf"), ({**VLLM, "completed": True}, "is True"),
])  # fmt: skip
def test_files_that_tell_nothing_are_refused(tmp_path: Path, told: object, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_result(written(tmp_path / "a.json", told))
    assert said in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"])
def test_files_that_are_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"no JSON"):
        read_result(tmp_path / "a.json")


@pytest.mark.parametrize("wrong, said", [
    (lambda: read_result(Path("nowhere.json")), "cannot be read"), (lambda: refit([], EIGHT), "no results"),
    (lambda: read_results([Path("a")] * 1001), "1001 results"),
    (lambda: refit([UserRun(10, 5, 100.0, 1.0, 100.0, "a")], EIGHT), "10000 requests in flight"),
])  # fmt: skip
def test_what_cannot_be_refitted_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()
