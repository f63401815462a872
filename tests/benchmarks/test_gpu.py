"""The script for a GPU goes through all of its rows without one, and does each once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import rows as rows_
from benchmarks.gpu.model import LLAMA_8B, TINY, graph_of, weight_of
from benchmarks.gpu.roofline import Rates
from benchmarks.gpu.rows import ROWS, Bench, goals
from millrace.engine.cuda.loaded import load
from millrace.engine.cuda.random_weights import random_loaded
from millrace.errors import MachineError
from tests.support.shared import shared

PER_TOKEN = 6.98e9  # weights of the layers of Llama-3.1-8B, by its config: 32 * (2 * 4096^2 + 2 * 4096 * 1024 + ...)


def told(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("gpu-*.json")]
    return {f["row"]: f for f in found}


def test_a_dry_run_goes_through_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared("models/stories260K"))
    script.main(["--dry-run", "--out", str(tmp_path), "--model", model])
    found = told(tmp_path)
    assert list(found) and found.keys() == {row.name for row in ROWS}
    assert not any("refused" in f or f["goals"] for f in found.values())
    assert all(
        f["dry_run"] and f["shape"] == "tiny" and set(f["rates"]) == set(Rates.__slots__) for f in found.values()
    )
    assert found["checks"]["ok"] and len(found["checks"]["checks"]) == 15
    assert found["answers"]["models"][0]["kl"] <= 1e-3 and found["answers"]["ok"]
    assert all(f["ended"] and f["share_of_roofline"] > 0 for f in found.values() if "isl" in f)
    printed = capsys.readouterr().out
    assert "6 of 30,000 requests" in printed and "tokens_per_s" not in printed, "a dry run has no figures"
    script.main(["--dry-run", "--out", str(tmp_path), "--model", model])
    assert capsys.readouterr().out == "all rows are done\n" and len(list(tmp_path.iterdir())) == len(ROWS)


def test_no_row_is_begun_that_would_not_be_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--dry-run", "--out", str(tmp_path), "--minutes", "1", "--rows", "ttft-1024", "500/2000"])
    assert told(tmp_path).keys() == {"ttft-1024"}
    assert capsys.readouterr().out.endswith("left: 500/2000; run it again\n")


def test_what_is_asked_of_a_device_is_bounded() -> None:
    """Calls below 10 minutes, 25 in all; a tenth to a quarter of the table's requests."""
    assert sum(row.about_s for row in ROWS) <= 25 * 60 and max(row.about_s for row in ROWS) < 9 * 60
    table = [row.with_ for row in ROWS if row.run is rows_.throughput]
    assert len(table) == 6 and all(0.1 <= w["requests"] / w["of"] <= 0.25 for w in table)
    assert all(w["milestone"] < w["theirs"] < w["goal"] for w in table)
    judged = goals(next(r for r in ROWS if r.name == "128/128"), {"tokens_per_s": 30000.0})
    assert judged[0]["verdict"] == "milestone met, goal missed"
    assert goals(next(r for r in ROWS if r.name == "ttft-1024"), {"ttft_ms": 14.0})[0]["verdict"] == "goal met"


def test_without_a_device_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no GPU to run on"):
        script.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_row_that_is_refused_is_told_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nand more")

    with monkeypatch.context() as patched:
        patched.setattr(rows_, "random_executor", fails)
        script.main(["--dry-run", "--out", str(tmp_path), "--rows", "user-bf16"])
    assert told(tmp_path)["user-bf16"]["refused"] == "CUDA error: out of memory"
    assert not script.done(tmp_path, "tensors of a CPU")


def test_the_bound_counts_what_a_step_must_read_and_multiply() -> None:
    """By hand: weights or operations, whichever takes longer, then keys and values."""
    weight = weight_of(graph_of(LLAMA_8B, "fp8"))
    assert weight.bytes == pytest.approx(PER_TOKEN, rel=1e-3) == weight.operations / 2
    assert weight.head_bytes == 2 * 128256 * 4096 == weight.head_operations
    bench = Bench("cpu", Rates(read=1e9, copied=1e9, bf16=1e12, fp8=2e12), dry_run=True)
    executor, _ = bench.executor("fp8")
    w, kv = weight_of(executor._graph), 2 * TINY.n_layers * TINY.n_kv_heads * TINY.head_dim
    rows_.one_user(bench, rows_.Row("user", 1, rows_.one_user, {"precision": "fp8"}))
    contexts = [16, *range(17, 28)]  # a prompt of 16, then 11 tokens more
    want = 12 * (w.bytes + w.head_bytes) / 1e9 + sum(contexts) * kv / 1e9
    assert executor.bound_s == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w4a16", "w8a8"])
def test_random_weights_are_as_real_ones_lie(precision: str) -> None:
    """The same types, sizes and scales as those that are read and rounded, and no zeros."""
    graph, device = graph_of(TINY, precision), torch.device("cpu")
    drawn, real = random_loaded(graph, torch.bfloat16, device), load(graph, torch.bfloat16, device)
    assert drawn.tensors.keys() == real.tensors.keys() and drawn.coded.keys() == real.coded.keys()
    assert drawn.joined.keys() == real.joined.keys() and len(real.joined) == (precision == "bf16") * TINY.n_layers
    for value, x in real.tensors.items():
        assert (drawn.tensors[value].dtype, drawn.tensors[value].shape) == (x.dtype, x.shape)
    for node, matrices in real.coded.items():
        for a, b in zip(drawn.coded[node], matrices, strict=True):
            assert (a.codes.dtype, a.codes.shape) == (b.codes.dtype, b.codes.shape)
            assert (a.group, a.width, a.zero) == (b.group, b.width, b.zero)
            assert (a.scales.dtype, a.scales.shape, a.minimums) == (b.scales.dtype, b.scales.shape, None)
            w = a.dense().double().numpy()
            assert np.std(w) == pytest.approx(a.width**-0.5, rel=0.05) and abs(np.mean(w)) < 0.01
            full = 448 if precision == "fp8" else 7 if a.halves else 127  # the head of w4a16 is of INT8
            largest = np.abs(w).reshape(len(w), -1).max(1) / a.scales.double().numpy().max(1)
            assert (largest <= full * 1.001).all() and (largest > full * 0.99).mean() > 0.9
