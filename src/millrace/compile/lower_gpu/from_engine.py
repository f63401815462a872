"""From an engine folder to a GPU: its traced graph is lowered again, with its built weights.

It computes what the engine computes, in its precision and groups. What a GPU plans at its start (number of sequences
and tokens, KV format) may be set again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from millrace.compile.build import ResolvedOptions
from millrace.compile.lower_gpu.from_checkpoint import (
    ENCODER_BATCH,
    ENCODER_STEP_TOKENS,
    GPU_BATCH,
    GPU_STEP_TOKENS,
    GpuBuildInfo,
    Traced,
    manifest_of,
    planned,
    smaller_steps,
    tuner,
)
from millrace.compile.lower_gpu.precision import GpuPrecision
from millrace.compile.precision import PrecisionMap, plain_format, precision_map
from millrace.compile.settings import BuildSettings, Say
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import read_graph_table
from millrace.engine.artifact.manifest import GRAPH, Manifest, damaged
from millrace.engine.artifact.weights import EngineWeights
from millrace.engine.cache_specs import KV_CACHE_DTYPES, KV_FORMATS, KvFormat
from millrace.engine.cuda.device_lookup import Gpu
from millrace.engine.cuda.engine import GpuEngine
from millrace.errors import ConfigError, EngineError
from millrace.graph.graph_json import read_graph
from millrace.graph.rewrite import LOGITS, head_of
from millrace.graph.types import DType, Graph, Port, Shape, find
from millrace.kernels.catalogue import operators
from millrace.kernels.operators import static_dim
from millrace.kernels.precision import Precision
from millrace.model.families import HEAD
from millrace.model.module import CROSS_ENCODER, DECODER, ENCODER, ENCODER_OF_FIRST

RUNTIME_OVERRIDES = (
    "max_batch",
    "max_context",
    "kv_cache_dtype",
    "tune",
)  # settings that may still be changed at a start


def engine_from_folder(
    engine: Engine, build: BuildSettings, gpu: Gpu, cache: Path | None, say: Say | None = None
) -> GpuEngine:  # fmt: skip
    """Make an engine for a GPU. build: only the settings in RUNTIME_OVERRIDES are used

    raises ConfigError for settings that a GPU does not have or this one lacks, EngineError, also for a damaged engine
    """
    manifest, folder = engine.manifest, engine.folder
    if not (manifest.is_language_model or manifest.is_encoder):
        raise EngineError(
            f"{folder} on a GPU: it gives {', '.join(manifest.gives)}", "a language model, or an encoder of texts",
            "run it on the CPU",
        )  # fmt: skip
    alone = GpuPrecision(manifest.gpu.precision)
    weights = EngineWeights.from_engine(engine)
    with _as_written(folder):
        alone.check_built(manifest.precision)
        graph = weights.as_packed(read_graph(msgspec.to_builtins(read_graph_table(folder)), operators()))
        traced = Traced(
            about=_about(manifest), graph=graph, alone=alone, fp8_rows=lambda _: manifest.gpu.fp8_rows,
            bound=weights.bound,
        )  # fmt: skip
        head = head_of(graph)
        chosen = _resolve_options(engine, build, _precision(manifest, alone, head.origin[0] if head else None), alone)
        _check_graph(folder, graph, chosen, manifest)
        model, needs = planned(traced, chosen, gpu)
    notes = (*manifest.notes, *_accuracy_note(manifest))
    for note in _accuracy_note(manifest) if say else ():
        say(note)  # type: ignore[misc]  # there is one
    return GpuEngine(
        folder=folder, manifest=manifest_of(manifest.model_name, traced, chosen, model, needs, notes), lock=engine.lock,
        model=model, gpu=gpu, needs=needs, smaller=lambda: smaller_steps(traced, chosen, gpu),
        tuner=tuner(traced, gpu, build, cache),
    )  # fmt: skip


def _resolve_options(
    engine: Engine, build: BuildSettings, precision: PrecisionMap, alone: GpuPrecision
) -> ResolvedOptions:
    manifest, (batch, tokens) = engine.manifest, (GPU_BATCH, GPU_STEP_TOKENS)
    if manifest.is_encoder:
        batch, tokens = ENCODER_BATCH, ENCODER_STEP_TOKENS
    if build.max_context is not None and build.max_context > manifest.max_context:
        raise ConfigError(
            f"--max-context {build.max_context} of {engine.folder}", f"at most {manifest.max_context}, as it is built",
            "lower it, or build the checkpoint again with it",
        )  # fmt: skip
    table, kv_dtype = plain_format(precision.default), build.kv_cache_dtype or _kv_cache_dtype(manifest)
    alone.check_kept(kv_dtype)
    return ResolvedOptions(
        precision=precision, table=table, tiles=False,
        kv_format=KV_CACHE_DTYPES[kv_dtype] if kv_dtype else KvFormat[table.upper()],
        max_context=build.max_context or manifest.max_context,
        max_batch=build.max_batch or max(batch, manifest.max_sequences), max_step_tokens=tokens, fuse=True, profile={},
        keep=(),
    )  # fmt: skip


def _kv_cache_dtype(manifest: Manifest) -> str | None:
    """Return its KV format as a --kv-cache-dtype; None: as a CPU's floats, or there is no KV cache."""
    as_floats = plain_format(Precision(manifest.precision["default"].partition(":")[0]))
    result = {KvFormat[cache.format.upper()] for cache in manifest.cpu.caches if cache.place is None}
    return next((KV_FORMATS[format].name for format in result - {KvFormat[as_floats.upper()]}), None)


def _precision(manifest: Manifest, alone: GpuPrecision, head: str | None) -> PrecisionMap:
    """Return the precision of its layers; the default says nothing of the head.

    head: its name. Manifests call it HEAD in a user's model, too
    """
    layers = {pattern: alone.lowered(precision) for pattern, precision in manifest.precision.items()}
    result = precision_map(layers, manifest.group, stored_groups=True)
    if head is None or result.names(head):
        return result
    own, patterns = result.default, []
    for pattern, precision in result.patterns:
        if pattern == HEAD:
            own = precision
        else:
            patterns.append((pattern, precision))
    return replace(result, head=own, patterns=tuple(patterns))


def _about(manifest: Manifest) -> GpuBuildInfo:
    return GpuBuildInfo(
        architecture=manifest.architecture, n_parameters=manifest.n_parameters, vocab_size=manifest.vocab_size,
        eos_token_ids=tuple(manifest.eos_token_ids), bos_token_id=manifest.bos_token_id,
        identity=lambda: manifest.source or manifest.identity,
    )  # fmt: skip


def _accuracy_note(manifest: Manifest) -> tuple[str, ...]:
    """Return a note on its accuracy loss, if it was measured on a CPU."""
    if manifest.evaluation.chosen_loss is None:
        return ()
    besides = "; rows of E4M3 are not in it" if manifest.gpu.fp8_rows else ""
    return (f"on a CPU {manifest.evaluation.summary}{besides}",)


# Types of attributes that no shape rule checks; a tree that is just a number has no shape.
_KINDS = {"eps": float, "scale": float, "layer": int, "bias": bool, "interleaved": bool, "tree": int | tuple}
_UNSAID = {"bias": False, "interleaved": False, "tree": 0}


def _check_graph(folder: Path, graph: Graph, chosen: ResolvedOptions, manifest: Manifest) -> None:
    """Check a language model's or encoder's graph and its tables. raises EngineError

    A token or position beyond the end of a table would be read from other memory
    """
    signatures = (DECODER,) if manifest.is_language_model else (ENCODER, ENCODER_OF_FIRST, CROSS_ENCODER)
    inputs = _described(graph.inputs)
    outputs = {p.name for p in graph.outputs if not p.value.constant and len(p.value.shape) == 2}
    if not any(inputs == _described(s.ports()) and outputs >= set(s.outputs) for s in signatures):
        raise damaged(folder, f"{GRAPH} does not take and give what its model does")
    logits = find(graph.outputs, LOGITS)
    vocab = max(manifest.vocab_size, logits.width if logits else 0)  # ids of prompts, and of drawn tokens
    most, names = {"tokens": vocab, "positions": chosen.max_context}, {port.value: port.name for port in graph.inputs}
    for node in graph.nodes:
        for name in node.operator.attrs & _KINDS.keys():
            if not isinstance(value := node.attrs.get(name, _UNSAID.get(name)), _KINDS[name]):
                raise damaged(folder, f"{GRAPH} has {name} {value!r:.40} of {node.op}")
        first, folds = node.inputs[0], node.op == "elementwise" and all(v.constant for v in node.inputs)
        if (first.constant and not folds) or (first.dtype == DType.I32 and node.op != "embedding"):
            raise damaged(folder, f"{GRAPH} has {node.op} of {first}")
        if node.op in ("embedding", "rope"):
            *_, by, table = node.inputs
            if static_dim(table, 0) < most.get(names.get(by, ""), 0):
                raise damaged(folder, f"{GRAPH} has a table of {static_dim(table, 0)} rows for {names[by]}")


def _described(ports: tuple[Port, ...]) -> list[tuple[str, Shape, str]]:
    return [(p.name, p.value.shape, p.value.dtype.value) for p in ports]


@contextmanager
def _as_written(folder: Path) -> Iterator[None]:
    """Turn errors of well-typed but invalid tables into EngineError: unknown value numbers, wrong attribute types."""
    try:
        yield
    except (AssertionError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise damaged(
            folder, f"{GRAPH} is no graph that can be run: {str(error) or type(error).__name__:.200}"
        ) from error
