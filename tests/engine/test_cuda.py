"""The executor of a GPU on tensors of this CPU: all of it but its kernels, which tests/kernels/test_cuda.py has."""

import random
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes  # noqa: F401 - NumPy then knows bfloat16
import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray

from millrace.api.offline_generate import generate
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.passes.pipeline import gpu, pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda import host_device_copy
from millrace.engine.cuda.capability_check import check_gpu, precisions_used
from millrace.engine.cuda.device_constants import Loaded, _group_alike, _placed
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.graph_executor import DTYPES
from millrace.engine.cuda.sampling import top_values
from millrace.engine.executor import (
    SAMPLING,
    ExecutorLimits,
    SampleError,
    StepInputs,
    WindowLimits,
    plain_rows,
)
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.errors import CheckpointError, ConfigError, EngineError, MachineError
from millrace.graph.types import Node
from millrace.kernels.attention.op import window_of
from millrace.kernels.catalogue import operators
from millrace.kernels.matmul.coded import Matrix, QuantizedRows
from millrace.kernels.matmul.op import matrices_of
from millrace.model.module import trace_model
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from tests.runtime.fakes import RandomBudget
from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.engines import build, prompts_as_step
from tests.support.one_step import i32, packed
from tests.support.shared import shared

VOCAB = 1003
LIMITS = ExecutorLimits(
    max_step_tokens=256, max_sequences=8, max_rows=40, max_context=256, page_tokens=64, n_pages=16, vocab_size=VOCAB
)
PROMPTS = [np.random.default_rng(5).integers(0, VOCAB, n).tolist() for n in (3, 40, 1)]


def both(
    folder: Path,
    precision: str | Mapping[str, str],
    limits: ExecutorLimits = LIMITS,
    *,
    dtype: str = "",
    kv: KvFormat | None = None,
    fp8_rows: Collection[str] = (),
) -> tuple[CudaExecutor, ReferenceExecutor]:
    """dtype: of ours, where it is not the precision's; with fp32 all but the coded products is of float32"""
    source = Source.from_checkpoint(Checkpoint.open(folder))
    head = "fp32" if dtype == "fp32" else "bf16"
    wanted = precision_map(precision, head=head if isinstance(precision, str) and precision not in DTYPES else None)
    traced = trace_model(source.module, source.weights, operators())
    own = dtype or ("fp32" if precision == "fp32" else "bf16")
    whole = own == "fp32"
    windows = sorted({window_of(n) for n in traced.nodes if n.op == "attention"} - {0})
    n_slots = 2 * limits.max_sequences if any(n.op == "short_conv" for n in traced.nodes) else 0
    limits = replace(limits, windows=tuple(WindowLimits(w, limits.n_pages) for w in windows), n_slots=n_slots)
    exact = ReferenceExecutor(
        run_passes(traced, pipeline(wanted)), limits, kv=kv or (KvFormat.F32 if whole else KvFormat.BF16),
        bf16_table=not whole, fp8_rows=fp8_rows,
    )  # fmt: skip
    graph = run_passes(traced, gpu(wanted))
    return CudaExecutor(lower_for_gpu(graph, own, fp8_rows), limits, kv=kv, device="cpu"), exact


def apart(pair: tuple[CudaExecutor, ReferenceExecutor]) -> float:
    """In shares of the largest logit."""
    step = prompts_as_step(PROMPTS)
    ours, want = pair[0].logits(step).numpy(), pair[1].logits(step)
    return float(np.abs(ours - want).max() / np.abs(want).max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("precision", "dtype", "tolerance"), [
    ("fp32", "fp32", 2e-5), ("bf16", "bf16", 0.03), pytest.param("fp32", "fp16", 0.015, marks=pytest.mark.nightly),
])  # fmt: skip
def test_logits_agree(family: str, precision: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """16 bits round what a float32 kernel would keep, through all layers: bfloat16 to 8 of them, float16 to 11."""
    assert apart(both(random_checkpoint(tmp_path / "checkpoint", family, seed=5), precision, dtype=dtype)) <= tolerance


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, and sizes that groups do not divide."""
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen2", "qwen2", seed=5)


@pytest.mark.parametrize(("precision", "sharp", "plain"), [
    ("w8a16", 0.004, 0.03), ("w4a16", 0.004, 0.03), ("fp8a16", 0.004, 0.03), ("w8a8", 0.01, 0.06), ("w4a8", 0.01, 0.06),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_coded_weights_agree(dtype: str, precision: str, sharp: float, plain: float, biased: Path) -> None:
    """sharp: with all else in float32, where a row's rounding may still fall to the other side."""
    assert apart(both(biased, precision, dtype=dtype)) <= (sharp if dtype == "fp32" else plain)


def test_rows_of_fp8_agree(biased: Path) -> None:
    """Weights and activations of E4M3 but for the head: steps of 1/16, in which what was rounded otherwise shows."""
    names = {o for node in both(biased, "fp8a16")[0]._loaded.coded for o in node.origin}
    assert len(names) == 14 and "lm_head" not in names
    assert apart(both(biased, "fp8a16", dtype="fp32", fp8_rows=names)) <= 1e-5
    assert apart(both(biased, "fp8a16", fp8_rows=names)) <= 0.15


def test_rows_that_some_layers_have_in_fp8(biased: Path) -> None:
    """One norm, two readers: keys and values, of INT8 weights, get floats, not what queries make of them."""
    layers = {"default": "fp8a16", "lm_head": "fp32", "*.k_proj": "w8a16", "*.v_proj": "w8a16"}
    coded = both(biased, layers, dtype="fp32")[0]._loaded.coded
    names = {o for node in coded for o in node.origin if not o.endswith(("k_proj", "v_proj"))}
    assert len(names) == 10 and apart(both(biased, layers, dtype="fp32", fp8_rows=names)) <= 1e-5


@pytest.mark.parametrize(("kv", "sharp", "plain"), [(KvFormat.INT8, 0.001, 0.03), (KvFormat.FP8, 0.02, 0.06)])
def test_coded_pages_agree(kv: KvFormat, sharp: float, plain: float, biased: Path) -> None:
    """sharp: with all else in float32, but for queries and weights, which a CPU rounds to 16 bits over such pages."""
    for precision, tolerance in (("fp32", sharp), ("bf16", plain)):
        assert apart(both(biased, precision, kv=kv)) <= tolerance, precision


def test_pages_that_a_gpu_has_not_are_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", "gemma", seed=5)  # heads of 72
    with pytest.raises(EngineError, match="fp8 of heads of 72"):
        both(folder, "bf16", kv=KvFormat.FP8)
    with pytest.raises(EngineError, match="in int4 on a GPU"):
        both(folder, "bf16", kv=KvFormat.INT4)


def fake_gpu(name: str, major: int, minor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name=name, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.parametrize(("gpu", "precision", "dtype", "lacks"), [
    (("NVIDIA A100", 8, 0), "fp8a16", "bf16", "A100 (Ampere, sm_80) does not multiply fp8; it has fp16, bf16, int8"),
    (("NVIDIA L4", 8, 9), "fp8a16", "bf16", ""), (("NVIDIA A10", 8, 6), "w8a8", "fp16", ""),
    (("NVIDIA H200", 9, 0), "fp8a16", "bf16", ""), (("NVIDIA B300", 10, 3), "fp8a16", "bf16", ""),
    (("Tesla T4", 7, 5), "w8a8", "fp16", "no kernel for GPUs here runs on Tesla T4 (Turing, sm_75)"),
    (("Tesla P4", 6, 1), "w8a8", "fp16", "no kernel for GPUs here runs on Tesla P4 (before Volta, sm_61)"),
])  # fmt: skip
def test_a_gpu_without_the_precision_is_refused(
    gpu: tuple[str, int, int], precision: str, dtype: str, lacks: str, biased: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = both(biased, precision)[0]
    fake_gpu(*gpu, monkeypatch)
    needed = precisions_used(ours._lowered)
    if not lacks:
        check_gpu(torch.device("cuda"), needed)
        return
    with pytest.raises(ConfigError, match=re.escape(lacks)) as refused:
        check_gpu(torch.device("cuda"), needed)
    assert "Hopper (sm_90)" in refused.value.expected or "sm_80 on" in refused.value.expected


def test_no_gpu_is_one_clear_error(biased: Path) -> None:
    """Before a weight is read: where none is at hand, as here."""
    graph = both(biased, "bf16")[0]._graph
    with pytest.raises(MachineError, match="no GPU to run on"):
        CudaExecutor(lower_for_gpu(graph, "bf16"), LIMITS, device="cuda:7")


def test_what_is_used_is_asked_for(biased: Path) -> None:
    def used(precision: str, dtype: str, fp8_rows: Collection[str] = ()) -> tuple[str, ...]:
        return precisions_used(lower_for_gpu(both(biased, precision, dtype=dtype)[0]._graph, dtype, fp8_rows))

    assert used("fp32", "fp32") == () and used("bf16", "fp16") == ("fp16",) and used("w8a16", "fp32") == ("bf16",)
    assert used("w4a16", "bf16", ["model.layers.1.mlp.down_proj"]) == ("bf16", "fp8")
    assert precisions_used(both(biased, "bf16")[0]._lowered, KvFormat.FP8) == ("bf16", "fp8")


def step_of(chunks: list[tuple[list[int], int, list[int]]], rows: NDArray[np.void], **more: object) -> StepInputs:
    """chunks: tokens, the first one's position, pages"""
    lengths, pages = [len(c[0]) for c in chunks], [len(c[2]) for c in chunks]
    step = StepInputs(
        i32([t for c in chunks for t in c[0]]), i32([c[1] + i for c in chunks for i in range(len(c[0]))]),
        i32([0, *np.cumsum(lengths)]), i32([p for c in chunks for p in c[2]]), i32([0, *np.cumsum(pages)]), rows,
        i32([]), i32([]), np.zeros(0, np.float32),
    )  # fmt: skip
    return replace(step, **more)  # type: ignore[arg-type]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[CudaExecutor, ReferenceExecutor]:
    return both(random_checkpoint(tmp_path / "checkpoint", "llama", seed=6), "fp32")


@pytest.mark.parametrize(("kv", "tolerance"), [(None, 1e-4), (KvFormat.INT8, 0.01)])
def test_chunks_and_copied_pages(kv: KvFormat | None, tolerance: float, tmp_path: Path) -> None:
    """A prompt in chunks over a page's end, its neighbour decoding; then one that goes on from a copy of its page."""
    pair = both(random_checkpoint(tmp_path / "checkpoint", "llama", seed=6), "fp32", kv=kv)
    words = np.random.default_rng(3).integers(0, VOCAB, 150).tolist()

    def rows(*tokens: int) -> NDArray[np.void]:
        found = plain_rows(len(tokens))
        found["token"], found["n_top"] = tokens, 5
        return found

    steps = [
        step_of([(words[:60], 0, [3]), (words[100:103], 0, [9])], rows(59, 62)),
        step_of([(words[60:70], 60, [3, 5]), ([7], 3, [9])], rows(9, 10)),
        step_of([(words[70:140], 70, [3, 5, 11])], rows(0, 69)),
        step_of([(words[30:40], 30, [14])], rows(9), copies=i32([[3, 14]])),
    ]
    for step in steps:
        got, want = (executor.run(step) for executor in pair)
        assert got.tokens.tolist() == want.tokens.tolist() and got.top_ids.tolist() == want.top_ids.tolist()
        np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, atol=tolerance)
        np.testing.assert_array_equal(got.ranks, want.ranks)


def drawn_rows(rng: np.random.Generator, n: int) -> NDArray[np.void]:
    rows = np.zeros(n, SAMPLING)
    rows["token"], rows["choice"], rows["position"] = np.arange(n) % 43, rng.integers(0, 3, n), rng.integers(1, 200, n)
    rows["seed"] = rng.integers(0, 2**64, n, dtype=np.uint64)
    rows["top_k"], rows["top_p"] = rng.choice([0, 1, 7, 2000], n), rng.choice([1, 0.9, 0.3, 1e-6], n)
    rows["temperature"], rows["min_p"] = rng.choice([0, 0.7, 1.5], n), rng.choice([0, 0.05], n)
    rows["presence_penalty"], rows["frequency_penalty"] = rng.choice([0, 1.5], n), rng.choice([0, -0.5], n)
    rows["repetition_penalty"], rows["n_top"] = rng.choice([1, 1.3], n), rng.choice([-1, 0, 4], n)
    rows["history_start"], rows["history_prompt"] = rng.integers(0, 20, n), rng.integers(0, 20, n)
    rows["history_output"], rows["bias_start"] = rng.integers(0, 20, n), rng.integers(0, 4, n)
    rows["bias_count"], rows["target"] = rng.integers(0, 4, n), rng.choice([-1, -1, -1, 77], n)
    rows["mask"] = rng.choice([0, 0, 1, 2], n)
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_drawn_alike(seed: int, pair: tuple[CudaExecutor, ReferenceExecutor]) -> None:
    """Every term at once; of the reference row by row."""
    rng = np.random.default_rng(seed)
    masks = rng.random((2, VOCAB)) < 0.2
    step = replace(
        prompts_as_step(PROMPTS[:2]), sampling=drawn_rows(rng, 40), history=i32(rng.integers(0, VOCAB, 60)),
        bias_ids=i32(rng.permutation(VOCAB)[:8]), bias_values=rng.normal(0, 5, 8).astype(np.float32),
        masks=packed(*masks),
    )  # fmt: skip
    got, want = (executor.run(step) for executor in pair)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.top_ids, want.top_ids)
    np.testing.assert_array_equal(got.ranks, want.ranks)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, atol=1e-4)


def test_a_row_that_failed_is_alone(pair: tuple[CudaExecutor, ReferenceExecutor]) -> None:
    """Weights that are not finite for one token's sake; and a mask that allows nothing."""
    ours, _ = pair
    step = prompts_as_step([[5, 6, 7], [9, 10]])
    alone = ours.run(step)
    table = next(x for v, x in ours._loaded.tensors.items() if v.constant and "embed" in v.constant.origin[0])
    table[6] = float("nan")
    step.sampling["mask"] = [0, 1]
    of = replace(step, masks=packed(np.arange(VOCAB) == 11))
    assert ours.run(of).tokens.tolist() == [SampleError.NOT_FINITE, 11]
    of = replace(step, masks=packed(np.zeros(VOCAB, bool)))
    assert (
        ours.run(of).tokens.tolist() == [SampleError.NOT_FINITE, SampleError.NOTHING_ALLOWED]
        and (alone.tokens >= 0).all()
    )


@pytest.mark.parametrize(("dtype", "bad", "kind"), [
    ("bf16", float("nan"), "bfloat16"), ("fp32", float("inf"), "float32"), ("fp16", 70_000.0, "float16"),
])  # fmt: skip
def test_weights_that_are_no_numbers_are_refused_by_name(dtype: str, bad: float, kind: str, tmp_path: Path) -> None:
    """As a CPU's engine refuses them when it is built; 70,000 is more than float16 has."""
    name = "model.layers.1.mlp.down_proj.weight"
    folder = random_checkpoint(tmp_path, "llama", max_shard_size="1GB")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors[name][3, 5] = bad
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"layers.1.mlp.down_proj.*not finite, or too large for {kind}"):
        both(folder, "bf16" if dtype == "bf16" else "fp32", dtype=dtype)


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16", "float64", "int32"])
def test_what_stays_on_a_device_comes_there_in_slabs(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element once, whatever is left for the last slab; a row is longer than a slab, or some rows are one."""
    for slab in (1, 24, 100, 1 << 20):
        monkeypatch.setattr(host_device_copy, "SLAB_BYTES", slab)
        for shape in ((7, 5), (1, 3), (9,), (2, 3, 4)):
            x = (np.random.default_rng(1).standard_normal(shape) * 100).astype(np.dtype(given))
            for dtype in (torch.float32, torch.bfloat16) if given != "int32" else (torch.int32,):
                got = torch.empty(shape, dtype=dtype)
                host_device_copy.kept_on_device(x, got)
                want = torch.from_numpy(x.astype(np.float64)).to(dtype) if given != "int32" else torch.from_numpy(x)
                np.testing.assert_array_equal(got.float().numpy(), want.float().numpy())
                two = host_device_copy.rows_on_device([want, want[:1]], torch.device("cpu"))
                assert torch.equal(two, torch.cat([want, want[:1]]))


@pytest.mark.parametrize(
    "precision", ["bf16", "w8a8", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("fp8a16", "w4a16"))]
)
def test_gate_and_up_are_one_product(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows lie one behind the other, in one allocation; logits are those of two products."""
    ours = both(random_checkpoint(tmp_path / "checkpoint", "llama", seed=5), precision)[0]
    gated = [n for n in ours._graph.nodes if n.op == "gated_linear"]
    for node in gated:
        (whole,) = ours._loaded.matrices(node)
        rows = whole.codes if isinstance(whole, QuantizedRows) else whole
        assert len(rows) == 2 * node.output.width
        if isinstance(whole, torch.Tensor):
            gate, up = (ours._loaded.tensors[w] for w in matrices_of(node))
            assert torch.equal(torch.cat([gate, up]), whole) and gate.data_ptr() == whole.data_ptr()
    step = prompts_as_step(PROMPTS)
    together, halves = ours.logits(step), Loaded.matrices

    def apart(self: Loaded, node: Node) -> tuple[Matrix, ...]:
        found = halves(self, node)
        if len(found) == len(matrices_of(node)):
            return found
        (whole,), n = found, node.output.width
        return (whole.some(0, n), whole.some(n, 2 * n)) if isinstance(whole, QuantizedRows) else whole.split(n)

    monkeypatch.setattr(Loaded, "matrices", apart)
    torch.testing.assert_close(ours.logits(step), together, rtol=0.02, atol=0.02)


def test_matrices_that_are_coded_otherwise_stay_apart() -> None:
    """Such as a file's, one of them with minimums; neighbours that are alike are one."""
    rows = QuantizedRows(torch.zeros((2, 4), dtype=torch.int8), torch.ones((2, 1)), 4, 4)
    other = replace(rows, minimums=torch.ones((2, 1)))
    assert [len(part) for part in _group_alike([rows, rows, other, replace(rows, group=2), rows])] == [2, 1, 1, 1]
    (two,) = (_placed(part, torch.device("cpu")) for part in _group_alike([other, other]))
    assert two.codes.shape == (4, 4) and two.minimums is not None and torch.equal(two.dense(), torch.ones(4, 4))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_loop_tells_the_same_stories(seed: int, tmp_path: Path) -> None:
    """A model that was trained: whatever chunks are drawn, the answers are those of the CPU's engine."""
    folder = shared("models/stories260K")
    native = build(folder, tmp_path / "engine", "fp32", max_step_tokens=128)
    limits = replace(native.executor(n_pages=24).limits, n_pages=24)
    prompts = [[1], [1, 403, 407], list(range(300, 390)), [1, 403]]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=40) for i, t in enumerate((0.0, 0.8, 1.0, 0.0))]
    found = []
    for executor in (both(folder, "fp32", limits)[0], native.executor(n_pages=24)):
        budget = RandomBudget(limits.max_step_tokens, random.Random(seed))
        loop = EngineLoop(executor, open_tokenizer(folder), GenerationDefaults(), budget=budget)
        outputs = generate(loop, [{"prompt_token_ids": p} for p in prompts], params)
        found.append([o.outputs[0].token_ids for o in outputs])
        assert loop.stats().pages_used == 0
    assert found[0] == found[1] and {len(tokens) for tokens in found[0]} == {40}


@pytest.mark.parametrize("top", [0, 1, 3, 7, 9])
def test_the_likeliest_are_found_without_sorting_all(top: int) -> None:
    """As a stable sort has them: of equal ones the lower id first, of those that a mask forbids, too."""
    rng = np.random.default_rng(top)
    logits = torch.from_numpy(rng.choice([-np.inf, -1, 0, 2, 3], (200, 9), p=[0.4, 0.2, 0.2, 0.1, 0.1]))
    values, ids = top_values(logits, top)
    want = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, want.values[:, :top]) and torch.equal(ids, want.indices[:, :top])


def test_an_error_that_says_nothing_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "init", fails)
    with pytest.raises(MachineError, match="no GPU to run on: AssertionError"):
        check_gpu(torch.device("cuda"), ())
