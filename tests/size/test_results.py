"""Results of four tools as points: one load written in each one's words, what is impossible, what is no result."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size.constants import profile
from millrace.size.measured import read_points
from millrace.size.models import PRESETS
from millrace.size.plan import instance_of
from millrace.size.points import Point
from millrace.size.results import compared, fitted, read_result, write_table
from millrace.size.served import served

INSTANCE = instance_of(PRESETS["llama-3-8b"], find_device("H100"), "fp8", 1)


def summary(mean: str, mean_value: float, p95: float) -> dict[str, float]:
    return {mean: mean_value, "p95": p95}


def ours() -> dict[str, Any]:
    return {
        "valid": True, "requests_per_s": {"value": 8.85},
        "metrics": {
            "time_to_first_token": summary("mean", 489.5, 640), "request_latency": summary("mean", 2825, 3000),
            "inter_token_latency": summary("mean", 11.73, 13), "input_sequence_length": {"mean": 2000},
            "output_sequence_length": {"mean": 200},
        },
    }  # fmt: skip


def genai_perf() -> dict[str, Any]:
    return {
        "request_throughput": {"avg": 8.85}, "time_to_first_token": summary("avg", 489.5, 640),
        "request_latency": summary("avg", 2825, 3000), "inter_token_latency": summary("avg", 11.73, 13),
        "input_sequence_length": {"avg": 2000}, "output_sequence_length": {"avg": 200},
    }  # fmt: skip


def vllm() -> dict[str, Any]:
    return {
        "request_throughput": 8.85, "completed": 50, "total_input_tokens": 100_000, "total_output_tokens": 10_000,
        "mean_ttft_ms": 489.5, "mean_tpot_ms": (2825 - 489.5) / 199, "p95_ttft_ms": 640, "p95_tpot_ms": 13,
        "p95_e2el_ms": 3000,
    }  # fmt: skip


def written(tmp_path: Path, told: object, name: str = "r.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("told", [ours(), genai_perf(), vllm()], ids=["millrace", "genai-perf", "vllm"])
def test_one_load_is_one_point(tmp_path: Path, told: dict[str, Any]) -> None:
    found = read_result(written(tmp_path, told), INSTANCE)
    assert (found.input_tokens, found.output_tokens, found.rate) == (2000, 200, 8.85)
    assert found.concurrency == pytest.approx(25, abs=0.01), "Little's law"
    assert found.mean.ttft_s == 0.4895 and found.mean.e2e_s == pytest.approx(2.825)
    assert found.mean.itl_s == pytest.approx((2.825 - 0.4895) / 199)
    assert found.p95 is not None and found.p95.ttft_s == 0.64 and found.p95.e2e_s == 3


def test_a_folder_of_ours(tmp_path: Path) -> None:
    written(tmp_path, ours(), "summary.json")
    assert read_result(tmp_path, INSTANCE).rate == 8.85


def test_what_is_written_is_read_as_a_table(tmp_path: Path) -> None:
    point = read_result(written(tmp_path, ours()), INSTANCE)
    without = read_result(written(tmp_path, {**vllm(), "p95_ttft_ms": None}), INSTANCE)
    write_table(tmp_path / "runs.csv", [point, without])
    (first, second), left_out = read_points(tmp_path / "runs.csv")
    assert left_out == 0 and second.p95 is None
    assert first.mean.e2e_s == pytest.approx(point.mean.e2e_s) and first.p95 is not None
    assert (first.model, first.device, first.precision, first.tp) == ("llama-3-8b", "H100 SXM", "fp8", 1)
    assert first.rate == 8.85 and first.concurrency == point.concurrency


def slower(point: Point, times: float) -> dict[str, Any]:
    told = ours()
    told["requests_per_s"] = {"value": point.rate / times}
    told["metrics"]["time_to_first_token"] = {"mean": point.mean.ttft_s * 1e3 * times}
    told["metrics"]["request_latency"] = {"mean": point.mean.e2e_s * 1e3 * times}
    return told


def test_the_factor_of_software_that_takes_so_much_longer(tmp_path: Path) -> None:
    """Three loads as they are computed, times 1.31: that is the factor, and nothing is left unexplained."""
    known = profile(INSTANCE.device, "fp8")
    rows = []
    for n in (1, 8, 64):
        path = written(tmp_path, slower(served(INSTANCE, known, (2000, 200), n), 1.31), f"{n}.json")
        rows.append(compared(path.name, read_result(path, INSTANCE), INSTANCE))
    found = fitted(rows, INSTANCE)
    assert found.factor == pytest.approx(1.31, rel=0.01)
    assert found.after < 0.01 and found.before == pytest.approx(0.31, abs=0.01)


def test_what_no_such_device_can_do_is_refused(tmp_path: Path) -> None:
    """Llama-3.3-70B in 8 bits on one H100, a token each 8.3 ms alone: its bandwidth allows 47 a second."""
    big = instance_of(PRESETS["llama-3-70b"], find_device("H100"), "fp8", 1)
    told = {**vllm(), "request_throughput": 0.5, "mean_ttft_ms": 340, "mean_tpot_ms": 8.33}
    with pytest.raises(ConfigError, match=r"r\.json: llama-3-70b on 1 x H100 SXM, 1 at once: a decode step of 8\.3"):
        read_result(written(tmp_path, told), big)


@pytest.mark.parametrize("told, said", [
    ([], "holds no result"), ({}, "no result that is known"), ({**ours(), "valid": False}, "did not keep up"),
    ({**vllm(), "completed": 0}, "a whole result of vllm"), ({**vllm(), "mean_ttft_ms": -1}, "ttft_ms is -1"),
    ({**vllm(), "mean_ttft_ms": "fast"}, "a whole result of vllm"),
    ({**genai_perf(), "request_latency": {"p50": 5}}, "no 'avg'"),
    ({**genai_perf(), "request_latency": summary("avg", 100, 100)}, "first token comes after the last"),
    ({**genai_perf(), "request_throughput": {"avg": float("nan")}}, "req_s is nan"),
])  # fmt: skip
def test_what_is_no_result(tmp_path: Path, told: object, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_result(written(tmp_path, told), INSTANCE)
    assert said in str(found.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_result(tmp_path / "none.json", INSTANCE)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        read_result(tmp_path / "x.json", INSTANCE)
