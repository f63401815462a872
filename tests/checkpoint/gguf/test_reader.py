"""The container, and what hostile files come to: one error in three parts, soon, and nothing else."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.gguf.reader import GgufFile, is_gguf
from millrace.errors import CheckpointError
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import write_gguf

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 720, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    random_checkpoint(folder / "llama", "llama", **SMALL)
    return write_gguf(folder / "model.gguf", folder / "llama").read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "w", shape: tuple[int, ...] = (4, 8), kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return head + struct.pack("<IQ", kind, offset)


def file(pairs: list[bytes], tensors: list[bytes], data: int = 1024, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def opened(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GgufFile.open(path)


def test_every_type_of_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    values = {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 1e-300, "bool": True, "string": "é\n",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    arrays: dict[str, list[Any]] = {
        "a.texts": ["", "x", "日本"],
        "a.numbers": [1, -2, 3],
        "a.floats": [0.5, 1.5],
        "a.bools": [True, False],
    }
    for key, array in arrays.items():
        writer.add_array(key, array)
    writer.add_tensor("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("v", np.arange(3, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufFile.open(tmp_path / "model.gguf")
    for kind, value in values.items():
        assert read.metadata[f"a.{kind}"] == value and type(read.metadata[f"a.{kind}"]) is type(value)
    for key, array in arrays.items():
        found = read.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == array
    assert [(t.shape, t.type.name, t.nbytes) for t in read.tensors.values()] == [((3, 4), "F32", 48), ((3,), "F16", 6)]
    raw = (tmp_path / "model.gguf").read_bytes()
    at = read.tensors["w"].offset
    np.testing.assert_array_equal(np.frombuffer(raw[at : at + 48], "<f4"), np.arange(12))


def test_versions_and_alignment(tmp_path: Path) -> None:
    assert opened(tmp_path, file([], [tensor()], version=2)).tensors["w"].offset % 32 == 0
    aligned = file([pair("general.alignment", 4, struct.pack("<I", 64))], [tensor()])
    assert opened(tmp_path, aligned + bytes(64)).tensors["w"].offset % 64 == 0


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no GGUF file"),
        (b"PK\x03\x04" + bytes(100), "no GGUF file"),
        (b"GGUF", "truncated"),
        (file([], [tensor()], version=1), "version 1"),
        (file([], [tensor()], version=3 << 24), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(100), "promises 9223372036854775808 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + text("k"), "at most 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 60000, 0) + bytes(100), "name of 0 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 60000) + text("k"), "truncated"),
        (file([pair("a\nb", 4, bytes(4))], []), "control characters"),
        (file([], [tensor("a\x1b]0;x")]), "control characters"),
        (file([pair("k", 99, b"")], []), "value of type 99"),
        (file([pair("k", 8, struct.pack("<Q", 2**63))], []), "truncated"),
        (file([pair("k", 9, struct.pack("<IQ", 8, 2**61))], []), "truncated"),
        (file([pair("k", 9, struct.pack("<IQ", 0, 2**62))], []), "truncated"),
        (file([pair("k", 9, struct.pack("<IQ", 9, 1))], []), "value of type 9"),
        (file([pair("k", 8, struct.pack("<Q", 1) + b"\xff")], []), "not UTF-8"),
        (file([pair("k", 0, b"1"), pair("k", 0, b"1")], []), "twice"),
        (file([struct.pack("<Q", 2**40)], []), "name of"),
        (file([], [tensor(), tensor(offset=128)]), "twice"),
        (file([], [tensor(), tensor("v", offset=64)]), "overlaps"),
        (file([], [tensor(offset=8)]), "lies at 8"),
        (file([], [tensor(offset=2**62)]), "truncated"),
        (file([], [tensor(shape=(2**40, 2**40))]), "has a wrong header"),
        (file([], [tensor(shape=(0, 4))]), "has a wrong header"),
        (file([], [tensor(shape=(4, 31), kind=2)]), "rows of a multiple of 32"),
        (file([], [tensor(shape=(1, 1, 1, 1, 1))]), "5 dimensions"),
        (file([], [tensor(kind=10)]), "Q2_K"),
        (file([], [tensor(kind=4)]), "type 4"),
        (file([], [tensor("n" * 65)]), "name of 65"),
        (file([pair("general.alignment", 4, struct.pack("<I", 0))], []), "alignment"),
        (file([pair("general.alignment", 8, text("32"))], []), "alignment"),
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes, word: str) -> None:
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=word):
        opened(tmp_path, content)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, whole: bytes) -> None:
    cuts = [*range(0, 4000, 37), *np.linspace(4000, len(whole) - 1, 60).astype(int).tolist()]
    for cut in cuts:
        (tmp_path / "model.gguf").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            Checkpoint.open(tmp_path / "model.gguf")


def test_mutated_files_open_or_are_refused(tmp_path: Path, whole: bytes) -> None:
    """Any of 200 random changes ends in an error of ours or in a checkpoint whose every part can be read."""
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    start = min(t.offset for t in GgufFile.open(path).tensors.values())
    refused = 0
    for seed in range(200):
        rng = random.Random(seed)
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(start if rng.random() < 0.95 else len(content))
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(content)
        try:
            checkpoint = Checkpoint.open(path)
            for name in checkpoint.tensors:
                checkpoint.tensors.load(name)
            checkpoint.tokenizer.encode("the mill <s> naïve")
            assert checkpoint.identity()
        except CheckpointError as error:
            refused += 1
            assert error.what and error.expected and error.fix
    assert refused > 20


def test_what_is_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "sha256-0123").write_bytes(b"GGUF and more")
    (tmp_path / "MODEL.GGUF").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "folder.gguf").mkdir()
    found = [p.name for p in sorted(tmp_path.iterdir()) if is_gguf(p)]
    assert found == ["MODEL.GGUF", "sha256-0123"] and not is_gguf(tmp_path / ("x" * 5000))
