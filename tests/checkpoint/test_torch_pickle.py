"""Hostile pickles: none is executed, each one is one clear error in bounded time and memory."""

import io
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.checkpoint.weights import torch_pickle
from millrace.checkpoint.weights.torch_pickle import read_torch_pickle
from millrace.errors import CheckpointError

FLOATS = b"ctorch\nFloatStorage\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
TOUCHED = "touched-by-a-pickle"


def read(data: bytes) -> Any:
    return read_torch_pickle(io.BytesIO(data), Path("model.bin"))[0]


def refusal(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(data)
    assert caught.value.what.startswith("model.bin")
    return caught.value.what


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def storage(count: bytes = number(4), key: bytes = b"X\1\0\0\0000") -> bytes:
    """The opcodes of a storage of four floats."""
    return b"(X\7\0\0\0storage" + FLOATS + key + b"X\3\0\0\0cpu" + count + b"tQ"


def tensor(offset: int = 0, shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,)) -> bytes:
    sizes = [pickle.dumps(each, 2)[2:-1] for each in (shape, strides)]
    return REBUILD + b"(" + storage() + number(offset) + b"".join(sizes) + b"\x89}tR."


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"w": v}, lambda v: [({"a": [v]},)]])
@pytest.mark.parametrize(("call", "name"), [
    (Call(os.system, f"touch {TOUCHED}"), "posix.system"), (Call(eval, "1 + 1"), "builtin"),
    (Call(getattr, "", "join"), "builtin"), (Call(__import__, "os"), "builtin"),
])  # fmt: skip
def test_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, name: str, wrap: Any, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    what = refusal(pickle.dumps(wrap(call), protocol))
    assert f"names {'__builtin__' if name == 'builtin' and protocol < 3 else name}" in what.replace("builtins", name)
    assert not (tmp_path / TOUCHED).exists()


@pytest.mark.parametrize(("data", "part"), [
    (b"cos\nsystem\n(S'x'\ntR.", "names os.system"), (b"cbuiltins\neval\n(S'1'\ntR.", "names builtins.eval"),
    (b"(S'x'\nios\nsystem\n.", "names os.system"), (b"(cos\nsystem\nS'x'\no.", "names os.system"),
    (b"(ctorch\nSize\nS'x'\no.", "the opcode OBJ"), (b"ctorch\nSize\n)\x81.", "the opcode NEWOBJ"),
    (b"\x80\x04ctorch\nSize\n)}\x92.", "the opcode NEWOBJ_EX"), (b"\x82\x01.", "the opcode EXT1"),
    (b"Pname\n.", "the opcode PERSID"), (b"\x80\x04\x8f.", "the opcode EMPTY_SET"),
    (b"\x80\x05\x97.", "the opcode NEXT_BUFFER"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names os.system"),
    (b"\x80\x04\x8c\x05torch\x8c\x0b_utils.eval\x93.", "names torch._utils.eval"),
    (b"\x80\x04K\x01K\x02\x93.", "without strings"), (b"ctorch\nload\n.", "names torch.load"),
    (b"ctorch.storage\n_load_from_bytes\n.", "names torch.storage._load_from_bytes"),
    (b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n.", "names torch._utils._rebuild_tensor_v2.__globals__"),
    (b"}}b.", "attributes of an object of type dict"), (b"]}b.", "attributes of an object of type list"),
    (b"ctorch\nSize\n}b.", "attributes of an object of type TorchGlobal"),
    (b"ccollections\nOrderedDict\n)RNb.", "attributes of an object"),
    (b"ctorch\nSize\n)R.", "calls torch.Size with arguments"), (b"K\x01)R.", "calls int with"),
    (FLOATS + b")R.", "calls torch.FloatStorage"), (b"ctorch\nfloat32\n)R.", "calls torch.float32"),
    (b"ccollections\nOrderedDict\n(K\x01tR.", "calls collections.OrderedDict"),
    (REBUILD + b")R.", "calls torch._utils"),
    (b"ctorch._utils\n_rebuild_parameter\n(K\x01\x88}tR.", "calls torch._utils._rebuild_parameter"),
])  # fmt: skip
def test_opcodes_and_globals(data: bytes, part: str) -> None:
    assert part in refusal(data)


@pytest.mark.parametrize(("data", "part"), [
    (b".", "0 objects on the stack"), (b"K\x01K\x02.", "2 objects"), (b"(K\x01.", "1 objects"),
    (b"0.", "more from the stack"), (b"K\x01(0K\x02a.", "appends"), (b"(s.", "more from the stack"),
    (b"K\x01(s.", "more from the stack"), (b"t.", "no mark"), (b"e.", "no mark"), (b"2.", "more from the stack"),
    (b"q\0.", "more from the stack"), (b"h\0.", "reads the memo at 0"),
    (b"K\x01K\x02a.", "appends to an object of type int"),
    (b"](K\x01u.", "sets items of an object of type list"), (b"}(K\x01u.", "sets items"),
    (b"}K\x01\x85K\x01s.", "key of type tuple"),
    (b"}G\0\0\0\0\0\0\0\0K\x01s.", "key of type float"),
    (b"}\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x0fK\x01s.", "key of type int"),
    (b"K", "damaged pickle"), (b"K\x01", "damaged pickle"), (b"\xff.", "damaged pickle"),
    (b"X\xff\xff\xff\xffa.", "damaged"),
    (b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.", "damaged"), (b"X\2\0\0\0\xff\xfe.", "damaged"),
    (b"\x8b\x00\x00\x01\x00" + bytes(65535) + b"\x01.", "integer of"), (b"I" + b"9" * 5000 + b"\n.", "damaged"),
    (b"(" * 2000 + b".", "nests more than 1000"),
])  # fmt: skip
def test_damaged_pickles(data: bytes, part: str) -> None:
    assert part in refusal(data)


@pytest.mark.parametrize(("data", "part"), [
    (storage(number(-1)), "names no storage"), (storage(number(1 << 62)), "names no storage"),
    (storage(b"G\0\0\0\0\0\0\0\0"), "names no storage"), (storage(key=b"K\x01"), "names no storage"),
    (b"K\x01Q", "names no storage"),
    (b"(X\7\0\0\0storageX\1\0\0\0aX\1\0\0\0000X\3\0\0\0cpuK\x01tQ", "names no storage"),
    (b"(X\7\0\0\0storagectorch\nSize\nX\1\0\0\0000X\3\0\0\0cpuK\x01tQ", "names no storage"),
    (storage(number(4) + b"(X\1\0\0\0vK\0K\x01t"), "names no storage"),
])  # fmt: skip
def test_persistent_ids(data: bytes, part: str) -> None:
    assert part in refusal(data + b".")


def test_a_tensor_and_its_storage() -> None:
    found = read(tensor(1, (3,)))
    assert (found.dtype, found.shape, found.strides, found.offset, found.storage.count) == ("float32", (3,), (1,), 1, 4)


@pytest.mark.parametrize(("offset", "shape", "strides"), [
    (-1, (1,), (1,)), (0, (-1,), (1,)), (0, (4,), (-1,)), (1, (4,), (1,)), (0, (5,), (1,)), (0, (2,), (4,)),
    (5, (0,), (1,)),
    (0, (1 << 61, 1 << 61), (1, 1)), (0, (2, 2), (1 << 61, 1)), (1 << 61, (1,), (1,)), (0, (4,), ()), (0, (), (1,)),
    (0, (1 << 70,), (1,)), (0, (1,) * 9, (1,) * 9), (0, (True,), (1,)), (0, (1.0,), (1,)), (0, ("a",), (1,)),
])  # fmt: skip
def test_places_outside_of_the_storage(offset: int, shape: Any, strides: Any) -> None:
    assert "has a damaged pickle, which has a tensor" in refusal(tensor(offset, shape, strides))


def test_containers_that_hold_themselves_or_are_deep() -> None:
    """Nothing recurses: deep containers are read, and freed."""
    loop = read(b"]q\0h\0a.")
    assert loop[0] is loop
    assert isinstance(read(b")" + b"\x85" * 100_000 + b"."), tuple)
    deep = read(b"]" * 100_000 + b"a" * 99_999 + b".")
    assert len(deep) == 1


def test_python_2_dicts() -> None:
    found = read(b"ccollections\nOrderedDict\n(](](U\1aK\1e](U\1bK\2eetR.")
    assert dict(found) == {"a": 1, "b": 2}


@pytest.mark.parametrize("data", [
    b"K\x01" * 3_000_000, b"]" * 3_000_000, b"}" * 3_000_000, b"]" + b"q\0" * 3_000_000, b"K\x01" + b"2" * 3_000_000,
    b")" + b"\x85" * 3_000_000, b"](" + b"K\x01" * 3_000_000,
], ids=["numbers", "lists", "dicts", "memo", "copies", "depth", "items"])  # fmt: skip
def test_endless_pickles(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "MAX_OPCODES", 100_000)  # a twentieth, so that the test is quick
    start = time.process_time()
    assert "more opcodes" in refusal(data + b".")
    assert time.process_time() - start < 5


def test_promised_sizes_are_not_allocated() -> None:
    tracemalloc.start()
    for data in (b"\x8e" + (1 << 40).to_bytes(8, "little") + b"a.", b"B\xff\xff\xff\x7fa.", b"T\xff\xff\xff\x7fa."):
        refusal(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
