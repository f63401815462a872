"""`millrace doctor`: what it says of this machine, and of machines that are worse off."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.doctor.run import _warnings
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import BF16_BY_TILES
from millrace.machine.cpu import usable_cores
from tests.cli.conftest import Millrace
from tests.engine.test_transformers import gpt2, write_checkpoint

HEALTHY: dict[str, Any] = {
    "isas": ["avx512", "avx2", "scalar"], "lacking": {}, "cores": 8, "cores_by_affinity": 8, "cores_by_quota": None,
    "memory_available_bytes": 64 << 30, "huge_pages": "madvise", "huge_page_share": 1.0, "load": 0.1,
}  # fmt: skip


def test_json_has_all_figures(millrace: Millrace, measured: list[tuple[str, int]]) -> None:
    told = json.loads(millrace("doctor", "--json").out)
    assert measured == [(usable_isas()[0], usable_cores())]
    assert told["cores"] >= 1 and told["memory_bytes"] > 0 and told["isas"][-1] == "scalar"
    assert 0 <= told["huge_page_share"] <= 1
    levels = list(told["read_gb_per_s"].values())
    assert list(told["read_gb_per_s"])[-1] == "DRAM"
    assert all(x["all_threads"]["best"] >= x["all_threads"]["usual"] >= x["all_threads"]["median"] > 0 for x in levels)
    assert [p for p in told["compute_gop_per_s"] if p != BF16_BY_TILES] == ["fp32", "bf16", "w8a8", "w4a8"]
    assert (BF16_BY_TILES in told["compute_gop_per_s"]) == ("amx" in told["isas"])
    assert all(x["one_thread"]["usual"] > 0 for x in told["compute_gop_per_s"].values())


def test_the_screen(millrace: Millrace, measured: list[tuple[str, int]]) -> None:
    isa = usable_isas()[-1]
    out = millrace("doctor", "--isa", isa, "--threads", "1").out
    for said in ("processor", "instructions", "cores", "caches", "memory", "huge pages", "DRAM", "w4a8"):
        assert said in out
    assert f"Reading, GB/s ({isa})" in out and measured == [(isa, 1)]


def test_wrong_flags(millrace: Millrace) -> None:
    millrace("doctor", "--isa", "mmx").assert_mistake('"mmx" cannot run here')
    millrace("doctor", "--threads", "0").assert_mistake("0 is not in the range")


def test_a_healthy_machine_gets_no_warning() -> None:
    assert _warnings(HEALTHY) == []


@pytest.mark.parametrize(
    "worse, what, fix",
    [
        ({"huge_pages": "never"}, "switched off", "transparent_hugepage"),
        ({"huge_page_share": 0.2}, "only 20%", "compact"),
        ({"cores_by_quota": 2.5}, "2.5 cores' worth", "--threads 2"),
        ({"isas": ["avx2", "scalar"], "lacking": {"avx512": ["avx512f"]}}, "lacking: avx512f", "newer"),
        ({"memory_available_bytes": 1 << 30}, "only 1 GiB", "free memory"),
        ({"load": 7.5}, "load 7.5", "stop them"),
    ],
)
def test_what_holds_a_machine_back_is_said_with_a_fix(worse: dict[str, Any], what: str, fix: str) -> None:
    ((said, fix_said),) = _warnings({**HEALTHY, **worse})
    assert what in said and fix in fix_said


def test_a_model_that_runs_natively(millrace: Millrace) -> None:
    report = json.loads(millrace("doctor", "tiny", "--json").out)
    assert report == {
        "model": "tiny", "architecture": "LlamaForCausalLM", "implementation": "native", "lacks": {},
        "command": "millrace serve tiny",
    }  # fmt: skip
    assert "native        runs" in millrace("doctor", "tiny").out
    millrace("doctor", "tiny", "--isa", "avx2").assert_mistake("--isa", "MODEL")


def test_a_model_that_runs_through_transformers_alone(millrace: Millrace, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gpt2)
    report = json.loads(millrace("doctor", str(tmp_path), "--json").out)
    assert (report["architecture"], report["implementation"]) == ("GPT2LMHeadModel", "transformers")
    assert list(report["lacks"]) == ["native"] and "GPT2LMHeadModel" in report["lacks"]["native"]
    assert report["command"] == f"millrace serve {tmp_path} --model-impl transformers"


def test_a_folder_that_nothing_runs(millrace: Millrace, tmp_path: Path) -> None:
    report = json.loads(millrace("doctor", str(tmp_path), "--json").out)
    assert report["implementation"] is None and set(report["lacks"]) == {"native", "transformers"}
