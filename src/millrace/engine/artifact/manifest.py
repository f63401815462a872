"""The engine folder: its files, and a manifest with their checksums.

manifest.json     this file's Manifest: format version, limits, shapes, checksums of itself and every other file
weights.bin       packed weights, one layout for all instruction sets; copied into a huge-page arena at load
program.bin       the kernel calls as the native executor reads them (kernels/encode.py)
program.json      the same in readable form: calls, fusions, weights, memory plan (millrace inspect shows it);
                  a GPU finds weights by it, each with its own checksum (engine/artifact/weights.py)
graph.json        the graph as traced from the model, before any pass, for any target (graph/graph_json.py)
tactics.json      how the kernels work on one machine (engine/artifact/tactics.py); no result depends on it, so it
                  may be missing, and may be rewritten alone
tokenizer files   copies from the checkpoint, with generation_config.json and the chat template

An engine is hostile input: sizes and checksums are verified at load, and the native executor checks every offset.
Nothing in it depends on when or where it was built, so the same inputs give the same bytes.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.engine.artifact.accuracy_loss import Evaluation
from millrace.engine.cache_specs import CacheSpec, KvFormat, StateSpec
from millrace.engine.io_slots import Size
from millrace.errors import EngineError, GraphError, sanitize
from millrace.graph.dims import Symbol, parse_dim, range_of, symbols_of
from millrace.graph.rewrite import LOGITS
from millrace.graph.types import DType, Shape
from millrace.kernels.declare import MAX_PARAM, MAX_SIZES, MAX_SYMBOLS
from millrace.kernels.kernels_digest import kernels_digest
from millrace.kernels.library import library
from millrace.model.module import CROSS_ENCODER, ENCODER

FORMAT = 13
MANIFEST = "manifest.json"
WEIGHTS, PROGRAM, PROGRAM_TABLE, GRAPH = "weights.bin", "program.bin", "program.json", "graph.json"
UNREADABLE = (
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)  # raised by msgspec for bytes that are not a table
_MANIFEST_LIMIT = 1 << 20
_LONGEST_NAME, _MAX_DIMS = 60, 32  # NumPy allows 32 dimensions, or 64


Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """blake2b (16 bytes, hex) of a file; for weights.bin the native core's own checksum, which is faster to verify."""

    bytes: NonNegative
    checksum: str


class SymbolEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dimension that is known at run time: its bounds, and the size for which the engine is tuned."""

    name: str
    low: Count
    usual: Count
    high: Count


class SizeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A derived dimension: an expression such as "N*H/2", and its largest value."""

    dim: str
    most: Count

    def size(self) -> Size:
        """Parse the expression. raises GraphError if it is invalid"""
        return Size(parse_dim(self.dim), self.most)


class SlotEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named input or output. Its shape consists of numbers and expressions of symbols."""

    name: str
    shape: Annotated[list[Count | str], msgspec.Meta(max_length=_MAX_DIMS)]
    dtype: DType
    offset: NonNegative | None  # bytes into the activations; None: no kernel uses it


class CacheSpecEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: Count
    heads: Count
    key_size: Count
    value_size: Count
    format: Literal["f32", "bf16", "int8", "fp8", "int4"]  # a KvFormat
    place: NonNegative | None  # offset in the activations, for one run; None: kept between steps
    window: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARAM)] = 0  # tokens; 0: all

    def spec(self) -> CacheSpec:
        return CacheSpec(
            layers=self.layers, heads=self.heads, key_size=self.key_size, value_size=self.value_size,
            format=KvFormat[self.format.upper()], place=self.place, window=self.window,
        )  # fmt: skip


class StateEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: Count
    floats: Count

    def spec(self) -> StateSpec:
        return StateSpec(self.layers, self.floats)


class CpuSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of program.bin and weights.bin, and the memory that running them takes."""

    n_calls: NonNegative
    weights_bytes: NonNegative
    activation_bytes: NonNegative
    activation_lower_bound: NonNegative
    inputs: list[SlotEntry]
    outputs: list[SlotEntry]
    caches: list[CacheSpecEntry]
    states: list[StateEntry] = []
    sizes: Annotated[list[SizeEntry], msgspec.Meta(max_length=MAX_SIZES)] = []  # numbered after the symbols in calls
    bf16_sums: Literal["pairs", "tiles"] = "pairs"  # of bfloat16 matmuls, if there are any
    kernels: str = msgspec.field(default_factory=kernels_digest)  # for which program and weights are written


class GpuSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPU settings of an engine that runs on both."""

    precision: Literal["", "fp16", "tf32", "fp8"] = ""  # replaces a CPU's; "": the same
    fp8_rows: Annotated[list[str], msgspec.Meta(max_length=1 << 16)] = []  # linear layers with input rows in E4M3


SAME_ON_A_GPU = GpuSection()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    millrace: str
    model_name: str
    architecture: str
    source: str  # Checkpoint.identity() of its source; "" for a model in the user's own Python
    precision: dict[str, str]
    group: Count  # of weights quantized at build; integer weights of a checkpoint may have other groups
    n_parameters: NonNegative
    symbols: Annotated[list[SymbolEntry], msgspec.Meta(max_length=MAX_SYMBOLS)]  # T, S and R come first
    max_context: NonNegative  # tokens of a sequence; 0 if it has none
    vocab_size: NonNegative  # number of token ids; 0 if it has none
    eos_token_ids: list[int]
    bos_token_id: int | None
    files: dict[str, FileEntry]
    notes: list[str]
    evaluation: Evaluation
    cpu: CpuSection
    gpu: GpuSection = SAME_ON_A_GPU
    checksum: str = ""  # of all fields above

    @property
    def kv_format(self) -> str:
        """A name such as "bf16"; several formats if its caches differ; "none" if nothing is kept between steps."""
        return ", ".join(dict.fromkeys(cache.format for cache in self.cpu.caches if cache.place is None)) or "none"

    @property
    def gives(self) -> list[str]:
        """Names of its outputs."""
        return [slot.name for slot in self.cpu.outputs]

    @property
    def is_language_model(self) -> bool:
        return LOGITS in self.gives

    @property
    def is_encoder(self) -> bool:
        """Return whether it turns texts into vectors, or pairs of texts into scores."""
        inputs = {slot.name for slot in self.cpu.inputs}
        vectors = set(ENCODER.outputs) <= set(self.gives) and inputs >= set(ENCODER.inputs)
        return vectors or self.is_cross_encoder

    @property
    def is_cross_encoder(self) -> bool:
        """Return whether it turns pairs of texts into scores.

        A user's model with the same output names has no vocabulary.
        """
        inputs = {slot.name for slot in self.cpu.inputs}
        scores = set(CROSS_ENCODER.outputs) <= set(self.gives) and inputs >= set(CROSS_ENCODER.inputs)
        return scores and self.vocab_size > 0

    @property
    def max_step_tokens(self) -> int:
        """Maximum of T; 0 without T."""
        return self._upper_bound("T")

    @property
    def max_sequences(self) -> int:
        """Maximum of S; 0 without S."""
        return self._upper_bound("S")

    def _upper_bound(self, symbol: str) -> int:
        return next((s.high for s in self.symbols if s.name == symbol), 0)

    @property
    def identity(self) -> str:
        """Digest of all that determines answers, weights included.

        It is equal for two builds of one checkpoint under any name, and differs between fine-tunes of one architecture.
        """
        of_answers = {"millrace": "", "model_name": "", "source": "", "notes": [], "evaluation": Evaluation()}
        return sealed(msgspec.structs.replace(self, **of_answers)).checksum


Sealed = TypeVar("Sealed", bound=msgspec.Struct)


def sealed(table: Sealed) -> Sealed:
    """Return the table with the checksum of all other fields in `checksum`."""
    content = msgspec.json.encode(msgspec.structs.replace(table, checksum=""))
    return msgspec.structs.replace(table, checksum=hashlib.blake2b(content, digest_size=16).hexdigest())


def damaged(folder: Path, what: str) -> EngineError:
    return EngineError(f"{folder}: {what}", "an engine as `millrace build` writes it", "build it again")


def not_an_engine(folder: Path) -> EngineError:
    return EngineError(f"{folder} has no {MANIFEST}", "an engine folder", "name a folder that `millrace build` wrote")


def weights_checksum(data: NDArray[np.uint8]) -> str:
    """Return the native executor's checksum of weights.bin or a part of it."""
    return checksum_text(library().mr_checksum(data.ctypes.data if data.size else 0, data.size))


def checksum_text(number: int) -> str:
    """Format a checksum of the native executor, signed or not, as files have it."""
    return f"{number & (2**64 - 1):016x}"


def file_checksum(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest. raises EngineError if it is missing, invalid, or of another format version"""
    path = folder / MANIFEST
    if not path.is_file():
        raise not_an_engine(folder)
    with path.open("rb") as file:
        data = file.read(_MANIFEST_LIMIT + 1)
    if len(data) > _MANIFEST_LIMIT:
        raise damaged(folder, f"{MANIFEST} has more than {_MANIFEST_LIMIT} bytes")
    try:
        raw = msgspec.json.decode(data, type=dict[str, object])
        version, cpu = raw.get("format"), raw.get("cpu")
        kernels = cpu.get("kernels") if isinstance(cpu, dict) else None
        if version != FORMAT:
            raise EngineError(
                f"{folder} is of engine format {version!s:.60}", f"format {FORMAT}", "build it again with this version"
            )
        if kernels is None:
            raise damaged(folder, f"{MANIFEST} does not say for which kernels it was written")
        if kernels != kernels_digest():
            raise EngineError(
                f"{folder} was built for other kernels (digest {kernels!r:.60})", f"digest {kernels_digest()}",
                "build it again with this version",
            )  # fmt: skip
        manifest = msgspec.json.decode(data, type=Manifest)
    except UNREADABLE as e:
        raise damaged(folder, f"{MANIFEST} is not readable: {e}") from e
    if manifest != sealed(manifest):
        raise damaged(folder, f"{MANIFEST} is damaged: its checksum differs")
    if what := contradiction(manifest):
        raise damaged(folder, f"{MANIFEST} {what}")
    texts = (manifest.model_name, manifest.architecture, manifest.source, *manifest.precision, *manifest.notes)
    for text in (*texts, *manifest.evaluation.texts):
        if text != sanitize(text):  # they will be displayed
            raise damaged(folder, f"{MANIFEST} holds a text that is too long or not printable: {text}")
    return manifest


def contradiction(manifest: Manifest) -> str:
    """Return a contradiction between dimensions and slots, as the end of a sentence; "" if there is none."""
    symbols = [s.name for s in manifest.symbols]
    if manifest.is_language_model and (symbols != ["T", "S", "R"] or not manifest.vocab_size):
        return "is of a language model without T, S and R, or without a vocabulary"
    highs = {s.name: s.high for s in manifest.symbols}
    if manifest.is_language_model and highs["S"] > min(highs["T"], highs["R"]):  # each has a token, and draws one
        bounds = f"{highs['S']} sequences in steps of {highs['T']} tokens and {highs['R']} rows of logits"
        return f"has {bounds}"
    for symbol in manifest.symbols:
        if not symbol.low <= symbol.usual <= symbol.high:
            bounds = f"low {symbol.low}, usual {symbol.usual}, high {symbol.high}"
            return f"has bounds of {symbol.name!r:.60} that are not in order: {bounds}"
    names_of_vectors = {*ENCODER.outputs, *CROSS_ENCODER.outputs}
    vectors = [slot.shape for slot in manifest.cpu.outputs if slot.name in names_of_vectors]
    shaped = all(len(shape) == 2 and shape[0] == "S" and isinstance(shape[1], int) for shape in vectors)
    if manifest.is_encoder and (symbols != ["T", "S"] or not shaped):
        return "is of an encoder without T and S, or whose vectors are not [S, width]"
    names = {s.name for s in manifest.symbols}
    try:
        shapes = {slot.name: dims_of(slot) for slot in (*manifest.cpu.inputs, *manifest.cpu.outputs)}
        shapes |= {"its sizes": tuple(entry.size().dim for entry in manifest.cpu.sizes)}
    except GraphError as error:
        return f"has {error.what}"
    for name, shape in shapes.items():
        if not names.issuperset(s.name for d in shape for s in symbols_of(d)):
            return f"gives {name} a dimension without bounds"
    ranges = {Symbol(s.name): (max(1, s.low), s.high) for s in manifest.symbols}
    for name, shape in shapes.items():
        if low := [d for d in shape if range_of(d, ranges)[0] < 1]:
            return f"gives {name} the dimension {low[0]}, which may be less than 1"
    bounded = {d for slot in manifest.cpu.inputs for d in slot.shape}
    if not manifest.vocab_size and not bounded.issuperset(names):
        return f"has a dimension that no input tells: {', '.join(sorted(names - bounded))}"
    return ""


def dims_of(slot: SlotEntry) -> Shape:
    """Return the shape of a slot. raises GraphError for an invalid dimension"""
    return tuple(parse_dim(d) if isinstance(d, str) else d for d in slot.shape)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check the sizes of all files, and all checksums but the weights', which the native executor verifies."""
    for name, entry in manifest.files.items():
        if Path(name).name != name or not name.isprintable() or len(name) > _LONGEST_NAME:
            raise damaged(folder, f"{MANIFEST} names a file outside the folder, or none that can be: {name!r:.200}")
        path = folder / name
        if not path.is_file():
            raise damaged(folder, f"{name} is missing")
        if path.stat().st_size != entry.bytes:
            raise damaged(folder, f"{name} has {path.stat().st_size} bytes instead of {entry.bytes}")
        if name != WEIGHTS and file_checksum(path) != entry.checksum:
            raise damaged(folder, f"{name} is damaged: its checksum differs")
    missing = {WEIGHTS, PROGRAM, PROGRAM_TABLE, GRAPH} - manifest.files.keys()
    if missing:
        raise damaged(folder, f"{MANIFEST} does not list {sorted(missing)}")
