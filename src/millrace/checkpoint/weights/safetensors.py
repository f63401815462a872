"""Weights as safetensors: headers are read and checked on opening, data only by `load`.

    byte 0-7         length N of the header, little endian, at most MAX_HEADER_BYTES
    byte 8 - 8+N     JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
    byte 8+N -       the tensors, row-major, without gaps or overlaps

A file is hostile input. source: https://github.com/huggingface/safetensors, format section of the README.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.files import FileState, Report, file_digest, read_small, read_span, unreadable
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.errors import CheckpointError
from millrace.settings import reject_duplicate_keys

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_RANK = 8  # no model has more dimensions

Array = np.ndarray[Any, np.dtype[Any]]
DigestOf = Callable[[Path, FileState, Report | None], str]  # `file_digest`, or a cached one
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOAT_NAMES = tuple(_NAMES.values())
DTYPES = {
    "float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype("u1"), "int8": np.dtype("i1"), "int32": np.dtype("<i4"), "int64": np.dtype("<i8"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip
# Tables stored by old checkpoints that can be derived from config.json; transformers skips them too.
_DERIVED = (
    ".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".attn.masked_bias",
    "embeddings.position_ids",
)  # fmt: skip
_BLOCK = 16 << 20  # bytes
_COPY_AGAIN = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in a header, after checking."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32" | "float16" | "bfloat16", or a block type of GGUF: "q4_0", "q6_k", ...
    file: Path
    nbytes: int
    offset: int  # of its first byte in `file`


class Tensors(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint folder by name. `load` reads one."""

    def __init__(
        self, infos: Mapping[str, TensorInfo], states: Mapping[Path, FileState], derived: Sequence[str] = ()
    ) -> None:
        """states: each file's state when its header was read; derived: names of stored tables that are ignored"""
        self._infos, self._states, self._derived = dict(infos), dict(states), tuple(derived)

    @classmethod
    def open(cls, folder: Path, more: Mapping[str, str] = MappingProxyType({})) -> "Tensors":
        """Read every header of `folder`. raises CheckpointError if a file is missing or damaged, or a dtype unsupported

        more: allowed dtypes other than floats, by their name in a header
        """
        index = _read_index(folder)
        files = [SINGLE] if index is None else sorted(set(index.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:5])}",
                f"every file that {INDEX} names",
                "finish the download of the checkpoint",
            )
        infos: dict[str, TensorInfo] = {}
        states: dict[Path, FileState] = {}
        derived: list[str] = []
        for name in files:
            try:
                states[folder / name], result = _read_header(folder / name, {**_NAMES, **more})
            except OSError as error:
                raise unreadable(folder / name, error) from error
            derived += [info.name for info in result if info.name.endswith(_DERIVED)]
            for info in result:
                if info.name.endswith(_DERIVED):
                    continue
                if info.name in infos:
                    raise CheckpointError(
                        f"{info.name} is in {infos[info.name].file.name} and in {name}",
                        "each tensor in one file",
                        "remove the weight file that does not belong to this checkpoint",
                    )
                infos[info.name] = info
        for tensor, name in (index or {}).items():
            if tensor not in infos and not tensor.endswith(_DERIVED):
                raise CheckpointError(
                    f"{folder / name} has no tensor {tensor}", f"what {INDEX} promises", "download the checkpoint again"
                )
        return cls(infos, states, derived)

    def renamed(self, old: str, new: str) -> "Tensors":
        """Return these tensors with `old` renamed to `new`; no data is copied."""
        infos = {new if name == old else name: info for name, info in self._infos.items()}
        infos[new] = replace(infos[new], name=new)
        return Tensors(infos, self._states, self._derived)

    def with_infos(self, infos: Mapping[str, TensorInfo]) -> "Tensors":
        """Return other tensors of the same files."""
        return Tensors(infos, self._states, self._derived)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def states(self) -> Mapping[Path, FileState]:
        """Return each file's state when its header was read."""
        return self._states

    @property
    def nbytes(self) -> int:
        """Return the total bytes of all tensors."""
        return sum(info.nbytes for info in self._infos.values())

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(self._states))

    def digest(self, digest_of: DigestOf = file_digest, report: Report | None = None) -> str:
        """Return the blake2b digest of the digests of all files' contents, in the order of their names.

        raises CheckpointError if a file has changed since it was opened
        """
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(digest_of(file, self._states[file], report).encode())
        return digest.hexdigest()

    def load(self, name: str) -> Array:
        """Read a tensor from its file, with its own dtype.

        raises CheckpointError if there is no such tensor, or the file has changed since it was opened
        """
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}",
                f"one of its {len(self)} tensors",
                "check that config.json belongs to these weights",
            )
        values: Array = self._data(info).view(DTYPES[info.dtype])
        return values.reshape(info.shape)

    def blocks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the stored bytes of a tensor in blocks of 16 MiB. raises CheckpointError like `load`"""
        info = self._infos[name]
        for at in range(0, info.nbytes, _BLOCK):
            n_bytes = min(_BLOCK, info.nbytes - at)
            yield read_span(info.file, self._states[info.file], info.offset + at, n_bytes)

    def _data(self, info: TensorInfo) -> NDArray[np.uint8]:
        return read_span(info.file, self._states[info.file], info.offset, info.nbytes)

    kv: str | None = None  # format of the KV cache that the checkpoint's `kv_cache_scheme` requests; None: floats

    def format(self, name: str) -> QuantisedFormat | None:
        """Return the format of the integers that the tensor is stored in; None if it is stored as floats."""
        return None

    def stored(self, name: str, bits: int, group: int) -> QuantisedMatrix | None:
        """Return the tensor's stored integers, if it has any and `bits` and `group` can represent them exactly."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes to show to the user."""
        if not self._derived:
            return ()
        n, first = len(self._derived), self._derived[0]
        return (f"{n} stored tables are not read, because they follow from config.json: {first}, ...",)

    def activation_bits(self, name: str) -> int:
        """Return the bits of activations that the checkpoint specifies for this matrix: 8 (integers) or 16 (floats)."""
        return 16

    def meets_fp8(self, name: str) -> bool:
        """Whether the checkpoint specifies E4M3 activations with a scale per token; 16-bit floats are used instead."""
        return False


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor name -> file name; None if there is a model.safetensors, which has priority as in transformers."""
    if (folder / SINGLE).is_file():
        return None
    path = folder / INDEX
    if not path.is_file():
        raise _no_weights(folder)
    try:
        raw = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON: {error}", "the index of a sharded checkpoint", _COPY_AGAIN
        ) from error
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not names or not all(_is_plain_name(name) for name in names.values()):
        raise CheckpointError(
            f"{path} has no usable weight_map",
            '{"weight_map": {tensor name: name of a .safetensors file in this folder}}',
            _COPY_AGAIN,
        )
    return names


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    loose = sorted(p.name for p in folder.glob("*.safetensors"))
    if loose:
        return CheckpointError(
            f"{folder} has {', '.join(loose[:3])} but no {INDEX}",
            f"{SINGLE}, or {INDEX} beside the files it names",
            f"copy {INDEX} as well, or rename a single file to {SINGLE}",
        )
    if (folder / "program.bin").is_file():
        return CheckpointError(
            f"{folder} is an engine without its manifest.json", "a whole engine folder, or a checkpoint",
            "copy the file as well, or build the engine again",
        )  # fmt: skip
    if pickles:
        return CheckpointError(
            f"{folder} has its weights only as pickle ({', '.join(pickles[:3])}), which can run any code when opened",
            "weights as .safetensors",
            f"convert them, which runs none of it: millrace convert {folder} -o NEW_FOLDER",
        )
    return CheckpointError(
        f"{folder} has no weights", f"{SINGLE} or {INDEX}", "name the folder of a complete Hugging Face checkpoint"
    )


def _read_header(path: Path, names: Mapping[str, str]) -> tuple[FileState, list[TensorInfo]]:
    """Return the file's state and its tensors, each checked against the file's size."""
    with path.open("rb") as file:
        state = FileState.from_file(file)
        size = state.nbytes
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > size - 8:
            _damaged(path, f"is truncated: {size} bytes, the header alone needs {8 + length}", "a complete file")
        if length > MAX_HEADER_BYTES:
            _damaged(path, f"has a header of {length} bytes", f"at most {MAX_HEADER_BYTES}")
        header = file.read(length)
    try:
        raw = json.loads(header, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"has a header that is not JSON: {error}", "a safetensors header")
    if not isinstance(raw, dict):
        _damaged(path, "has a header that is not an object", "a safetensors header")
    raw.pop("__metadata__", None)
    start = 8 + length
    spans = sorted(_span(path, name, entry) for name, entry in raw.items())
    at = 0
    for begin, end, name in spans:
        if begin != at:
            kind = "overlaps its neighbour" if begin < at else "leaves a gap before it"
            _damaged(path, f"has a wrong header: {name} at byte {begin} {kind}", f"byte {at}")
        at = end
    if start + at != size:
        kind = "is truncated" if start + at > size else "has bytes that belong to no tensor"
        _damaged(path, f"{kind}: {size} bytes", f"{start + at} bytes by its header")
    infos = [_info(path, name, raw[name], (start + begin, end - begin), names) for begin, end, name in spans]
    return state, infos


def _span(path: Path, name: str, entry: object) -> tuple[int, int, str]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if (
        offsets is None
        or not _are_sizes(offsets)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
        or not _are_sizes(shape)
    ):
        _damaged(
            path,
            f"has a wrong header: {name} is {entry}",
            f"dtype, shape (at most {MAX_RANK} sizes) and two ascending data_offsets",
        )
    if not name.isprintable():  # it goes into the engine's tables
        _damaged(path, f"has a name with control characters: {name!r}", "printable characters")
    return offsets[0], offsets[1], name


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_RANK and all(type(i) is int and 0 <= i < 2**62 for i in value)


def _info(path: Path, name: str, entry: dict[str, Any], place: tuple[int, int], names: Mapping[str, str]) -> TensorInfo:
    kind, (offset, nbytes) = entry.get("dtype"), place
    shape = tuple(entry["shape"])
    dtype = names.get(kind) if isinstance(kind, str) else None
    if dtype is None and not name.endswith(_DERIVED):
        raise CheckpointError(
            f"{path}: {name} has dtype {kind}",
            ", ".join(names),
            "choose an unquantized checkpoint, or one whose config.json says how it is quantized",
        )
    dtype = dtype or "float32"
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != needed and not name.endswith(_DERIVED):
        _damaged(path, f"has a wrong header: {name} {shape} {kind} has {nbytes} bytes", f"{needed} bytes")
    return TensorInfo(name, shape, dtype, path, nbytes, offset)


def _damaged(path: Path, what: str, expected: str) -> NoReturn:
    raise CheckpointError(f"{path} {what}", expected, _COPY_AGAIN)
