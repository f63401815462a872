"""Weights against the safetensors library, and every kind of damaged file."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from millrace.checkpoint.weights.safetensors import INDEX, SINGLE, Tensors
from millrace.errors import CheckpointError
from tests.support.checkpoints import random_checkpoint

Header = dict[str, Any]


def write(path: Path, header: Header | bytes, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_hold_what_the_library_reads(tmp_path: Path, dtype: str) -> None:
    random_checkpoint(tmp_path, "qwen2", seed=3, dtype=dtype, max_shard_size="500KB")
    expected: dict[str, np.ndarray[Any, Any]] = {}
    files = sorted(tmp_path.glob("*.safetensors"))
    for file in files:
        expected |= safetensors.numpy.load_file(file)
    tensors = Tensors.open(tmp_path)
    assert set(tensors) == set(expected) and len(files) > 2 and tensors.files == tuple(files)
    assert tensors.nbytes == sum(a.nbytes for a in expected.values())
    for name, info in tensors.items():
        loaded = tensors.load(name)
        assert loaded.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
        assert (info.shape, info.dtype, info.nbytes) == (expected[name].shape, dtype, loaded.nbytes)
        assert loaded.tobytes() == expected[name].tobytes()


def test_a_tensor_is_read_when_it_is_loaded_and_is_its_owners(tmp_path: Path) -> None:
    big = np.arange(2**20, dtype=np.float32)
    safetensors.numpy.save_file({"big": big, "other": big}, tmp_path / SINGLE)
    tracemalloc.start()
    tensors = Tensors.open(tmp_path)
    loaded = tensors.load("big")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < big.nbytes + 2**16, "one tensor, once"
    (tmp_path / SINGLE).write_bytes(b"")
    assert np.array_equal(loaded, big), "whatever becomes of the file"


def test_odd_shapes(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {"scalar": np.array(2.5, np.float32), "row": np.ones((1, 7), np.float32)}
    arrays["empty"] = np.zeros((0, 3), np.float16)
    safetensors.numpy.save_file(arrays, tmp_path / SINGLE)
    tensors = Tensors.open(tmp_path)
    for name, array in arrays.items():
        assert tensors.load(name).shape == array.shape and np.array_equal(tensors.load(name), array)


def test_derived_tables_are_left_out(tmp_path: Path) -> None:
    """Old Llama files hold RoPE's frequencies, which follow from config.json."""
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    header = {"a": entry(0, 4, [1]), table: entry(4, 12, [1], "I64")}
    write(tmp_path / SINGLE, header, bytes(12))
    assert list(Tensors.open(tmp_path)) == ["a"]


def test_the_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {"a": entry(0, 4, [1])}, bytes(4))
    (tmp_path / INDEX).write_text('{"weight_map": {"b": "missing.safetensors"}}')
    assert list(Tensors.open(tmp_path)) == ["a"]


GOOD: Header = {"a": entry(0, 8, [2]), "b": entry(8, 12, [1])}
DAMAGED: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("empty", lambda p: p.write_bytes(b""), ["truncated", "0 bytes"]),
    ("only a length", lambda p: p.write_bytes(struct.pack("<Q", 50)), ["truncated", "58"]),
    ("data cut off", lambda p: write(p, GOOD, bytes(11)), ["truncated", "bytes by its header"]),
    ("data too long", lambda p: write(p, GOOD, bytes(13)), ["belong to no tensor"]),
    ("a huge header", lambda p: p.write_bytes(struct.pack("<Q", 2**63) + bytes(99)), ["truncated"]),
    ("not JSON", lambda p: write(p, b"{'a': 1}"), ["not JSON"]),
    ("deep JSON", lambda p: write(p, b"[" * 100_000), ["not JSON"]),
    ("not UTF-8", lambda p: write(p, b'{"\xff": 1}'), ["not JSON"]),
    ("not an object", lambda p: write(p, b"[1]"), ["not an object"]),
    ("a name twice", lambda p: write(p, b'{"a": {}, "a": {}}'), ["twice"]),
    ("overlap", lambda p: write(p, {"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, bytes(8)), ["b", "overlaps"]),
    ("gap", lambda p: write(p, {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)), ["b", "gap"]),
    ("negative offset", lambda p: write(p, {"a": entry(-4, 0, [1])}), ["a", "ascending"]),
    ("descending offsets", lambda p: write(p, {"a": entry(4, 0, [1])}), ["a", "ascending"]),
    ("bool shape", lambda p: write(p, {"a": {**entry(0, 4, [1]), "shape": [True]}}, bytes(4)), ["a", "shape"]),
    ("huge shape", lambda p: write(p, {"a": entry(0, 4, [2**40, 2**40])}, bytes(4)), ["a", "4 bytes"]),
    ("no shape", lambda p: write(p, {"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), ["a", "shape"]),
    ("size of another shape", lambda p: write(p, {"a": entry(0, 4, [2])}, bytes(4)), ["(2,)", "8 bytes"]),
    ("300 dimensions", lambda p: write(p, {"a": entry(0, 4, [2**61] * 300)}, bytes(4)), ["a", "at most 8 sizes"]),
    ("300,000 dimensions", lambda p: write(p, {"a": entry(0, 4, [2**61] * 300_000)}, bytes(4)), ["at most 8"]),
    ("8 huge dimensions", lambda p: write(p, {"a": entry(0, 4, [2**61] * 8)}, bytes(4)), ["a", "4 bytes"]),
    ("a terminal's escape", lambda p: write(p, {"\x1b[2J": entry(0, 4, [1])}, bytes(4)), [r"'\x1b[2J'", "control"]),
    ("half a surrogate pair", lambda p: write(p, {"\ud800": entry(0, 4, [1])}, bytes(4)), [r"'\ud800'"]),
    ("a dtype of 1 MB", lambda p: write(p, {"a": entry(0, 4, [1], "Q" * 10**6)}, bytes(4)), ["BF16"]),
    ("fp8", lambda p: write(p, {"a": entry(0, 4, [4], "F8_E4M3")}, bytes(4)), ["F8_E4M3", "BF16"]),
    ("int8", lambda p: write(p, {"a": entry(0, 4, [4], "I8")}, bytes(4)), ["I8", "BF16"]),
    ("unknown dtype", lambda p: write(p, {"a": entry(0, 4, [4], "Q7")}, bytes(4)), ["Q7"]),
]


@pytest.mark.parametrize(("damage", "words"), [d[1:] for d in DAMAGED], ids=[d[0] for d in DAMAGED])
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], object], words: list[str]) -> None:
    damage(tmp_path / SINGLE)
    with pytest.raises(CheckpointError) as caught:
        Tensors.open(tmp_path)
    assert SINGLE in str(caught.value) and len(str(caught.value)) < 3000
    assert "\x1b" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_header_over_the_limit(tmp_path: Path) -> None:
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)  # sparse
    with pytest.raises(CheckpointError, match="100000001"):
        Tensors.open(tmp_path)


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_every_truncation_is_noticed(tmp_path: Path, cut: int) -> None:
    write(tmp_path / SINGLE, GOOD, bytes(12))
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[: max(0, len(whole) - 1 - cut)])
    with pytest.raises(CheckpointError, match="truncated"):
        Tensors.open(tmp_path)


def index(folder: Path, names: dict[str, object]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_missing_and_contradictory_shards(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write(tmp_path / one, {"a": entry(0, 4, [1])}, bytes(4))
    with pytest.raises(CheckpointError, match=INDEX):
        Tensors.open(tmp_path)
    index(tmp_path, {"a": one, "b": two})
    with pytest.raises(CheckpointError, match=two):
        Tensors.open(tmp_path)
    write(tmp_path / two, {"c": entry(0, 4, [1])}, bytes(4))
    with pytest.raises(CheckpointError, match="no tensor b"):
        Tensors.open(tmp_path)
    write(tmp_path / two, {"a": entry(0, 4, [1])}, bytes(4))
    with pytest.raises(CheckpointError, match="a is in"):
        Tensors.open(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "x.bin", "", 3, None])
def test_an_index_names_plain_files_only(tmp_path: Path, name: object) -> None:
    index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="weight_map"):
        Tensors.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        Tensors.open(tmp_path)


def test_no_weights_and_pickles(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        Tensors.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError) as caught:
        Tensors.open(tmp_path)
    assert "pytorch_model.bin" in caught.value.what and "convert" in caught.value.fix


def test_unknown_names_and_files_that_shrink(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, GOOD, bytes(12))
    tensors = Tensors.open(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor z"):
        tensors.load("z")
    assert tensors.load("a").shape == (2,)
    write(tmp_path / SINGLE, GOOD, bytes(9))
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match="has changed since it was opened: 143 bytes then, 140 now"):
            tensors.load(name)


def test_a_file_that_is_written_in_place(tmp_path: Path) -> None:
    """What was read before and after would belong to two models."""
    write(tmp_path / SINGLE, GOOD, bytes(12))
    os.utime(tmp_path / SINGLE, ns=(1, 1))
    tensors = Tensors.open(tmp_path)
    tensors.load("a")
    with (tmp_path / SINGLE).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(CheckpointError, match="it was written"):
        tensors.load("a")
    with pytest.raises(CheckpointError, match="it was written"):
        tensors.digest()


def test_a_file_that_goes_away(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, GOOD, bytes(12))
    tensors = Tensors.open(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="has changed since"):
        tensors.load("a")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        tensors.load("a")


@pytest.mark.parametrize("seed", range(100))
def test_flipped_bytes_open_or_are_refused(tmp_path: Path, seed: int) -> None:
    """And what opens can be loaded, whole, inside the file."""
    rng = np.random.default_rng(seed)
    write(tmp_path / SINGLE, GOOD, bytes(12))
    data = bytearray((tmp_path / SINGLE).read_bytes())
    for _ in range(rng.integers(1, 4)):
        data[rng.integers(len(data))] = rng.choice([*b'0123456789-[]{}":,ab ', 0, 255, rng.integers(256)])
    (tmp_path / SINGLE).write_bytes(data)
    try:
        tensors = Tensors.open(tmp_path)
    except CheckpointError:
        return
    for name, info in tensors.items():
        assert tensors.load(name).nbytes == info.nbytes
