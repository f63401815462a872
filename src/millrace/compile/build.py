"""From a checkpoint to an engine folder, written completely or not at all: trace, passes, lowering, packing."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

import millrace
from millrace.compile.bounds import check_openable, check_sequences, unbounded
from millrace.compile.disk_space_check import cannot_write, check_new
from millrace.compile.lower_cpu.program import Bounds, Program
from millrace.compile.lower_cpu.program_builder import lower
from millrace.compile.lower_cpu.program_report import program_table
from millrace.compile.lower_cpu.sizes import check_dims
from millrace.compile.passes.expressions import fold_constants, fuse_elementwise
from millrace.compile.passes.pipeline import pipeline, run_passes, unfused
from millrace.compile.precision import PrecisionMap, plain_format, rounding_notes, with_head_precision
from millrace.compile.settings import Progress
from millrace.compile.source import LONGEST, Source
from millrace.compile.tune.tuner import Tuning, tune_folder
from millrace.engine.artifact.accuracy_loss import Evaluation
from millrace.engine.artifact.folder_lock import building
from millrace.engine.artifact.manifest import (
    FORMAT,
    GRAPH,
    MANIFEST,
    PROGRAM,
    PROGRAM_TABLE,
    SAME_ON_A_GPU,
    WEIGHTS,
    CacheSpecEntry,
    CpuSection,
    FileEntry,
    GpuSection,
    Manifest,
    SizeEntry,
    SlotEntry,
    StateEntry,
    SymbolEntry,
    file_checksum,
    sealed,
    weights_checksum,
)  # fmt: skip
from millrace.engine.cache_specs import KvFormat
from millrace.engine.io_slots import Slot, slot
from millrace.errors import CheckpointError, ConfigError, sanitize
from millrace.graph.graph_json import graph_table
from millrace.graph.partition import cut
from millrace.graph.rewrite import LOGITS, head_of, prune
from millrace.graph.types import Graph, Port, Symbol, find
from millrace.kernels.catalogue import operators
from millrace.kernels.operand_places import PackedPlace
from millrace.kernels.operators import runnable
from millrace.kernels.precision import Precision
from millrace.machine.cpu import usable_cores
from millrace.machine.disk import reserve, write_at
from millrace.model.module import trace_model

DEFAULT_BATCH = 16
SCORED_ROWS = 32  # per step, besides one per sequence: for the log probabilities of prompt tokens
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of a build. precision None: the checkpoint's own.

    profile: bounds of a user's network's dimensions, by name; T (tokens of a step), S (sequences) and R (rows of
    logits) follow from max_step_tokens and max_batch unless given here
    """

    precision: PrecisionMap | None = None
    max_batch: int = DEFAULT_BATCH
    max_step_tokens: int = STEP_TOKENS
    kv_format: KvFormat | None = None  # None: float32 for a float32 engine, otherwise the checkpoint's own, or bfloat16
    fuse: bool = True
    profile: Mapping[str, Bounds] = field(default_factory=dict)
    tiles: bool = False  # sum bfloat16 products as AMX tiles do, instead of in pairs
    keep: tuple[str, ...] = ()  # modules, by name, or values, by number, that become outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """BuildOptions for one source, with all defaults resolved.

    table: "f32" or "bf16", of embedding tables
    """

    precision: PrecisionMap
    kv_format: KvFormat
    table: str
    tiles: bool
    max_context: int
    max_batch: int
    max_step_tokens: int
    fuse: bool
    profile: Mapping[str, Bounds]
    keep: tuple[str, ...]

    @property
    def by_tiles(self) -> bool:
        """Whether there are bfloat16 sums, in matmuls or attention, and they are made by tiles."""
        return self.tiles and (self.kv_format == KvFormat.BF16 or self.precision.meaning.uses(Precision.BF16))

    @property
    def key(self) -> str:
        """Equal for equal engines, whatever the options; the table's format follows from the precision."""
        sizes = (self.max_context, self.max_batch, self.max_step_tokens, sorted(self.profile.items()))
        chosen = (self.precision.meaning, self.kv_format, self.by_tiles, sizes, self.fuse, self.keep)
        return msgspec.json.encode(msgspec.to_builtins(chosen)).decode()  # of values alone: names of classes may change


def resolve_options(source: Source, options: BuildOptions) -> ResolvedOptions:
    """Resolve defaults from the checkpoint and the precision. raises ConfigError"""
    _check(options)
    precision = with_head_precision(options.precision or source.own_precision, source.stored)
    table = plain_format(precision.default)
    kv = options.kv_format
    if kv is None:
        kv = KvFormat[table.upper()] if source.kv_format is None or table == "f32" else source.kv_format
    return ResolvedOptions(
        precision=precision, table=table, tiles=options.tiles, kv_format=kv,
        max_context=source.max_context, max_batch=options.max_batch, max_step_tokens=options.max_step_tokens,
        fuse=options.fuse, profile=options.profile, keep=options.keep,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """An engine before its weights are read."""

    precision: PrecisionMap
    traced: Graph
    program: Program
    notes: tuple[str, ...]  # shown to the user
    gpu: GpuSection = SAME_ON_A_GPU


def plan_engine(source: Source, options: BuildOptions) -> BuildPlan:
    """Trace, run passes and lower, without packing.

    raises ConfigError for options out of range, CheckpointError if the weights do not fit the model, GraphError
    """
    chosen = resolve_options(source, options)
    precision = chosen.precision
    traced = trace_model(source.module, source.weights, operators(), keep=chosen.keep)
    _check_context(traced, chosen.max_context)
    precision.check_patterns(node.origin[0] for node in traced.nodes if node.op in ("linear", "expert_linear"))
    return BuildPlan(precision, traced, _program(traced, chosen), notes_of(source, chosen))


def notes_of(source: Source, chosen: ResolvedOptions) -> tuple[str, ...]:
    """Return the notes to show to the user."""
    rounded = rounding_notes(source.stored, chosen.precision)
    return tuple(map(sanitize, (*source.notes, *rounded, *_table_note(source.stored_table, chosen.table))))


def plan_pieces(
    source: Source, options: BuildOptions, extra_outputs: Callable[[Graph], tuple[Port, ...]] | None = None
) -> Iterator[Program]:
    """Yield programs that compute the bits of plan_engine's engine in pieces, passing CARRIED from one to the next.

    extra_outputs: replaces the outputs of a piece; a piece without any is left out
    raises as plan_engine
    """
    chosen, pieces = resolve_options(source, options), _cut(source)
    if extra_outputs is not None:
        pieces = tuple(prune(replace(piece, outputs=ports)) for piece in pieces if (ports := extra_outputs(piece)))
    return (_program(piece, chosen) for piece in pieces)


def reference_pieces(source: Source, options: BuildOptions) -> tuple[Graph, ...]:
    """Return the graphs of the same pieces for the interpreter, one node per layer, without our fusions."""
    precision = resolve_options(source, options).precision
    return tuple(run_passes(piece, unfused(precision)) for piece in _cut(source))


def _cut(source: Source) -> tuple[Graph, ...]:
    traced = trace_model(source.module, source.weights, operators())
    return cut(run_passes(traced, [("fold_constants", fold_constants), ("fuse_elementwise", fuse_elementwise)]))


def _program(traced: Graph, chosen: ResolvedOptions) -> Program:
    passes = pipeline(chosen.precision) if chosen.fuse else unfused(chosen.precision)
    graph = run_passes(traced, passes)
    program = lower(graph, _bounds(graph, chosen), chosen.kv_format, chosen.table, tiles=chosen.tiles)
    return replace(program, passes=tuple(name for name, _ in passes))


def _head(graph: Graph) -> str | None:
    """Return the name of the graph's head, if it has one."""
    head = head_of(graph)
    return head.origin[0] if head else None


def _check_context(graph: Graph, max_context: int) -> None:
    """Check that a language model has a maximum context. raises ConfigError"""
    if find(graph.outputs, LOGITS) and max_context < 1:
        raise ConfigError(
            f"a model that gives {LOGITS}, for sequences of {max_context} tokens", "at least 1",
            "for a language model give Source.from_module(..., max_context=512); else call the output another name",
        )  # fmt: skip


def _bounds(graph: Graph, chosen: ResolvedOptions) -> dict[Symbol, Bounds]:
    """Return the bounds of each symbol. raises ConfigError for a symbol without bounds, and bounds without a symbol"""
    tokens, batch = max(chosen.max_step_tokens, chosen.max_batch), chosen.max_batch
    if any(runnable(node).whole_sequences for node in graph.nodes):  # a sequence is in one step, or not at all
        tokens = max(tokens, chosen.max_context)
    symbol_bounds = {
        "T": Bounds(1, tokens, tokens),
        "S": Bounds(1, batch, batch),
        "R": Bounds(1, batch, batch + SCORED_ROWS),
    }
    symbol_bounds |= chosen.profile
    names = [s.name for s in graph.symbols]
    for name in [n for n in names if n not in symbol_bounds] + [n for n in chosen.profile if n not in names]:
        raise unbounded(graph, name, [n for n in names if n not in symbol_bounds or n in chosen.profile])
    for name in names:
        b = symbol_bounds[name]
        if not 1 <= b.low <= b.usual <= b.high <= LONGEST:
            raise ConfigError(
                f"{name} from {b.low} to {b.high}, usually {b.usual}", f"1 <= low <= usual <= high <= {LONGEST}",
                "correct the profile",
            )  # fmt: skip
    if find(graph.outputs, LOGITS) and {"T", "S", "R"} <= set(names):
        check_sequences(symbol_bounds["T"].high, symbol_bounds["S"].high, symbol_bounds["R"].high)
    bounds = {s: symbol_bounds[s.name] for s in graph.symbols}
    check_dims(graph, bounds)
    return bounds


def _table_note(stored: str | None, table: str) -> tuple[str, ...]:
    """Return a note if the embedding table is rounded: only float32 engines hold it in float32."""
    if stored in (None, "bfloat16") or table == "f32":
        return ()
    shown = stored if "float" in stored else stored.upper()
    return (f"the embedding table, stored as {shown}, is rounded to bfloat16",)


def _check(options: BuildOptions) -> None:
    for name, bounds in options.profile.items():
        if not isinstance(bounds, Bounds):
            raise ConfigError(
                f"the bounds of {name} are a {type(bounds).__qualname__}", "Bounds of three numbers",
                f'write profile={{"{name}": Bounds(smallest, usual, largest)}}',
            )  # fmt: skip
    if isinstance(options.keep, str):
        raise ConfigError("keep is a text", "names of modules", f'write keep=("{options.keep}",)')
    ranges = (("--max-batch", options.max_batch, 1, 1024), ("max_step_tokens", options.max_step_tokens, 16, 65536))
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}", f"{low} to {high}", f"change {name}")


def write_engine(
    source: Source, plan: BuildPlan, folder: Path, *, name: str, progress: Progress | None = None,
    tuning: Tuning | None = None, evaluation: Evaluation | None = None,
) -> Manifest:  # fmt: skip
    """Pack the weights and write the engine folder, which must not exist, completely or not at all.

    tuning: None: the kernels use their default rules, without measurements
    evaluation: the measured accuracy loss of its precision
    """
    check_new(folder)
    check_openable(_manifest(source, plan, {}, name, Evaluation()))
    if progress:
        progress(f"building {name} into {folder}", 0, plan.program.weights_bytes)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with building(folder) as unfinished:
            result = evaluation or Evaluation()
            manifest = _write(source, plan, unfinished, name, result, progress or (lambda *_: None))
            if tuning is not None:
                tune_folder(unfinished, tuning, progress)
            check_new(folder)  # another process may have been faster
    except OSError as error:
        raise cannot_write(folder, plan.program.weights_bytes, error) from error
    return manifest


def _write(
    source: Source, plan: BuildPlan, folder: Path, name: str, evaluation: Evaluation, progress: Progress
) -> Manifest:
    program = plan.program
    weights, of_each = _write_weights(program, folder / WEIGHTS, progress)
    (folder / PROGRAM).write_bytes(program.encoded())
    table = msgspec.json.encode(program_table(program, of_each))
    (folder / PROGRAM_TABLE).write_bytes(msgspec.json.format(table, indent=1))
    (folder / GRAPH).write_bytes(msgspec.json.format(msgspec.json.encode(graph_table(plan.traced)), indent=1))
    for carried, content in source.files().items():
        (folder / carried).write_bytes(content)
    files = {
        path.name: FileEntry(path.stat().st_size, weights if path.name == WEIGHTS else file_checksum(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    manifest = sealed(_manifest(source, plan, files, name, evaluation))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def _write_weights(program: Program, path: Path, progress: Progress) -> tuple[str, dict[int, str]]:
    """Pack the constants into the file, one per core at a time. Memory: the largest, not all.

    Return the file's checksum, and each constant's by its offset.
    Space is reserved first, and nothing is written through a map, so a full disk is an OSError, not SIGBUS
    """
    if program.weights_bytes == 0:
        path.write_bytes(b"")
        return weights_checksum(np.empty(0, np.uint8)), {}
    of_each: dict[int, str] = {}
    with path.open("w+b") as file:
        reserve(file.fileno(), program.weights_bytes)

        def put(data: memoryview, offset: int) -> None:
            write_at(file.fileno(), data, offset)
            of_each[offset] = weights_checksum(np.frombuffer(data, np.uint8))

        pack_weights(program, put, progress)
        os.fsync(file.fileno())  # a network file system may report only now that it is full
    progress("weights", program.weights_bytes, program.weights_bytes)
    return weights_checksum(np.memmap(path, np.uint8, "r")), of_each


def pack_weights(program: Program, put: Callable[[memoryview, int], None], progress: Progress) -> None:
    """Pack the constants, and write each at its offset.

    As many are read at a time as there are cores. Slabs of them are packed one per core, so none waits for a large one.
    """
    cores, done = usable_cores(), 0  # NumPy releases the interpreter lock while it works
    constants, slabs = ThreadPoolExecutor(cores), ThreadPoolExecutor(cores)

    def pack(packed: PackedPlace, offset: int) -> PackedPlace:
        try:
            data = packed.pack(slabs.map)
        except CheckpointError as error:
            raise CheckpointError(f"{packed.name}: {error.what}", error.expected, error.fix) from error
        assert data.size == packed.nbytes, f"{packed.name}: {data.size} bytes packed, {packed.nbytes} planned"
        put(data.reshape(-1).data, offset)
        return packed

    try:
        for packed in constants.map(pack, program.weights, program.weights_offsets):
            done += packed.nbytes
            progress(packed.name, done, program.weights_bytes)
    finally:
        constants.shutdown(cancel_futures=True)
        slabs.shutdown()


def _manifest(
    source: Source, plan: BuildPlan, files: dict[str, FileEntry], name: str, evaluation: Evaluation
) -> Manifest:
    program = plan.program
    logits = slot(program.outputs, LOGITS)
    width = logits.shape[1] if logits else 0
    assert isinstance(width, int)
    caches = [
        CacheSpecEntry(c.layers, c.heads, c.key_size, c.value_size, c.format.name.lower(), c.place, c.window)  # type: ignore[arg-type]
        for c in program.caches
    ]
    cpu = CpuSection(
        n_calls=len(program.calls), weights_bytes=program.weights_bytes, activation_bytes=program.memory.total_bytes,
        activation_lower_bound=program.memory.lower_bound, inputs=list(map(slot_entry, program.inputs)),
        outputs=list(map(slot_entry, program.outputs)), caches=caches,
        states=[StateEntry(state.layers, state.floats) for state in program.states],
        sizes=[SizeEntry(str(size.dim), size.most) for size in program.sizes],
        bf16_sums="tiles" if any(call.params.get("tiles") for call in program.calls) else "pairs",
    )  # fmt: skip
    return Manifest(
        format=FORMAT, millrace=millrace.__version__, model_name=sanitize(name), architecture=source.architecture,
        source=source.identity(),
        precision=plan.precision.described(_head(plan.traced)), group=plan.precision.group,
        n_parameters=source.n_parameters,
        symbols=[SymbolEntry(s.name, b.low, b.usual, b.high) for s, b in program.symbols.items()],
        max_context=source.max_context, vocab_size=width or source.vocab_size, eos_token_ids=list(source.eos_token_ids),
        bos_token_id=source.bos_token_id, files=files, notes=list(plan.notes), cpu=cpu,
        gpu=plan.gpu, evaluation=evaluation,
    )  # fmt: skip


def slot_entry(slot: Slot) -> SlotEntry:
    shape = [d if isinstance(d, int) else repr(d) for d in slot.shape]
    return SlotEntry(slot.name, shape, slot.dtype, slot.offset)
