"""Writes a checkpoint folder tensor by tensor; it appears when complete, or not at all.

Memory holds one tensor. All sizes are known in advance, so space is reserved and headers are written first; tensors may
come in any order.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.safetensors import INDEX, SINGLE
from millrace.compress.checkpoint.compression_record import RECORD
from millrace.compress.checkpoint.tensor_layout import NAMES, WIDTHS, StoredTensorSpec
from millrace.compress.methods.quantization_grid import Array
from millrace.errors import ConfigError, MachineError
from millrace.machine.disk import reserve, write_at

SHARD_BYTES = 4 << 30
_LOCK = ".lock"  # in a folder that is being written
_WHAT = ("unfinished", "statistics", "search")  # kinds of staging folders next to the output
_SMALL_BYTES = 64 << 20  # for files other than weights: a tokenizer has at most 40 MB


class TensorWriter:
    """A folder of tensors, each with a reserved place."""

    def __init__(self, path: Path, specs: Mapping[str, StoredTensorSpec], shard_bytes: int = SHARD_BYTES) -> None:
        """Reserve space and write headers. raises OSError if the disk is full"""
        self.path = path
        shards = _shards(specs, shard_bytes)
        names = [SINGLE] if len(shards) == 1 else [
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
        ]  # fmt: skip
        self._specs, self._places, self._left = dict(specs), dict[str, tuple[Path, int]](), set(specs)
        for name, shard in zip(names, shards, strict=True):
            self._begin(path / name, shard)
        if len(shards) > 1:
            result = {tensor: file.name for tensor, (file, _) in sorted(self._places.items())}
            size = sum(spec.nbytes for spec in specs.values())
            (path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": result}, indent=1))

    def put(self, name: str, array: Array) -> None:
        """Write a tensor; call once for each one in `specs`."""
        spec, (file, offset) = self._specs[name], self._places[name]
        result = StoredTensorSpec(NAMES[array.dtype.name], array.shape)
        assert result == spec, (name, result, spec)
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        with file.open("r+b") as opened:
            write_at(opened.fileno(), data, offset)
        self._left.remove(name)

    def put_blocks(self, name: str, blocks: Iterable[NDArray[np.uint8]]) -> None:
        """Write a tensor from the blocks of its bytes; call once for each one in `specs`."""
        (file, offset), end = self._places[name], self._places[name][1] + self._specs[name].nbytes
        with file.open("r+b") as opened:
            for block in blocks:
                assert offset + len(block) <= end, (name, offset, len(block), end)
                write_at(opened.fileno(), memoryview(block.data), offset)
                offset += len(block)
        assert offset == end, (name, offset, end)
        self._left.remove(name)

    def finish(self) -> None:
        assert not self._left, f"never written: {sorted(self._left)[:3]}"
        for file in {file for file, _ in self._places.values()}:
            with file.open("r+b") as opened:
                os.fsync(opened.fileno())  # a network file system may report only now that it is full

    def _begin(self, file: Path, shard: Mapping[str, StoredTensorSpec]) -> None:
        """Write a shard's header. Tensors with the widest elements come first, so that each is aligned to its own."""
        at, entries, offsets = 0, dict[str, object](), dict[str, int]()
        for name, spec in sorted(shard.items(), key=lambda item: -WIDTHS[item[1].dtype]):
            end = at + spec.nbytes
            entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
            offsets[name], at = at, end
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        with file.open("xb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            opened.flush()
            reserve(opened.fileno(), start + at)
        self._places |= {name: (file, start + offset) for name, offset in offsets.items()}


def _shards(specs: Mapping[str, StoredTensorSpec], max_bytes: int) -> list[dict[str, StoredTensorSpec]]:
    result: list[dict[str, StoredTensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if size and size + spec.nbytes > max_bytes:
            result.append({})
            size = 0
        result[-1][name] = spec
        size += spec.nbytes
    return result


def check_place(out: Path, nbytes: int) -> None:
    """Check the output. raises ConfigError if it exists, MachineError if `nbytes` do not fit on the disk"""
    if out.exists() or out.is_symlink():
        measured = ", or measure what it costs: --measure" if (out / RECORD).is_file() else ""
        raise ConfigError(
            f"{out} is already there", "a folder that does not exist yet", f"remove it, or name another{measured}"
        )  # fmt: skip
    existing_parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not existing_parent.is_dir():
        raise ConfigError(
            f"{out} would be in {existing_parent}, which is a file", "a folder to write in", "name another with -o"
        )
    free = shutil.disk_usage(existing_parent).free
    if free < nbytes + _SMALL_BYTES:
        raise MachineError(
            f"{out} has no room: {free:,} bytes are free there",
            f"{nbytes + _SMALL_BYTES:,}: {nbytes:,} of weights, and {_SMALL_BYTES:,} for what lies beside them",
            "make room, or name a folder on another disk with -o",
        )  # fmt: skip


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Create an empty folder next to `out`; it becomes `out` at the end of the block, or is removed on failure."""
    with staging_folder(out) as path:
        yield path
        (path / _LOCK).unlink()
        put_in_place(path, out)


@contextmanager
def staging_folder(out: Path, what: str = "unfinished") -> Iterator[Path]:
    """Create an empty folder next to `out`, locked during the block and removed after it. what: one of _WHAT

    First removes folders that killed runs have left for `out`: those whose lock is free.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out.absolute())
    path = out.absolute().with_name(f".{out.name}.{secrets.token_hex(6)}.{what}")
    path.mkdir()
    try:
        with (path / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    finally:  # also after Ctrl-C: no partial output is left
        shutil.rmtree(path, ignore_errors=True)


def put_in_place(path: Path, out: Path) -> None:
    """Rename a folder to `out`. raises ConfigError if another process has created `out` meanwhile"""
    if out.exists():
        raise ConfigError(f"{out} is there by now", "a folder of this run alone", "name another with -o")
    path.rename(out)


def _sweep(out: Path) -> None:
    left = re.compile(re.escape(f".{out.name}.") + rf"[0-9a-f]{{12}}\.({'|'.join(_WHAT)})")
    for path in [p for p in out.parent.iterdir() if left.fullmatch(p.name)]:
        with suppress(OSError), (path / _LOCK).open("rb") as lock:  # another run uses it, or has just created it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
