"""The script for a GPU goes through all of its rows without one, and does each once."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import page_rows
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import bench as bench_
from benchmarks.gpu import checks, watched
from benchmarks.gpu import rows as rows_
from benchmarks.gpu.bench import MODEL_S, WAYS, Bench, Row
from benchmarks.gpu.model import LLAMA_8B, TINY, graph_of, weight_of
from benchmarks.gpu.profile import Kernel, table
from benchmarks.gpu.rows import ROWS, goals
from benchmarks.record import commit
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda import executor as executor_
from millrace.engine.cuda import graph_executor
from millrace.engine.cuda.device_constants import load
from millrace.engine.cuda.device_lookup import Gpu
from millrace.engine.cuda.device_roofline import DeviceRates
from millrace.engine.cuda.random_weights import random_loaded
from millrace.errors import MachineError
from millrace.kernels import gpu_launch, torch_reference
from tests.support.shared import shared

PER_TOKEN = 6.98e9  # weights of the layers of Llama-3.1-8B, by its config: 32 * (2 * 4096^2 + 2 * 4096 * 1024 + ...)


def told(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("gpu-*.json")]
    return {f["row"]: f for f in found}


def test_rows_are_done_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A check, one user and a row of the table; the same command again has nothing to do."""
    monkeypatch.setattr(script, "ROWS", tuple(r for r in ROWS if r.name in ("answers", "user-fp8", "128/128")))
    run = ["--dry-run", "--out", str(tmp_path), "--model", str(shared("models/stories260K"))]
    script.main(run)
    found = told(tmp_path)
    assert found.keys() == {"answers", "user-fp8", "128/128"}
    assert found["answers"]["models"][0]["kl"] <= 1e-3 and found["answers"]["ok"]
    assert found["128/128"]["ended"] and found["128/128"]["share_of_roofline"] > 0
    assert found["user-fp8"]["made"]["captures"] == 6 and found["user-fp8"]["made"]["memory"]["planned"] > 0
    assert "tokens_per_s" not in capsys.readouterr().out, "a dry run has no figures"
    script.main(run)
    assert capsys.readouterr().out == "all rows are done\n" and len(list(tmp_path.glob("gpu-*.json"))) == 3


@pytest.mark.nightly
def test_a_dry_run_goes_through_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(shared("models/stories260K"))
    script.main(["--dry-run", "--out", str(tmp_path), "--model", model])
    found = told(tmp_path)
    assert list(found) and found.keys() == {row.name for row in ROWS}
    assert not any("refused" in f or f["goals"] for f in found.values())
    assert all(
        f["dry_run"] and f["shape"] == "tiny" and set(f["rates"]["products"]) == {"fp32", "bf16", "fp8"}
        for f in found.values()
    )
    assert found["checks"]["ok"] and len(found["checks"]["checks"]) == 15 and found["encoders"]["ok"]
    assert found["answers"]["models"][0]["kl"] <= 1e-3 and found["answers"]["ok"]
    assert all(f["ended"] and f["share_of_roofline"] > 0 for f in found.values() if "isl" in f)
    profiled = found["profile-fp8"]["steps"]
    assert [s["what"] for s in profiled] == [
        "decode, 1 sequences",
        "decode, 2 sequences",
        "mixed, 2 sequences and 2 x 1 tokens",
    ]
    assert all(s["ms"] > 0 and s["busy_ms"] > 0 and s["kernels"][0]["us"] > 0 for s in profiled)
    assert found["user-fp8"]["made"]["captures"] == 6 and found["user-fp8"]["made"]["memory"]["planned"] > 0
    monkeypatch.setattr(page_rows, "of_kind", lambda kind: [("", {"date": "", **f}) for f in found.values()])
    page = {row[0].rpartition(": ")[2]: row[1] for row in page_rows._gpu()}
    assert page.keys() == found.keys() and "decode, 1 sequences: " in page["profile-fp8"]
    printed = capsys.readouterr().out
    assert "6 of 30,000 requests" in printed and "tokens_per_s" not in printed, "a dry run has no figures"
    script.main(["--dry-run", "--out", str(tmp_path), "--model", model])
    assert capsys.readouterr().out == "all rows are done\n" and len(list(tmp_path.glob("gpu-*.json"))) == len(ROWS)


def test_what_kernels_are_held_against_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain attention asks the device for the sequences' lengths, which ends a capture."""
    captured = list[object]()

    def seen(compute: Callable[[], torch.Tensor], graphs: object) -> Callable[[], torch.Tensor]:
        captured.append(compute)
        return compute

    monkeypatch.setattr(executor_, "captured", seen)
    found = checks._apart("tiny", "fp8", KvFormat.FP8, "cpu", [3, 40, 1, 70])
    assert found["ok"] and len(captured) == 2, "the kernels' decode steps, of four and of one"


def test_an_encoder_is_held_against_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel by its name, and a whole run; one that errs is seen, as is one that fails."""
    found = checks.encoders_agree("cpu", dry_run=True)
    assert [f["ok"] for f in found] == [True, True] and all(f["apart"] == 0 for f in found)
    assert all({"text_attention", "product"} <= f["by_kernel"].keys() for f in found)
    ours = SimpleNamespace(**vars(torch_reference))
    ours.text_attention = lambda heads, texts, scale: 2 * torch_reference.text_attention(heads, texts, scale)
    monkeypatch.setattr(graph_executor, "torch_reference", ours)
    assert [f["ok"] for f in checks.encoders_agree("cpu", dry_run=True)] == [False, False]
    ours.text_attention = lambda *_: 1 / 0
    assert all("ZeroDivisionError" in f["traceback"] for f in checks.encoders_agree("cpu", dry_run=True))


def test_no_row_is_begun_that_would_not_be_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--dry-run", "--out", str(tmp_path), "--minutes", "1", "--rows", "ttft-1024", "500/2000"])
    assert told(tmp_path).keys() == {"ttft-1024"}
    assert capsys.readouterr().out.endswith("left: 500/2000; run it again\n")


def test_what_is_asked_of_a_device_is_bounded() -> None:
    """15 minutes in all, models included, of which each is made once; a tenth to a quarter of the table's requests."""
    bench = Bench("cuda", DeviceRates(1, 1, {"bf16": 1, "fp8": 1}))
    models = [row.precision for row in ROWS if row.precision]
    assert len([a for a, b in pairwise(["", *models]) if a != b]) == len(set(models)) == 3
    assert sum(row.about_s for row in ROWS) + 3 * MODEL_S <= 15 * 60
    assert bench.seconds_of(ROWS[2]) == ROWS[2].about_s + MODEL_S and bench.seconds_of(ROWS[0]) == ROWS[0].about_s
    assert ROWS[0].first and not any(row.first for row in ROWS[1:])
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
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nand more")

    with monkeypatch.context() as patched:
        patched.setattr(bench_, "random_executor", fails)
        script.main(["--dry-run", "--out", str(tmp_path), "--rows", "user-bf16"])
    assert told(tmp_path)["user-bf16"]["refused"] == "CUDA error: out of memory"
    traceback = told(tmp_path)["user-bf16"]["traceback"]
    assert "RuntimeError: CUDA error: out of memory\nand more" in traceback and "in one_user" in traceback
    assert str(Path(script.__file__).parents[2]) not in traceback, "no paths of a machine"
    done, in_vain = script.tried(tmp_path, "tensors of a CPU", commit())
    assert not done and in_vain == {"user-bf16"}


def test_what_was_begun_in_vain_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that ends the process, whatever it is: the next run goes on behind it."""

    def ends(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "ROWS", tuple(r for r in ROWS if r.name in ("user-fp8", "ttft-1024")))
    with monkeypatch.context() as patched:
        patched.setattr(rows_, "prompts_of", ends)
        with pytest.raises(KeyboardInterrupt):
            script.main(["--dry-run", "--out", str(tmp_path), "--commit", "c0ffee"])
    assert not told(tmp_path)
    script.main(["--dry-run", "--out", str(tmp_path), "--commit", "c0ffee"])
    times = {row: f["time"] for row, f in told(tmp_path).items()}
    assert times.keys() == {"user-fp8", "ttft-1024"} and times["ttft-1024"] <= times["user-fp8"]
    assert all(f["commit"] == "c0ffee" for f in told(tmp_path).values())


def test_nothing_is_measured_of_what_does_not_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"what": "fp8", "precision": "fp8", "ok": False, "by_kernel": {"product": {"apart": 2, "of": "(3, 4)"}}}
    monkeypatch.setattr(rows_, "shape_agrees", lambda *_: [wrong])
    script.main(["--dry-run", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert told(tmp_path).keys() == {"first"} and "DOES NOT AGREE, fp8: product 2 of (3, 4)" in out
    assert len(told(tmp_path)["first"]["tried"]) == 3, "with overlap, without, and without graphs"
    script.main(["--dry-run", "--out", str(tmp_path)])
    assert told(tmp_path).keys() == {"first"} and "nothing is measured" in capsys.readouterr().out


def test_a_row_goes_the_way_in_which_most_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 agrees in none, BF16 where nothing overlaps; so is what comes behind, in this run and in the next."""

    def agrees(device: str, dry_run: bool, graphs: bool) -> list[dict[str, Any]]:
        right = {"fp8": False, "bf16": not gpu_launch.OVERLAP}
        return [{"what": p, "precision": p, "ok": ok, "traceback": "E\nin product"} for p, ok in right.items()]

    monkeypatch.setattr(rows_, "shape_agrees", agrees)
    names = ("first", "user-fp8", "user-bf16", "ttft-1024", "answers")
    monkeypatch.setattr(script, "ROWS", tuple(r for r in ROWS if r.name in names[:3]))
    script.main(["--dry-run", "--out", str(tmp_path)])
    found, way = told(tmp_path), {"overlap": False, "graphs": True}
    assert found.keys() == {"first", "user-bf16"} and found["first"]["ok"]
    assert [one["agree"] for one in found["first"]["tried"]] == [[], ["bf16"], ["bf16"]]
    assert found["first"]["way"] == found["user-bf16"]["way"] == way and gpu_launch.OVERLAP
    monkeypatch.setattr(script, "ROWS", tuple(r for r in ROWS if r.name in names))
    script.main(["--dry-run", "--out", str(tmp_path)])
    assert told(tmp_path).keys() == {"first", "user-bf16", "answers"} and told(tmp_path)["answers"]["way"] == way


def test_a_first_row_that_ends_the_process_goes_on_with_less(tmp_path: Path) -> None:
    ways = []
    for _ in range(4):
        ways.append(script.known_way(tmp_path, "tensors of a CPU", "c0ffee"))
        begun = "c0ffee first\nc0ffee answers\nother first\n" * len(ways)
        (tmp_path / script.BEGUN).write_text(begun)
    assert ways == [(way, None) for way in (*WAYS, WAYS[-1])]


def test_a_capture_that_fails_is_told_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(executor_, "captured", fails)
    bench = Bench("cpu", DeviceRates(1e9, 1e9, {"bf16": 1e12, "fp8": 2e12}), dry_run=True)
    found = rows_.one_user(bench, Row("user", 1, rows_.one_user, "fp8"))
    assert found["tokens_per_s"] > 0 and found["made"]["captures"] == 0
    assert "not permitted when stream is capturing" in found["made"]["without_graphs"]


def test_overlap_is_off_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured with it is there again behind that."""
    seen = []
    monkeypatch.setattr(rows_, "_one_user", lambda executor, *_: seen.append((gpu_launch.OVERLAP, executor.captures())))
    bench = Bench("cpu", DeviceRates(1e9, 1e9, {"bf16": 1e12, "fp8": 2e12}), dry_run=True)
    before = bench.executor("fp8").captures()
    rows_.without_overlap(bench, next(row for row in ROWS if row.run is rows_.without_overlap))
    assert seen == [(False, 1)] and gpu_launch.OVERLAP and bench.executor("fp8").captures() == before > 1


def test_a_kernel_that_errs_is_named_with_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives what is no number, and one that fails; plain PyTorch is nowhere captured: it waits."""
    wrong = SimpleNamespace(**{name: getattr(torch_reference, name) for name in dir(torch_reference)})
    wrong.silu_mul = lambda *given: torch_reference.add_norm(*given)
    found = checks._apart("tiny", "bf16", None, "cpu", [3, 40])
    assert found["ok"] and found["by_kernel"].keys() >= {"product", "silu_mul", "keep_rotated", "attention"}
    monkeypatch.setattr(graph_executor, "torch_reference", wrong)
    found = checks._apart("tiny", "bf16", None, "cpu", [3, 40])
    assert not found["ok"] and "in silu_mul of bfloat16 (43, 208), strides (416, 1), bfloat16" in found["traceback"]
    wrong.silu_mul = lambda *given: torch_reference.silu_mul(*given) * torch.nan
    found = checks._apart("tiny", "bf16", None, "cpu", [3, 40])
    assert not found["ok"] and found["apart"] == np.inf and found["by_kernel"]["product"]["apart"] == 0
    assert found["by_kernel"]["silu_mul"]["apart"] == np.inf
    monkeypatch.setattr(executor_, "captured", lambda compute, *_: _not_plain(compute, wrong))
    wrong.silu_mul = torch_reference.silu_mul
    assert checks._apart("tiny", "bf16", None, "cpu", [3, 40, 1, 70])["ok"]


def test_what_cannot_be_held_against_plain_pytorch_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise NotImplementedError("no such operator of E4M3 on this device")

    monkeypatch.setattr(watched, "_floats", fails)
    found = checks._apart("tiny", "bf16", None, "cpu", [3, 40])
    assert found["ok"] and "no such operator" in found["by_kernel"]["product"]["traceback"]


def _not_plain(compute: Any, kernels: Any) -> Any:
    assert compute.func.__self__._kernels is kernels
    return compute


def test_rates_that_cannot_be_measured_are_the_datasheet_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MachineError("it failed", "a GPU that works", "see nvidia-smi")

    monkeypatch.setattr(script, "gpu_of", lambda device: Gpu("cpu", "NVIDIA H200", (9, 0), 1 << 30, 132))
    monkeypatch.setattr(script, "measured", fails)
    rates, why = script.rates_of("cuda")
    assert rates.read == 4800e9 and rates.products["fp8"] > rates.products["bf16"] and "it failed" in why


def test_a_device_that_has_failed_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of it afterwards fails alike, and would be told of every row."""

    def fails(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")

    monkeypatch.setattr(rows_, "prompts_of", fails)
    monkeypatch.setattr(script, "wait_for", fails)
    with pytest.raises(SystemExit, match="the device has failed"):
        script.main(["--dry-run", "--out", str(tmp_path), "--rows", "user-fp8", "ttft-1024"])
    found = told(tmp_path)
    assert found.keys() == {"user-fp8"} and "illegal memory access" in found["user-fp8"]["refused"]


def test_a_table_of_kernels_counts_what_overlaps_once() -> None:
    """Two steps by hand: a, then b that begins before a ends, then nothing for 5 us, then a again."""
    two = [Kernel("a", 0, 10), Kernel("b", 8, 12), Kernel("a", 17, 20)]
    found = table([*two, *(Kernel(k.name, k.begin + 100, k.end + 100) for k in two)], 2)
    assert found["busy_ms"] == pytest.approx(15e-3) and found["kernels_a_step"] == 3
    assert found["gaps_ms"] == pytest.approx((5 + 80 + 5) / 2 * 1e-3)
    assert [(k["name"], k["a_step"], k["us"]) for k in found["kernels"]] == [("a", 2, 13), ("b", 1, 4)]
    assert [(g["between"], g["us"]) for g in found["gaps"]] == [("a | a", 40), ("b | a", 5)]
    assert table([], 1)["busy_ms"] == 0


def test_the_bound_counts_what_a_step_must_read_and_multiply() -> None:
    """By hand: weights or operations, whichever takes longer, then keys and values."""
    weight = weight_of(graph_of(LLAMA_8B, "fp8"))
    assert weight.bytes == pytest.approx(PER_TOKEN, rel=1e-3) == weight.operations / 2
    assert weight.head_bytes == 2 * 128256 * 4096 == weight.head_operations
    bench = Bench("cpu", DeviceRates(1e9, 1e9, {"bf16": 1e12, "fp8": 2e12}), dry_run=True)
    executor = bench.executor("fp8")
    w, kv = weight_of(executor._graph), 2 * TINY.n_layers * TINY.n_kv_heads * TINY.head_dim
    rows_.one_user(bench, Row("user", 1, rows_.one_user, "fp8"))
    contexts = [16, *range(17, 28)]  # a prompt of 16, then 11 tokens more
    want = 12 * (w.bytes + w.head_bytes) / 1e9 + sum(contexts) * kv / 1e9
    assert executor.bound_s == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w4a16", "w8a8"])
def test_random_weights_are_as_real_ones_lie(precision: str) -> None:
    """The same types, sizes and scales as those that are read and rounded, and no zeros."""
    lowered, device = lower_for_gpu(graph_of(TINY, precision), "bf16"), torch.device("cpu")
    drawn, real = random_loaded(lowered, torch.bfloat16, device), load(lowered, torch.bfloat16, device)
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
