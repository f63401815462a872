"""Weight files of torch.save against torch.load: dtypes, views, both formats, and files that are damaged."""

import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.weights import torch_file, torch_pickle, zip_directory
from millrace.checkpoint.weights.torch_file import TorchFile
from millrace.errors import CheckpointError

torch = pytest.importorskip("torch", reason="the independent truth")

FORMATS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(value: object, is_zip: bool = True, **options: Any) -> Path:
        path = tmp_path / "pytorch_model.bin"
        torch.save(value, path, _use_new_zipfile_serialization=is_zip, **options)
        return path

    return write


def stored(file: TorchFile, name: str) -> bytes:
    return b"".join(block.tobytes() for block in file.blocks(name))


def truth(tensor: Any) -> bytes:
    data: bytes = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data


def assert_like_torch(path: Path, weights_only: bool = True) -> TorchFile:
    file, expected = TorchFile.open(path), torch.load(path, weights_only=weights_only)
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert list(file.tensors) == list(tensors)
    for name, tensor in tensors.items():
        info = file.tensors[name]
        assert (info.shape, f"torch.{info.dtype}") == (tuple(tensor.shape), str(tensor.dtype)), name
        assert stored(file, name) == truth(tensor), name
    return file


@FORMATS
def test_every_dtype(save: Save, is_zip: bool) -> None:
    old = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8)  # fmt: skip
    new = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
    values = torch.arange(-6, 6)
    state = {str(dtype): values.abs().to(dtype) for dtype in (*old, *(new if is_zip else ()))} | {"bool": values > 0}
    assert_like_torch(save(state, is_zip))


@FORMATS
def test_views_and_shared_storages(save: Save, is_zip: bool) -> None:
    base = torch.arange(120, dtype=torch.float32)
    x = base.reshape(2, 3, 4, 5)
    assert_like_torch(save({
        "whole": x, "again": x, "offset": base[7:19], "transposed": x.permute(3, 1, 0, 2), "column": x[:, 1, ::2, 3],
        "steps": base[3::7], "expanded": base[:5].expand(4, 5), "scalar": torch.tensor(3.5), "element": base[9],
        "empty": torch.empty(0), "empty_rows": torch.empty(3, 0, 2), "no_rows": base[:0], "one": x[:1, :1, :1, :1],
        "parameter": torch.nn.Parameter(base[10:20]), "frozen": torch.nn.Parameter(x.mT, requires_grad=False),
        "ranks": base.reshape(1, 2, 1, 3, 1, 4, 1, 5),
    }, is_zip))  # fmt: skip


@pytest.mark.parametrize("block", [64, 100, 4096])
def test_views_that_are_larger_than_a_block(save: Save, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Spread rows are read at once, sparse ones in parts, and no part is larger than a block."""
    monkeypatch.setattr(torch_file, "_BLOCK", block)
    base = torch.arange(3000, dtype=torch.int16)
    path = save({
        "plain": base, "transposed": base.reshape(50, 60).T, "sparse": base.reshape(30, 100)[:, 3],
        "cube": base.reshape(10, 20, 15).permute(2, 0, 1), "sparse_cube": base.reshape(10, 20, 15)[::3, ::7, ::2],
        "expanded": base[:40].expand(20, 40), "columns": base[:40, None].expand(40, 20),
    })  # fmt: skip
    file = assert_like_torch(path)
    assert all(len(part) <= max(block, 2) for name in file.tensors for part in file.blocks(name))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(save: Save, protocol: int) -> None:
    state = OrderedDict(a=torch.ones(2, 3), b=torch.nn.Parameter(torch.zeros(4)))
    assert_like_torch(save(state, pickle_protocol=protocol), weights_only=protocol < 4)  # which torch reads up to 3


@FORMATS
def test_a_module_and_what_is_no_tensor(save: Save, is_zip: bool) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    assert state._metadata, "an attribute of the dict"
    state |= {"size": torch.Size([2, 3]), "dtype": torch.float16, "steps": [1, 2.5, None, True, "text"], "n": 10**20}
    path = save(state, is_zip)
    assert_like_torch(path)
    assert TorchFile.open(path).extras == ("size (tuple)", "dtype (torch.float16)", "steps (list)", "n (int)")


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_a_training_checkpoint(save: Save, key: str) -> None:
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    file = TorchFile.open(save({"epoch": 3, key: {"w": torch.ones(2), "note": "x"}, "optimizer": optimizer}))
    assert list(file.tensors) == ["w"]
    assert file.extras == ("note (str)", "epoch (int)", "optimizer (dict)")


@pytest.mark.parametrize(("value", "part"), [
    ({"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}}, "in several places; its keys: model, state"),
    ({"w": torch.ones(1), "model": {"w": torch.ones(1)}}, "in several places"),
    ({"epoch": 3}, "no tensors where"), ({}, "no tensors where"), (torch.ones(2), "an object of type tensor"),
    ([torch.ones(2)], "an object of type list"), ({3: torch.ones(2)}, "a tensor named 3"),
    ({"a\nb": torch.ones(2)}, "a tensor named"), ({"": torch.ones(2)}, "a tensor named"),
    ({"__metadata__": torch.ones(2)}, "a tensor named"),
])  # fmt: skip
def test_no_state_dict(save: Save, value: object, part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        TorchFile.open(save(value))
    assert part in caught.value.what


@pytest.mark.parametrize(("value", "part"), [
    (np.ones(2), "numpy"), ({1, 2}, "__builtin__.set"), (1j, "__builtin__.complex"),
    (torch.ones(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
    (torch.device("cpu"), "torch.device"), (Namespace(lr=1), "argparse.Namespace"), (Path("a"), "pathlib"),
    (torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"), (torch.nn.Linear(1, 1), "torch.nn.modules"),
])  # fmt: skip
def test_other_objects_are_refused_by_name(save: Save, value: object, part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        TorchFile.open(save({"w": torch.ones(2), "x": value}, pickle_protocol=2))
    assert f"names {part}" in caught.value.what and "nothing of the file was executed" in caught.value.what


def test_negation_that_is_not_computed_yet(save: Save) -> None:
    value = torch.view_as_real(torch.ones(2, dtype=torch.complex64).conj().resolve_conj())
    lazy = torch._neg_view(value)
    with pytest.raises(CheckpointError, match="metadata"):
        TorchFile.open(save({"w": lazy}))


def test_an_expanded_tensor_of_any_size(save: Save) -> None:
    with pytest.raises(CheckpointError, match="copies of its tensors need 4,000,000,000,000"):
        TorchFile.open(save({"w": torch.ones(1).expand(10**6, 10**6)}))


def test_a_file_that_changes(save: Save) -> None:
    path = save({"w": torch.ones(2)})
    file = TorchFile.open(path)
    save({"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match="has changed"):
        stored(file, "w")


def test_a_large_file_with_zip64_records(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes beyond 4 GiB stand in a record of their own; a sparse file has them without using the disk."""
    path = save({"w": torch.ones(3)})
    data = path.read_bytes()
    shift = 5 << 30
    end = data.rindex(b"PK\6\6")
    fields = list(struct.unpack_from("<4sQ2H2L4Q", data, end))
    start, size = fields[9], fields[8]
    directory, moved = data[start : start + size], b""
    at = 0
    while at < size:
        name_length, extra_length = struct.unpack_from("<2H", directory, at + 28)
        head, name = bytearray(directory[at : at + 46]), directory[at + 46 : at + 46 + name_length]
        extra = struct.pack("<2HQ", 1, 8, struct.unpack_from("<L", head, 42)[0] + shift)
        struct.pack_into("<H", head, 30, len(extra))
        struct.pack_into("<L", head, 42, 0xFFFFFFFF)
        moved, at = moved + bytes(head) + name + extra, at + 46 + name_length + extra_length
    fields[8], fields[9] = len(moved), start + shift
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + shift + len(moved), 1)
    tail = moved + struct.pack("<4sQ2H2L4Q", *fields) + locator + data[-22:]
    with path.open("wb") as file:
        file.write(b"PK\3\4")
        file.seek(shift)
        file.write(data[:start] + tail)
    assert stored(TorchFile.open(path), "w") == truth(torch.ones(3))


@FORMATS
def test_a_truncated_file(save: Save, is_zip: bool) -> None:
    data = (path := save({"w": torch.ones(300), "b": torch.zeros(3, 2)}, is_zip)).read_bytes()
    for length in [*range(0, len(data), 29), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            TorchFile.open(path)


@FORMATS
def test_a_damaged_file_is_read_or_refused(save: Save, is_zip: bool) -> None:
    """Every byte of the headers, replaced: one clear error, or a tensor of a state dict, and nothing else."""
    data = (path := save({"w": torch.ones(4), "b": torch.zeros(3, 2)}, is_zip)).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(400):
        wrong = bytearray(data)
        for at in rng.integers(0, len(data), 2):
            wrong[at] = rng.integers(0, 256)
        path.write_bytes(wrong)
        try:
            file = TorchFile.open(path)
            assert all(len(stored(file, name)) == info.nbytes for name, info in file.tensors.items())
        except CheckpointError:
            pass


def rezipped(path: Path, change: Callable[[zipfile.ZipFile, dict[str, bytes]], None]) -> Path:
    """Write the members of a zip file again. change: is given the new file, and the members that it has to write"""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        change(new, members)
    return path


def with_members(**changed: bytes | None) -> Callable[[zipfile.ZipFile, dict[str, bytes]], None]:
    def write(new: zipfile.ZipFile, members: dict[str, bytes]) -> None:
        for name, content in (
            members | {f"pytorch_model/{k.replace('__', '/')}": v for k, v in changed.items()}
        ).items():
            if content is not None:
                new.writestr(name, content)

    return write


def plus(name: str, **options: Any) -> Callable[[zipfile.ZipFile, dict[str, bytes]], None]:
    def write(new: zipfile.ZipFile, members: dict[str, bytes]) -> None:
        with_members()(new, members)
        new.writestr(name, bytes(1 << 20), **options)

    return write


@pytest.mark.parametrize(("change", "part"), [
    (with_members(byteorder=b"big"), "big-endian"), (with_members(data__0=bytes(11)), "storage 0 of w has 11 bytes"),
    (with_members(data__0=None), "storage 0 of w is missing"), (with_members(**{"constants.pkl": b""}), "TorchScript"),
    (plus("pytorch_model/bomb", compress_type=zipfile.ZIP_DEFLATED), "bomb that is compressed"),
    (plus("pytorch_model/bomb", compress_type=zipfile.ZIP_LZMA), "bomb that is compressed"),
    (plus("/etc/passwd"), "a member named /etc/passwd"), (plus("a/../../b"), "a member named a/../../b"),
    (plus("a\\b"), "a member named a"), (plus("other/data.pkl"), "2 members data.pkl"),
    pytest.param(plus("pytorch_model/data/0"), "two members pytorch_model/data/0",
                 marks=pytest.mark.filterwarnings("ignore:Duplicate name")),
    (with_members(**{"data.pkl": None}), "0 members data.pkl"),
])  # fmt: skip
def test_hostile_zip_files(save: Save, change: Any, part: str) -> None:
    path = rezipped(save({"w": torch.ones(3)}), change)
    with pytest.raises(CheckpointError) as caught:
        TorchFile.open(path)
    assert part in caught.value.what


def test_a_zip_file_without_byteorder_is_little_endian(save: Save) -> None:
    """As PyTorch wrote it until 2.0."""
    assert_like_torch(rezipped(save({"w": torch.ones(3)}), with_members(byteorder=None)))


def test_members_that_overlap(save: Save) -> None:
    """Many storages at one place would make a small file large."""
    path = save({"a": torch.ones(64), "b": torch.zeros(64)})
    data = bytearray(path.read_bytes())
    first, second = (data.rindex(f"pytorch_model/data/{i}".encode()) - 46 for i in (0, 1))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="overlaps"):
        TorchFile.open(path)


@pytest.mark.parametrize(("module", "limit"), [
    (zip_directory, "MAX_DIRECTORY_BYTES"), (torch_file, "MAX_PICKLE_BYTES"), (torch_pickle, "MAX_OPCODES"),
])  # fmt: skip
def test_limits(save: Save, monkeypatch: pytest.MonkeyPatch, module: Any, limit: str) -> None:
    monkeypatch.setattr(module, limit, 10)
    with pytest.raises(CheckpointError) as caught:
        TorchFile.open(save({"w": torch.ones(3)}))
    assert "at most 10" in caught.value.expected


def test_a_directory_that_promises_more_than_there_is(save: Save) -> None:
    path = save({"w": torch.ones(3)})
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\6\6")
    for at in (32, 40, 48):  # members, bytes of the directory, its offset
        for value in (1 << 40, (1 << 64) - 1):
            wrong = bytearray(data)
            wrong[end + at : end + at + 8] = value.to_bytes(8, "little")
            path.write_bytes(wrong)
            with pytest.raises(CheckpointError):
                TorchFile.open(path)


@pytest.mark.parametrize(("content", "part"), [
    (b"", "not a file of torch.save"), (b"hello", "not a file of torch.save"), (b"\x80\x02K\x01.", "not a file of"),
    (b"version https://git-lfs.github.com/spec/v1\n", "not a file of torch.save"), (b"\x80", "damaged pickle"),
])  # fmt: skip
def test_other_files(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        TorchFile.open(tmp_path / "a.bin")
    assert part in caught.value.what


def test_the_old_format_of_a_big_endian_machine(save: Save) -> None:
    path = save({"w": torch.ones(3)}, is_zip=False)
    data = path.read_bytes()
    at = data.index(b"\x88", data.index(b"little_endian"))
    path.write_bytes(data[:at] + b"\x89" + data[at + 1 :])
    with pytest.raises(CheckpointError, match="big-endian"):
        TorchFile.open(path)


def test_the_old_format_with_a_storage_of_another_size(save: Save) -> None:
    path = save({"w": torch.full((3,), 2.0)}, is_zip=False)
    data = path.read_bytes()
    assert data[-20:-12] == (3).to_bytes(8, "little")
    for count in (0, 2, 4, 1 << 40, (1 << 64) - 1):
        path.write_bytes(data[:-20] + count.to_bytes(8, "little") + data[-12:])
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            TorchFile.open(path)
