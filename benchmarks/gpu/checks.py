"""Whether a device computes what it should: its kernels beside plain PyTorch there, its answers beside the CPU's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.failures import FAILURES, traced
from benchmarks.gpu.model import LLAMA_8B, PRECISIONS, TINY, graph_of, lowered_graph
from benchmarks.gpu.watched import Watched, apart
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.passes.pipeline import gpu, pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.random_weights import source_of
from millrace.compile.source import Source
from millrace.engine.cache_specs import PAGE_TOKENS, KvFormat
from millrace.engine.cuda.device_lookup import CPU
from millrace.engine.cuda.device_roofline import wait_for
from millrace.engine.cuda.encoder_executor import CudaEncoderExecutor
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.random_weights import random_loaded
from millrace.engine.dummy_step import dummy_step
from millrace.engine.encoder_inputs import text_inputs
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.kernels import torch_reference, triton_kernels
from millrace.kernels.catalogue import operators
from millrace.model.module import trace_model

# Of the largest logit: roundings to 16 and 8 bits that fall to the other side, through all layers.
TOLERANCE = {"bf16": 0.03, "w8a16": 0.03, "w4a16": 0.03, "w8a8": 0.06, "fp8": 0.15}
MAX_KL = 1e-3  # in BF16, of a real model, in nats a token
PAGES_EACH = 4  # of a sequence's context
LENGTHS = [128, 5, 130, 200]  # of prompts
DRAWN_ROWS = 33
TEXTS, LENGTH = 4, 96  # random tokens of each text that is compared
MINILM = EncoderConfig(
    architecture="BertModel", hidden_size=384, intermediate_size=1536, n_layers=6, n_heads=12, vocab_size=3000,
    max_positions=512, n_types=2, norm_eps=1e-12, activation="gelu", max_context=512,
)  # fmt: skip
ENCODED, ENCODED_MOST = [1, 16, 17, 64, 65, 200, 512], {"T": 1024, "S": 16}  # tokens of texts; of a run


def limits_of(vocab: int, context: int = 256) -> ExecutorLimits:
    return ExecutorLimits(
        max_step_tokens=1024, max_sequences=8, max_rows=8, max_context=context, page_tokens=PAGE_TOKENS, n_pages=32,
        vocab_size=vocab,
    )  # fmt: skip


def kernels_agree(device: str, dry_run: bool) -> list[dict[str, Any]]:
    """Every precision and kind of page, in prompts of odd lengths and in steps of buckets, over shapes that nothing
    divides; then two layers of the real shape in the precisions that `shape_agrees` leaves out."""
    found = []
    for precision in PRECISIONS:
        for kv in (None, KvFormat.INT8, KvFormat.FP8):
            found.append(_apart("tiny", precision, kv, device, [3, 40, 1, 70]))
    if not dry_run:
        found += [_apart("two layers", precision, KvFormat.INT8, device, LENGTHS) for precision in ("w8a16", "w8a8")]
    return found


def shape_agrees(device: str, dry_run: bool, graphs: bool = True) -> list[dict[str, Any]]:
    """What is measured, of few rows and of many: each precision whatever becomes of the others."""
    name = "tiny" if dry_run else "two layers"
    measured = (("fp8", KvFormat.FP8), ("bf16", None), ("w4a16", None))
    return [_apart(name, precision, kv, device, LENGTHS, graphs) for precision, kv in measured]


def _apart(
    name: str, precision: str, kv: KvFormat | None, device: str, lengths: list[int], graphs: bool = True
) -> dict[str, Any]:  # fmt: skip
    """by_kernel: how far each is from plain PyTorch, one at a time; apart: all of them in turn, replayed where graphs
    are. What fails is told with its traceback, which names the kernel."""
    what = f"{name}, {precision}, pages {kv.name.lower() if kv else 'bf16'}, {len(lengths)} sequences"
    told: dict[str, Any] = {"what": what, "precision": precision, "by_kernel": {}}
    try:
        return {**told, **_compared(name, precision, kv, device, lengths, graphs, told["by_kernel"])}
    except FAILURES:
        wait_for(torch.device(device))  # raises where the device has failed with it: no row goes on there
        return {**told, "ok": False, "traceback": traced()}


def _compared(
    name: str, precision: str, kv: KvFormat | None, device: str, lengths: list[int], graphs: bool,
    by_kernel: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    config = replace(TINY if name == "tiny" else replace(LLAMA_8B, n_layers=2), max_context=256)
    lowered = lowered_graph(graph_of(config, precision), precision)
    executor = CudaExecutor(lowered, limits_of(config.vocab_size), kv=kv, buckets=(1, 4) if graphs else (),
                            device=device, load=random_loaded)  # fmt: skip
    n, buckets, kernels = len(lengths), executor._buckets, executor._kernels
    vocab = config.vocab_size
    steps = [
        dummy_step(lengths, 0, PAGES_EACH * n, vocab=vocab),
        *(_decode(some, vocab) for some in (lengths, lengths[:1])),
    ]

    def logits(used: Any, buckets: tuple[int, ...]) -> list[Tensor]:
        executor._kernels, executor._buckets = used, buckets
        return [executor.logits(step).clone() for step in steps]

    logits(Watched(kernels, executor.device, by_kernel).kernels(), ())  # one at a time, before several may be at fault
    got, want = (
        logits(kernels, buckets),
        logits(torch_reference, ()),
    )  # which waits for the device: nothing that is captured may
    worst = max(map(apart, got, want))
    bound = max(TOLERANCE[precision], 0.06 if kv else 0)
    return {"apart": worst, "bound": bound, "kernels": _named(kernels), "ok": bool(worst <= bound)}


def encoders_agree(device: str, dry_run: bool) -> list[dict[str, Any]]:
    """Vectors of texts by an encoder of random weights, MiniLM's shape, beside plain PyTorch on the same device."""
    config = replace(MINILM, n_layers=1, n_heads=3, hidden_size=48, intermediate_size=80) if dry_run else MINILM
    source = source_of(config)
    graph, rng = trace_model(source.module, source.weights, operators()), np.random.default_rng(4)
    texts = [rng.integers(0, config.vocab_size, n, dtype=np.int32) for n in ENCODED]
    found = []
    for precision in ("bf16", "w8a8"):
        told: dict[str, Any] = {"what": f"encoder, {precision}, {len(texts)} texts", "by_kernel": {}}
        try:
            lowered = lower_for_gpu(run_passes(graph, gpu(precision_map(precision))), "bf16")
            network = CudaEncoderExecutor(lowered, ENCODED_MOST, device=device)
            worst = _vectors_apart(network, texts, told["by_kernel"])
        except FAILURES:
            wait_for(torch.device(device))
            found.append({**told, "ok": False, "traceback": traced()})
        else:
            # Random weights leave a text's vector what its embeddings are, whatever attention adds: each kernel counts.
            furthest = max(worst, *(seen["apart"] for seen in told["by_kernel"].values()))
            bound = TOLERANCE[precision]
            found.append({**told, "apart": worst, "bound": bound, "ok": furthest <= bound})
    return found


def _vectors_apart(
    network: CudaEncoderExecutor, texts: Sequence[NDArray[np.int32]], by_kernel: dict[str, Any]
) -> float:
    given, kernels = text_inputs(texts, [p.name for p in network._graph.inputs]), network._kernels

    def vectors(used: Any) -> Tensor:
        network._kernels = used
        return torch.from_numpy(network.run(given)["embeddings"])

    vectors(Watched(kernels, network.device, by_kernel).kernels())
    return apart(vectors(kernels), vectors(torch_reference))


def draws_agree(device: str, dry_run: bool) -> dict[str, Any]:
    """The likeliest tokens of rows with ties and of one that is not finite, and drawn ones, of the real vocabulary."""
    told: dict[str, Any] = {"what": "likeliest and drawn tokens", "by_kernel": {}}
    vocab = (TINY if dry_run else LLAMA_8B).vocab_size
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((DRAWN_ROWS, vocab), generator=generator).mul(4).bfloat16().to(device)
    logits[1, 7] = torch.nan
    p = (logits.double() - logits.double().amax(1, keepdim=True)).exp().nan_to_num(1)
    asked = torch.rand((3, DRAWN_ROWS), generator=generator).double().to(device)
    top_k = torch.tensor([0, 1, 40] * (DRAWN_ROWS // 3), device=device)
    try:
        kernels = Watched(executor_kernels(device), torch.device(device), told["by_kernel"]).kernels()
        kernels.argmax(logits, -1)
        kernels.draw(p, top_k, 0.5 + asked[0] / 2, asked[1] / 100, asked[2])
    except FAILURES:
        wait_for(torch.device(device))
        return {**told, "ok": False, "traceback": traced()}
    return {**told, "ok": not any(seen["apart"] for seen in told["by_kernel"].values())}


def executor_kernels(device: str) -> ModuleType:
    """As an executor there has them."""
    return torch_reference if device == CPU else triton_kernels


def _named(kernels: ModuleType) -> str:
    return kernels.__name__.rsplit(".", 1)[1]


def _decode(lengths: list[int], vocab: int) -> StepInputs:
    """One more token of each, behind `dummy_step(lengths, ...)`."""
    step = dummy_step([1] * len(lengths), 0, PAGES_EACH * len(lengths), seed=9, vocab=vocab)
    return replace(step, positions=np.array(lengths, np.int32))


def agrees(path: Path, device: str) -> dict[str, Any]:
    """The mean KL of a checkpoint's distributions in BF16 to those of float32 on the CPU, of random texts."""
    source = Source.from_checkpoint(Checkpoint.open(path))
    traced = trace_model(source.module, source.weights, operators())
    exact = run_passes(traced, pipeline(precision_map("fp32")))
    vocab = exact.outputs[0].value.width
    limits = limits_of(vocab)
    reference = ReferenceExecutor(exact, limits, kv=KvFormat.F32, bf16_table=False)
    executor = CudaExecutor(
        lower_for_gpu(run_passes(traced, gpu(precision_map("bf16"))), "bf16"), limits, device=device
    )
    rows = _all_rows(dummy_step([LENGTH] * TEXTS, 0, PAGES_EACH * TEXTS, vocab=vocab))
    want, got = _logp(np.asarray(reference.logits(rows))), _logp(executor.logits(rows).cpu().numpy())
    kl = float((np.exp(want) * (want - got)).sum(1).mean())
    same = float((want.argmax(1) == got.argmax(1)).mean())
    return {"what": path.name, "kl": kl, "bound": MAX_KL, "same_likeliest": same, "ok": kl <= MAX_KL}


def _all_rows(step: StepInputs) -> StepInputs:
    rows = np.repeat(step.sampling[:1], len(step.tokens))
    rows["token"] = np.arange(len(rows))
    return replace(step, sampling=rows)


def _logp(logits: NDArray[Any]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = torch.from_numpy(logits.astype(np.float64)).log_softmax(1).numpy()
    return found


def device_told(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "tensors of a CPU", "torch": torch.__version__}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name, "memory_bytes": found.total_memory, "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}", "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
