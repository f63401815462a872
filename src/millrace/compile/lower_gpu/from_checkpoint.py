"""From a checkpoint to a GPU: traced, lowered and planned before a weight is read. Nothing is packed.

The device gets the weights as the checkpoint stores them, so no engine folder is needed; from_engine.py does the same
for an engine folder.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import millrace
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.tokenizer.tokenizer_files import no_tokenizer
from millrace.compile.build import SCORED_ROWS, BuildOptions, ResolvedOptions, notes_of, resolve_options, slot_entry
from millrace.compile.builder import ENCODER_PRECISIONS, check_encoder, requested_precision
from millrace.compile.cache.file_digests import checkpoint_identity
from millrace.compile.cache.timing_cache import TimingCache
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.lower_gpu.memory import needs_of
from millrace.compile.lower_gpu.precision import IN_PLACE_OF, GpuPrecision, gpu_precision
from millrace.compile.passes.pipeline import gpu as passes
from millrace.compile.passes.pipeline import run_passes
from millrace.compile.precision import PrecisionMap, precision_map
from millrace.compile.precision_selection import AUTO
from millrace.compile.random_weights import random_source
from millrace.compile.settings import BuildSettings, Progress, Say
from millrace.compile.source import Source
from millrace.engine.artifact.accuracy_loss import Evaluation
from millrace.engine.artifact.folder_lock import FolderLock
from millrace.engine.artifact.manifest import FORMAT, CpuSection, FileEntry, Manifest, SymbolEntry
from millrace.engine.cache_specs import KV_CACHE_DTYPES, PAGE_TOKENS, KvFormat
from millrace.engine.cuda.capability_check import check_runs, precisions_used
from millrace.engine.cuda.cuda_graphs import default_buckets
from millrace.engine.cuda.device_lookup import Gpu
from millrace.engine.cuda.engine import EngineFiles, GpuEngine, GpuModel
from millrace.engine.cuda.memory_plan import MemoryNeeds
from millrace.engine.executor import ExecutorLimits
from millrace.engine.io_slots import Slot
from millrace.errors import ConfigError, sanitize
from millrace.graph.rewrite import LOGITS, head_of
from millrace.graph.types import Graph, find
from millrace.kernels.catalogue import operators
from millrace.kernels.precision import Precision
from millrace.machine.devices import check_multiplies
from millrace.model.module import trace_model
from millrace.settings import flag_of

if TYPE_CHECKING:  # PyTorch is imported only when a GPU is used
    from millrace.engine.cuda.executor import CudaExecutor
    from millrace.kernels.matmul.gpu_tiles import Tiles

GPU_BATCH, GPU_STEP_TOKENS = 64, 2048  # default numbers of sequences, and of tokens per step
ENCODER_BATCH, ENCODER_STEP_TOKENS = 512, 16384  # of an encoder, whose texts need no memory beyond a step
RANDOM_WEIGHTS = "the weights are random: what they answer means nothing"
# Settings of CPU kernels, or measured with them.
_OF_CPUS = ("bf16_sums", "tune_rows", "calibration", "max_kl")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBuildInfo:
    """A model as described by its manifest. identity: digest of its whole content, which is read for it"""

    architecture: str
    n_parameters: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    identity: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced model, before precisions are chosen.

    fp8_rows: given the precisions, the linear layers whose input rows are rounded to E4M3
    bound: fills in the contents of constants, if the graph is traced without
    """

    about: GpuBuildInfo
    graph: Graph
    alone: GpuPrecision
    fp8_rows: Callable[[PrecisionMap], Iterable[str]]
    is_random: bool = False
    bound: Callable[[Graph], Graph] = lambda graph: graph

    @property
    def is_encoder(self) -> bool:
        return find(self.graph.outputs, LOGITS) is None

    def model(self, chosen: ResolvedOptions) -> GpuModel:
        graph = self.bound(run_passes(self.graph, passes(chosen.precision)))
        as_floats = KvFormat[chosen.table.upper()]
        batch, logits = chosen.max_batch, find(graph.outputs, LOGITS)
        rows, vocab = (batch + SCORED_ROWS, logits.width) if logits else (0, self.about.vocab_size)
        tokens = max(chosen.max_step_tokens, batch)
        limits = ExecutorLimits(
            max_step_tokens=tokens if logits else min(tokens, batch * chosen.max_context), max_sequences=batch,
            max_rows=rows, max_context=chosen.max_context, page_tokens=PAGE_TOKENS, n_pages=0, vocab_size=vocab,
        )  # fmt: skip
        fp8_rows = tuple(self.fp8_rows(chosen.precision))
        return GpuModel(
            lowered=lower_for_gpu(graph, self.alone.floats(chosen.table), fp8_rows), limits=limits,
            kv=None if chosen.kv_format == as_floats else chosen.kv_format,
            buckets=default_buckets(batch) if logits else (), random=self.is_random,
        )  # fmt: skip


def engine_from_checkpoint(
    name: str, checkpoint: Checkpoint, build: BuildSettings, gpu: Gpu, cache: Path | None,
    precisions: Mapping[str, str] | None = None, progress: Progress | None = None, say: Say | None = None,
) -> GpuEngine:  # fmt: skip
    """Make an engine for a GPU. checkpoint: if it has no weights, they are drawn on the device

    raises CheckpointError, ConfigError for settings that a GPU does not have or this one lacks, EngineError
    """
    check_build_settings(build)
    if not checkpoint.has_tokenizer:
        raise no_tokenizer(checkpoint.folder)
    is_random = not checkpoint.tensors
    source = (random_source if is_random else Source.from_checkpoint)(checkpoint, build.max_context)
    alone, build = gpu_precision(build, source, precisions)
    alone.check_kept(build.kv_cache_dtype)
    options = _options(build, source, precisions)
    if isinstance(checkpoint.config, EncoderConfig):
        check_encoder(build, options.precision, alone)
        options = replace(options, max_batch=build.max_batch or ENCODER_BATCH, max_step_tokens=ENCODER_STEP_TOKENS)
    chosen = resolve_options(source, options)
    graph = trace_model(source.module, source.weights, operators())
    traced = Traced(
        about=_about(source, lambda: checkpoint_identity(checkpoint, cache, progress)), graph=graph, alone=alone,
        fp8_rows=lambda precision: alone.fp8_rows(source.stored, graph, precision), is_random=is_random,
    )  # fmt: skip
    chosen.precision.check_patterns(node.origin[0] for node in graph.nodes if node.op == "linear")
    notes = (*notes_of(source, chosen), *((RANDOM_WEIGHTS,) if is_random else _unmeasured_note(source, chosen, alone)))
    model, needs = planned(traced, chosen, gpu)
    for note in notes if say else ():
        say(note)  # type: ignore[misc]  # there is one
    manifest = manifest_of(name, traced, chosen, model, needs, notes)
    files = EngineFiles()
    for carried, content in source.files().items():
        (files.folder / carried).write_bytes(content)
    return GpuEngine(
        folder=files.folder, manifest=manifest, lock=FolderLock(os.open(files.folder, os.O_RDONLY)), model=model,
        gpu=gpu,
        needs=needs, files=files, smaller=lambda: smaller(traced, chosen, gpu), tuner=tuner(traced, gpu, build, cache),
    )  # fmt: skip


def planned(traced: Traced, chosen: ResolvedOptions, gpu: Gpu) -> tuple[GpuModel, MemoryNeeds]:
    """Lower and plan. raises ConfigError, EngineError for what this GPU lacks"""
    model = traced.model(chosen)
    check_runs(model.lowered.graph, model.kv)
    check_multiplies(gpu.name, gpu.capability, precisions_used(model.lowered, model.kv))
    return model, _needs(model, gpu)


def _about(source: Source, identity: Callable[[], str]) -> GpuBuildInfo:
    return GpuBuildInfo(
        architecture=source.architecture, n_parameters=source.n_parameters, vocab_size=source.vocab_size,
        eos_token_ids=source.eos_token_ids, bos_token_id=source.bos_token_id, identity=identity,
    )  # fmt: skip


def _options(build: BuildSettings, source: Source, precisions: Mapping[str, str] | None) -> BuildOptions:
    return BuildOptions(
        precision=requested_precision(build, source.own_precision, precisions), max_batch=build.max_batch or GPU_BATCH,
        max_step_tokens=GPU_STEP_TOKENS,
        kv_format=KV_CACHE_DTYPES[build.kv_cache_dtype] if build.kv_cache_dtype else None,
    )  # fmt: skip


def check_build_settings(build: BuildSettings) -> None:
    """Check for settings of CPUs. raises ConfigError"""
    if requested := [name for name in build.changed_fields if name in _OF_CPUS]:
        raise ConfigError(
            f"{flag_of(requested[0])} is given for a GPU", "nothing: it is about kernels of a CPU", "leave it out"
        )
    if build.precision == AUTO:
        raise ConfigError(
            "--precision auto is given for a GPU", "a precision: what they cost is measured with kernels of a CPU",
            "millrace build --precision auto says which it is; name that",
        )  # fmt: skip


def tuner(
    traced: Traced, gpu: Gpu, build: BuildSettings, cache: Path | None
) -> "Callable[[CudaExecutor], Tiles] | None":
    """Return the tuner of tiles; None: nothing is timed."""

    def tuned(executor: "CudaExecutor") -> "Tiles":
        from millrace.compile.tune.gpu_tiles import DeviceTuner, check_choice  # imports Triton

        timings = TimingCache(cache / "timings.json", check_choice) if cache else None
        return DeviceTuner(gpu, build.tune, timings)(executor)

    return tuned if build.tune and not traced.is_encoder else None


def _unmeasured_note(source: Source, chosen: ResolvedOptions, alone: GpuPrecision) -> tuple[str, ...]:
    requested = alone.described(chosen.precision.described(None))["default"]
    if alone.is_own or (chosen.precision.meaning == source.own_precision.meaning and requested != alone.name):
        return ()
    on_cpu = IN_PLACE_OF.get(requested)
    measures = f"measures {on_cpu}, which is near it," if on_cpu else "measures it"
    return (f"what {requested} costs in answers is not measured on a GPU: millrace build {measures} on a CPU",)


def _needs(model: GpuModel, gpu: Gpu) -> MemoryNeeds:
    return needs_of(
        model.lowered, model.limits, kv=model.kv, buckets=model.buckets, multiprocessors=gpu.multiprocessors
    )  # fmt: skip


def smaller_steps(traced: Traced, chosen: ResolvedOptions, gpu: Gpu) -> Iterator[tuple[str, MemoryNeeds]]:
    """Yield plans that need less memory with the same weights: smaller batches, an 8-bit KV cache."""
    if chosen.max_batch > 1:
        few = max(1, chosen.max_batch // 8)
        yield f"--max-batch {few}", _needs(traced.model(replace(chosen, max_batch=few)), gpu)
    if not traced.is_encoder and chosen.kv_format in (KvFormat.F32, KvFormat.BF16):
        yield "--kv-cache-dtype int8", _needs(traced.model(replace(chosen, kv_format=KvFormat.INT8)), gpu)


def smaller(traced: Traced, chosen: ResolvedOptions, gpu: Gpu) -> Iterator[tuple[str, MemoryNeeds]]:
    """Yield plans that need less memory on this GPU: smaller steps, and weights of 8 or 4 bits."""
    yield from smaller_steps(traced, chosen, gpu)
    requested = []
    default, groups = chosen.precision.default, chosen.precision.group
    for precision in ENCODER_PRECISIONS if traced.is_encoder else (Precision.BF16, Precision.W8A16, Precision.W4A16):
        if _bits(precision) < _bits(default):
            other = replace(chosen, precision=precision_map(precision, groups), table="bf16")
            kv_format = KvFormat.BF16 if chosen.kv_format == KvFormat.F32 else chosen.kv_format
            requested.append((f"--precision {precision}", replace(other, kv_format=kv_format)))
    other_traced = replace(traced, alone=traced.alone if traced.alone.name == "fp16" else GpuPrecision())
    yield from ((words, _needs(other_traced.model(other), gpu)) for words, other in requested)


def _bits(precision: Precision) -> int:
    """Return the bits of a weight."""
    return {Precision.FP32: 32, Precision.BF16: 16}.get(precision, precision.bits)


def manifest_of(
    name: str, traced: Traced, chosen: ResolvedOptions, model: GpuModel, needs: MemoryNeeds, notes: tuple[str, ...]
) -> Manifest:
    """Return the manifest of this start: the limits for clients, and device memory in place of a program's."""
    limits = model.limits
    most = {"T": limits.max_step_tokens, "S": limits.max_sequences, "R": limits.max_rows}
    symbols, head = [s.name for s in model.lowered.graph.symbols], head_of(model.lowered.graph)
    precisions = traced.alone.described(chosen.precision.described(head.origin[0] if head else None))
    about, identity = traced.about, traced.about.identity()
    section = CpuSection(
        n_calls=0, weights_bytes=needs.weights_bytes, activation_bytes=needs.step_bytes + needs.graphs_bytes,
        activation_lower_bound=0, caches=[],
        inputs=[slot_entry(Slot.from_port(port)) for port in model.lowered.graph.inputs],
        outputs=[slot_entry(Slot.from_port(port)) for port in model.lowered.graph.outputs],
    )  # fmt: skip
    return Manifest(
        format=FORMAT, millrace=millrace.__version__, model_name=sanitize(name), architecture=about.architecture,
        source=identity, precision=precisions, group=chosen.precision.group,
        n_parameters=about.n_parameters, symbols=[SymbolEntry(s, 1, most[s], most[s]) for s in symbols],
        max_context=chosen.max_context, vocab_size=limits.vocab_size, eos_token_ids=list(about.eos_token_ids),
        bos_token_id=about.bos_token_id, files={"checkpoint": FileEntry(needs.weights_bytes, identity)},
        notes=list(notes), evaluation=Evaluation("on a GPU nothing is measured"), cpu=section,
    )  # fmt: skip
