"""From a checkpoint to a GPU: traced, brought into its form and planned, before a weight is read. Nothing is packed.

The weights go to the device as the checkpoint has them, so there is no folder to build first, and none to keep.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import millrace
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.encoder import EncoderConfig
from millrace.checkpoint.tokenizer_files import no_tokenizer
from millrace.compile.build import SCORED_ROWS, BuildOptions, Settled, notes_of, settled, slot_entry
from millrace.compile.builder import OF_ENCODERS, asked_precision, check_encoder
from millrace.compile.digests import checkpoint_identity
from millrace.compile.gpu_precision import IN_PLACE_OF, GpuPrecision, gpu_precision
from millrace.compile.pipeline import gpu as passes
from millrace.compile.pipeline import run_passes
from millrace.compile.precision import precision_map
from millrace.compile.pricing import AUTO
from millrace.compile.random_source import random_source
from millrace.compile.settings import BuildSettings, Progress, Say
from millrace.compile.source import Source
from millrace.compile.timings import TimingCache
from millrace.engine.cuda.buckets import usual_buckets
from millrace.engine.cuda.engine import Files, GpuEngine, GpuModel
from millrace.engine.cuda.found import Gpu
from millrace.engine.cuda.gpu import check_runs, precisions_used
from millrace.engine.cuda.memory import Needs, needs_of
from millrace.engine.evaluation import Evaluation
from millrace.engine.executor import ExecutorLimits
from millrace.engine.hold import Hold
from millrace.engine.kv import KV_CACHE_DTYPES, PAGE_TOKENS, KvFormat
from millrace.engine.manifest import FORMAT, CpuSection, FileEntry, Manifest, SymbolEntry
from millrace.engine.slots import Slot
from millrace.errors import ConfigError, plain
from millrace.graph.rewrite import LOGITS, head_of
from millrace.graph.types import Graph, find
from millrace.kernels.catalogue import operators
from millrace.kernels.precision import Precision
from millrace.machine.devices import check_multiplies
from millrace.model.module import trace_model
from millrace.settings import flag_of

if TYPE_CHECKING:  # PyTorch is imported where a GPU is at work
    from millrace.engine.cuda.executor import CudaExecutor
    from millrace.kernels.matmul.gpu_tiles import Tiles

GPU_BATCH, GPU_STEP_TOKENS = 64, 2048  # sequences, and tokens of a step, where nobody says otherwise
ENCODER_BATCH, ENCODER_STEP_TOKENS = 512, 16384  # of an encoder, whose texts cost no room beyond a step
DRAWN = "the weights are random: what they answer means nothing"
# What is about kernels of a CPU, or measured with them.
_OF_CPUS = ("bf16_sums", "tune_rows", "calibration", "max_kl")


@dataclass(frozen=True, slots=True)
class _Traced:
    """One checkpoint, before precisions are chosen."""

    source: Source
    graph: Graph
    alone: GpuPrecision
    is_random: bool

    def model(self, chosen: Settled) -> GpuModel:
        graph = run_passes(self.graph, passes(chosen.precision))
        dtype = self.alone.floats(chosen.table)
        as_floats = KvFormat[chosen.table.upper()]
        batch, logits = chosen.max_batch, find(graph.outputs, LOGITS)
        rows, vocab = (batch + SCORED_ROWS, logits.width) if logits else (0, self.source.vocab_size)
        tokens = max(chosen.max_step_tokens, batch)
        limits = ExecutorLimits(
            max_step_tokens=tokens if logits else min(tokens, batch * chosen.max_context), max_sequences=batch,
            max_rows=rows, max_context=chosen.max_context, page_tokens=PAGE_TOKENS, n_pages=0, vocab_size=vocab,
        )  # fmt: skip
        return GpuModel(
            graph=graph, limits=limits, dtype=dtype, fp8_rows=frozenset(self._fp8_rows(chosen)),
            kv=None if chosen.kv_format == as_floats else chosen.kv_format,
            buckets=usual_buckets(batch) if logits else (), random=self.is_random,
        )  # fmt: skip

    def _fp8_rows(self, chosen: Settled) -> Iterator[str]:
        """Linear layers that are meant to be multiplied with E4M3: by the checkpoint, or all by who asks for fp8."""
        if self.alone.name == "fp8":
            head, of = head_of(self.graph), chosen.precision.of
            layers = [n for n in self.graph.nodes if n.op == "linear"]
            yield from (n.origin[0] for n in layers if of(n.origin[0], is_head=n is head) == Precision.FP8A16)
        for name, matrix in self.source.stored.items():
            precision = chosen.precision.of(name)
            if matrix.fp8_rows and precision == Precision.FP8A16 and chosen.precision.kept(matrix.held, precision):
                yield name


def device_engine(
    name: str, checkpoint: Checkpoint, build: BuildSettings, gpu: Gpu, cache: Path | None,
    precisions: Mapping[str, str] | None = None, progress: Progress | None = None, say: Say | None = None,
) -> GpuEngine:  # fmt: skip
    """checkpoint: of one without weights they are drawn on the device

    raises CheckpointError, ConfigError for what is not asked of a GPU or what this one lacks, EngineError
    """
    _check(build)
    if not checkpoint.has_tokenizer:
        raise no_tokenizer(checkpoint.folder)
    is_random = not checkpoint.tensors
    source = (random_source if is_random else Source.from_checkpoint)(checkpoint, build.max_context)
    alone, build = gpu_precision(build, source, precisions)
    alone.check_kept(build.kv_cache_dtype)
    options = _options(build, source, precisions)
    if is_encoder := isinstance(checkpoint.config, EncoderConfig):
        if alone.name == "fp8":
            expected = f"one of {', '.join((*OF_ENCODERS, 'fp16', 'tf32'))}"
            raise ConfigError("precision fp8 is not measured for encoders", expected, "choose one of them")
        check_encoder(build, options.precision)
        options = replace(options, max_batch=build.max_batch or ENCODER_BATCH, max_step_tokens=ENCODER_STEP_TOKENS)
    chosen = settled(source, options)
    traced = _Traced(source, trace_model(source.module, source.weights, operators()), alone, is_random)
    chosen.precision.check_patterns(node.origin[0] for node in traced.graph.nodes if node.op == "linear")
    model = traced.model(chosen)
    check_runs(model.graph, model.kv)
    check_multiplies(gpu.name, gpu.capability, precisions_used(model.graph, model.dtype, model.fp8_rows, model.kv))
    needs = _needs(model, gpu)
    notes = (*notes_of(source, chosen), *((DRAWN,) if is_random else _unpriced(source, chosen, alone)))
    for note in notes if say else ():
        say(note)  # type: ignore[misc]  # there is one
    identity = checkpoint_identity(checkpoint, cache, progress)
    files = Files()
    for carried, content in source.files().items():
        (files.folder / carried).write_bytes(content)
    return GpuEngine(
        folder=files.folder, manifest=_manifest(name, traced, chosen, model, needs, identity, notes),
        held=Hold(os.open(files.folder, os.O_RDONLY)), model=model, gpu=gpu, needs=needs, files=files,
        smaller=lambda: _smaller(traced, chosen, gpu),
        tuner=_tuner(gpu, build.tune, cache) if build.tune and not is_encoder else None,
    )  # fmt: skip


def _options(build: BuildSettings, source: Source, precisions: Mapping[str, str] | None) -> BuildOptions:
    return BuildOptions(
        precision=asked_precision(build, source.own_precision, precisions), max_batch=build.max_batch or GPU_BATCH,
        max_step_tokens=GPU_STEP_TOKENS,
        kv_format=KV_CACHE_DTYPES[build.kv_cache_dtype] if build.kv_cache_dtype else None,
    )  # fmt: skip


def _check(build: BuildSettings) -> None:
    """raises ConfigError"""
    if asked := [name for name in build.asked if name in _OF_CPUS]:
        raise ConfigError(
            f"{flag_of(asked[0])} is given for a GPU", "nothing: it is about kernels of a CPU", "leave it out"
        )
    if build.precision == AUTO:
        raise ConfigError(
            "--precision auto is given for a GPU", "a precision: what they cost is measured with kernels of a CPU",
            "millrace build --precision auto says which it is; name that",
        )  # fmt: skip


def _tuner(gpu: Gpu, seconds: float, cache: Path | None) -> "Callable[[CudaExecutor], Tiles]":
    def tuned(executor: "CudaExecutor") -> "Tiles":
        from millrace.compile.device_tune import DeviceTuner, check_choice  # and with it Triton

        return DeviceTuner(gpu, seconds, TimingCache(cache / "timings.json", check_choice) if cache else None)(executor)

    return tuned


def _unpriced(source: Source, chosen: Settled, alone: GpuPrecision) -> tuple[str, ...]:
    asked = alone.described(chosen.precision.described(None))["default"]
    if alone.is_own or (chosen.precision.meaning == source.own_precision.meaning and asked != alone.name):
        return ()
    on_cpu = IN_PLACE_OF.get(asked)
    measures = f"measures {on_cpu}, which is near it," if on_cpu else "measures it"
    return (f"what {asked} costs in answers is not measured on a GPU: millrace build {measures} on a CPU",)


def _needs(model: GpuModel, gpu: Gpu) -> Needs:
    return needs_of(
        model.graph, model.limits, dtype=model.dtype, kv=model.kv, buckets=model.buckets,
        multiprocessors=gpu.multiprocessors,
    )  # fmt: skip


def _smaller(traced: _Traced, chosen: Settled, gpu: Gpu) -> Iterable[tuple[str, Needs]]:
    """What takes less, of what this GPU can: fewer at a time, keys and values of 8 bits, weights of 8 or 4."""
    asked = []
    if chosen.max_batch > 1:
        few = max(1, chosen.max_batch // 8)
        asked.append((f"--max-batch {few}", replace(chosen, max_batch=few)))
    is_encoder = find(traced.graph.outputs, LOGITS) is None
    if not is_encoder and chosen.kv_format in (KvFormat.F32, KvFormat.BF16):
        asked.append(("--kv-cache-dtype int8", replace(chosen, kv_format=KvFormat.INT8)))
    default, groups = chosen.precision.default, chosen.precision.group
    for precision in OF_ENCODERS if is_encoder else (Precision.BF16, Precision.W8A16, Precision.W4A16):
        if _bits(precision) < _bits(default):
            other = replace(chosen, precision=precision_map(precision, groups), table="bf16")
            kept = KvFormat.BF16 if chosen.kv_format == KvFormat.F32 else chosen.kv_format
            asked.append((f"--precision {precision}", replace(other, kv_format=kept)))
    other_traced = replace(traced, alone=traced.alone if traced.alone.name == "fp16" else GpuPrecision())
    return ((words, _needs(other_traced.model(other), gpu)) for words, other in asked)


def _bits(precision: Precision) -> int:
    """Of a weight."""
    return {Precision.FP32: 32, Precision.BF16: 16}.get(precision, precision.bits)


def _manifest(
    name: str, traced: _Traced, chosen: Settled, model: GpuModel, needs: Needs, identity: str, notes: tuple[str, ...]
) -> Manifest:
    """Of this start: what a client may ask of a model, and what lies on the device in place of a program's."""
    limits = model.limits
    most = {"T": limits.max_step_tokens, "S": limits.max_sequences, "R": limits.max_rows}
    symbols, head = [s.name for s in model.graph.symbols], head_of(model.graph)
    precisions = traced.alone.described(chosen.precision.described(head.origin[0] if head else None))
    source = traced.source
    section = CpuSection(
        n_calls=0, weights_bytes=needs.weights_bytes, activation_bytes=needs.step_bytes + needs.graphs_bytes,
        activation_lower_bound=0, caches=[],
        inputs=[slot_entry(Slot.of(port)) for port in model.graph.inputs],
        outputs=[slot_entry(Slot.of(port)) for port in model.graph.outputs],
    )  # fmt: skip
    return Manifest(
        format=FORMAT, millrace=millrace.__version__, model_name=plain(name), architecture=source.architecture,
        source=identity, precision=precisions, group=chosen.precision.group,
        n_parameters=source.n_parameters, symbols=[SymbolEntry(s, 1, most[s], most[s]) for s in symbols],
        max_context=chosen.max_context, vocab_size=limits.vocab_size, eos_token_ids=list(source.eos_token_ids),
        bos_token_id=source.bos_token_id, files={"checkpoint": FileEntry(needs.weights_bytes, identity)},
        notes=list(notes), evaluation=Evaluation("on a GPU nothing is measured"), cpu=section,
    )  # fmt: skip
