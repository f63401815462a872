"""What is planned of a device's memory is what an executor takes: to the byte on tensors of this CPU, or at most."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.model import LLAMA_8B, TINY, graph_of
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.lower_gpu.memory import needs_of, page_bytes
from millrace.compile.passes.pipeline import gpu, run_passes
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.cuda_graphs import default_buckets
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.memory_plan import SHARE, MemoryNeeds, plan_device
from millrace.engine.cuda.sampling import SamplingMode
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import SAMPLING, ExecutorLimits, StepInputs
from millrace.errors import MachineError
from millrace.kernels import torch_reference
from millrace.kernels.catalogue import operators
from millrace.kernels.matmul.coded import QuantizedRows
from millrace.machine.devices import DEVICES, PROCESSOR
from millrace.model.module import trace_model
from tests.engine.test_cuda import LIMITS, both
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, write_gguf

BUCKETS = (1, 4)


def nbytes(*tensors: Tensor | QuantizedRows | None) -> int:
    parts = [p for x in tensors for p in ((x.codes, x.scales, x.minimums) if isinstance(x, QuantizedRows) else (x,))]
    return sum(p.nbytes for p in parts if p is not None)


def check_exactly(executor: CudaExecutor, dtype: str, kv: KvFormat | None) -> None:
    """Buckets are there once they were used."""
    for n in BUCKETS:
        executor.run(dummy_step([1] * n, 0, n, vocab=executor.limits.vocab_size))
    planned = needs_of(executor._lowered, executor.limits, kv=kv, buckets=BUCKETS)
    coded = [m for matrices in executor._loaded.coded.values() for m in matrices]
    assert planned.weights_bytes == nbytes(*executor._loaded.tensors.values(), *coded)
    pages = [x for p in executor._pages.values() for x in (p.keys, p.values, p.key_scales, p.value_scales)]
    pages_of_all = planned.page_bytes + sum(w.page_bytes for w in planned.windows)
    assert pages_of_all * (LIMITS.n_pages + 1) == nbytes(*pages)
    held = [(b._first_pages, b._starts, b._zeros, b._lines) for b in executor._inputs.values()]
    inputs = sum(nbytes(*tensors) for tensors in held)
    without = needs_of(executor._lowered, executor.limits, kv=kv)
    assert len(held) == 2 and inputs < planned.graphs_bytes and without.graphs_bytes == 0
    assert planned.graphs_bytes - inputs >= 4 * sum(BUCKETS) * executor.limits.vocab_size  # and what they compute


@pytest.mark.parametrize(("family", "precision", "kv"), [
    ("llama", "fp32", None), ("qwen2", "bf16", KvFormat.INT8), ("qwen2", "w4a16", None), ("gemma", "w8a16", None),
    ("qwen2", "w8a8", KvFormat.FP8), ("llama", "w4a8", None), ("qwen2", "fp8a16", KvFormat.INT8),
    ("gemma3_text", "bf16", KvFormat.INT8),
])  # fmt: skip
def test_what_lies_there_is_counted(family: str, precision: str, kv: KvFormat | None, tmp_path: Path) -> None:
    like = both(random_checkpoint(tmp_path / "checkpoint", family, seed=5), precision)[0]
    graph, limits, dtype = like._graph, like.limits, "fp32" if precision == "fp32" else "bf16"
    check_exactly(CudaExecutor(lower_for_gpu(graph, dtype), limits, kv=kv, buckets=BUCKETS, device="cpu"), dtype, kv)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q4_1, Kind.Q8_0])
def test_codes_of_a_file_are_counted(kind: Kind, tmp_path: Path) -> None:
    """With minimums, and scales in two levels, which become float32 on a device."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=4, **BLOCKY)
    source = Source.from_checkpoint(Checkpoint.open(write_gguf(tmp_path / "model.gguf", folder, kind)))
    graph = run_passes(trace_model(source.module, source.weights, operators()), gpu(source.own_precision))
    limits = replace(LIMITS, vocab_size=graph.outputs[0].value.width)
    executor = CudaExecutor(lower_for_gpu(graph, "bf16"), limits, buckets=BUCKETS, device="cpu")
    assert executor._loaded.coded
    check_exactly(executor, "bf16", None)


def largest(limits: ExecutorLimits) -> list[StepInputs]:
    """As many tokens as a step has, of one prompt and of many; all rows drawn in every way there is."""
    found = []
    for n in (1, limits.max_sequences):
        step = dummy_step([limits.max_step_tokens // n] * n, 0, max(4, n), vocab=limits.vocab_size)
        rows = np.zeros(limits.max_rows, SAMPLING)
        rows["seed"], rows["top_k"], rows["top_p"], rows["temperature"] = 1, 9, 0.9, 1
        rows["repetition_penalty"], rows["presence_penalty"], rows["n_top"], rows["mask"] = 1.1, 0.5, 5, 1
        masks = np.full((1, -(-limits.vocab_size // 32)), 2**32 - 1, np.uint32)
        found.append(replace(step, sampling=rows, masks=masks))
    return found


def max_allocated(executor: CudaExecutor, steps: list[StepInputs]) -> int:
    """The most bytes at a time that steps take beside what is there, by PyTorch's own book."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        for step in steps:
            executor.run(step)
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize(("precision", "width", "vocab"), [
    ("w8a8", 80, 503), ("bf16", 80, 9001),
    *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in (
        ("bf16", 80, 503), ("bf16", 320, 97), ("w4a16", 80, 503),
    )),
])  # fmt: skip
def test_what_a_step_computes_is_bounded(
    precision: str, width: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """From above, and not by far: an executor gives back what nobody reads any more. The kernel of a GPU draws from
    what is given, where here it would be sorted."""
    monkeypatch.setattr(torch_reference, "draw", lambda p, *_: p.argmax(1))
    config = replace(TINY, hidden_size=width, n_layers=6, max_context=256, vocab_size=vocab)
    limits = replace(LIMITS, max_rows=24, vocab_size=config.vocab_size)
    graph = graph_of(config, precision)
    executor = CudaExecutor(lower_for_gpu(graph, "bf16"), limits, device="cpu")
    planned = needs_of(lower_for_gpu(graph, "bf16"), limits).step_bytes
    taken = max_allocated(executor, largest(limits))
    assert taken <= planned <= 2 * taken


def test_what_a_captured_step_computes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its draws, which are most of it."""
    monkeypatch.setattr(torch_reference, "draw", lambda p, *_: p.argmax(1))
    graph, vocab = graph_of(replace(TINY, vocab_size=9001, max_context=256), "bf16"), 9001
    limits = replace(LIMITS, vocab_size=vocab)
    buckets = CudaExecutor(lower_for_gpu(graph, "bf16"), limits, buckets=(8,), device="cpu")
    planned = needs_of(lower_for_gpu(graph, "bf16"), limits, buckets=(8,)).graphs_bytes
    decode = dummy_step([1] * 8, 0, 8, vocab=vocab)
    decode.sampling["temperature"] = 1
    taken = max_allocated(buckets, [decode, decode])
    assert taken <= planned <= 3 * taken and list(buckets._replays) == [(8, SamplingMode.RANDOM)]


GRAPHS = cache(graph_of)
LIMITS_8B = ExecutorLimits(
    max_step_tokens=2048, max_sequences=64, max_rows=96, max_context=8192, page_tokens=64, n_pages=1, vocab_size=128256
)


def needs_8b(precision: str, kv: KvFormat | None = None, **limits: Any) -> MemoryNeeds:
    graph = GRAPHS(replace(LLAMA_8B, max_context=8192), precision)
    return needs_of(lower_for_gpu(graph, "bf16"), replace(LIMITS_8B, **limits), kv=kv, buckets=default_buckets(64))


def test_known_devices() -> None:
    """Llama-3.1-8B, by its config: 8.03e9 parameters, 131,072 bytes of BF16 for each token, a half in 8 bits."""
    plain, halves, eight = needs_8b("bf16"), needs_8b("w4a16"), needs_8b("fp8", KvFormat.FP8)
    assert plain.page_bytes == 64 * 131072 and eight.page_bytes == 64 * (65536 + 2 * 4 * 32 * 8)
    assert 2 * 8.03e9 < plain.weights_bytes < 2 * 8.06e9 and halves.weights_bytes < 6.1e9 < eight.weights_bytes < 9.2e9
    for device in DEVICES:
        if device.architecture == PROCESSOR or not device.memory_bytes:
            continue
        for needs in (plain, halves, eight):
            most = 10**9
            if needs.pages_in(device.memory_bytes) < 128:
                with pytest.raises(MachineError, match="may be used"):
                    plan_device(needs, device.memory_bytes, most)
                continue
            plan = plan_device(needs, device.memory_bytes, most)
            left = SHARE * device.memory_bytes - plan.total_bytes
            assert 0 <= left < needs.page_bytes, device.name
    fits = {d.name: plain.pages_in(d.memory_bytes) * 64 for d in DEVICES}
    assert fits["T4"] < 0 and fits["A10"] >= 8192 and fits["H200 SXM"] > 700_000
    assert halves.pages_in(16e9) * 64 > 8192, "a T4's memory"


def test_a_refusal_says_what_would_fit() -> None:
    """And that does."""
    needs, free = needs_8b("bf16"), 20.3e9
    smaller = [("--max-batch 8", needs_8b("bf16", max_sequences=8, max_rows=40)),
               ("--kv-cache-dtype int8", needs_8b("bf16", KvFormat.INT8)),
               ("--precision w4a16", needs_8b("w4a16"))]  # fmt: skip
    with pytest.raises(MachineError, match=r"weights 15.0 GiB.*KV pages 1024 MiB") as refused:
        plan_device(needs, free, 1000, smaller=smaller)
    context = int(re.findall(r"--max-context (\d+)", refused.value.fix)[0])
    assert context < 8192 and "--precision w4a16" in refused.value.fix
    assert plan_device(replace(needs, least_pages=context // 64), free, 1000).n_pages * 64 >= context
    for words, other in smaller:
        if words in refused.value.fix:
            assert plan_device(other, free, 1000).n_pages >= 128
        else:
            with pytest.raises(MachineError):
                plan_device(other, free, 1000)
    with pytest.raises(MachineError, match="less than one sequence"):
        plan_device(needs, 80e9, 1000, kv_memory=100 << 20)
    with pytest.raises(MachineError) as refused:
        plan_device(needs, 40e9, 1000, kv_memory=30 << 30)
    n = int(re.findall(r"--kv-memory (\d+)M", refused.value.fix)[0]) << 20
    assert plan_device(needs, 40e9, 1000, kv_memory=n).n_pages == n // needs.page_bytes
    with pytest.raises(MachineError, match="free memory of the GPU") as refused:
        plan_device(needs, 8e9, 1000)


sizes = st.integers(0, 1 << 36)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes, sizes, sizes, st.integers(1, 1 << 24), st.integers(1, 500), st.integers(1, 5000), sizes, sizes)
def test_no_plan_takes_more_than_there_is(
    weights: int, step: int, graphs: int, page: int, least: int, most: int, free: int, more: int
) -> None:
    """More memory is never less room, larger pages are never more of them."""
    needs = MemoryNeeds(weights, step, graphs, page, least)
    fits = needs.pages_in(free)
    if fits < least or most < least:
        with pytest.raises(MachineError):
            plan_device(needs, free, most)
    else:
        plan = plan_device(needs, free, most)
        assert plan.total_bytes <= SHARE * free and least <= plan.n_pages <= most
        assert plan.n_pages == most or needs.total_bytes(plan.n_pages + 1) > SHARE * free - 1
    assert needs.pages_in(free + more) >= fits
    if fits >= 0:
        assert replace(needs, page_bytes=page + 1).pages_in(free) <= fits
        assert replace(needs, weights_bytes=weights + more).pages_in(free) <= fits


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(1, 6), st.integers(1, 3), st.sampled_from([8, 16, 64]), st.integers(1, 3), st.integers(1, 60),
    st.sampled_from([None, KvFormat.INT8, KvFormat.FP8]),
)  # fmt: skip
def test_shapes(group: int, kv_heads: int, head: int, layers: int, batch: int, kv: KvFormat | None) -> None:
    """Whatever a model's shape: what it is given more of it takes more for, and pages as its heads say."""
    config = replace(TINY, n_heads=group * kv_heads, n_kv_heads=kv_heads, head_dim=head, n_layers=layers,
                     hidden_size=group * kv_heads * head)  # fmt: skip
    graph = graph_of(config, "bf16")
    limits = replace(LIMITS, max_sequences=batch, max_rows=batch + 32, vocab_size=config.vocab_size)
    needs = needs_of(lower_for_gpu(graph, "bf16"), limits, kv=kv, buckets=default_buckets(batch))
    element, scale = (2, 0) if kv is None else (1, 4)
    assert page_bytes(graph, 64, 2, kv) == needs.page_bytes == layers * kv_heads * 64 * 2 * (head * element + scale)
    larger = replace(limits, max_step_tokens=2 * limits.max_step_tokens, max_sequences=batch + 1, max_rows=batch + 40)
    wider = needs_of(lower_for_gpu(graph, "bf16"), larger, kv=kv, buckets=default_buckets(batch + 1))
    assert wider.step_bytes >= needs.step_bytes and wider.graphs_bytes > needs.graphs_bytes
    assert wider.weights_bytes == needs.weights_bytes and needs.least_pages == 4
