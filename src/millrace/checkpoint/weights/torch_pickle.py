"""Reads the pickles of torch.save without executing them: tensors, plain containers, and nothing else.

A pickle is a program for a small stack machine. `pickletools` decodes its opcodes and runs nothing; the machine here
implements the opcodes that build numbers, strings, lists, tuples and dicts, and a table of the globals that torch.save
writes. No global is imported: each one is only compared with the table. A file is hostile input, therefore opcodes,
marks and integers are bounded, and nothing recurses into containers, which may be deep or contain themselves.

source: https://github.com/python/cpython/blob/main/Lib/pickletools.py, torch/_utils.py of PyTorch 2.
"""

import pickletools
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from millrace.errors import CheckpointError

MAX_OPCODES = 2_000_000  # a tensor has about 40
MAX_MARKS = 1000  # nested containers that are being filled
MAX_RANK = 8  # as for safetensors
_MAX_INT_BITS = 128  # the magic number of the old format has 77
_MAX_KEY = 2**31  # integers that are keys, so that hashes cannot be made to collide

_STORAGES = {
    "torch.FloatStorage": "float32", "torch.HalfStorage": "float16", "torch.BFloat16Storage": "bfloat16",
    "torch.DoubleStorage": "float64", "torch.LongStorage": "int64", "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16", "torch.CharStorage": "int8", "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool", "torch.UntypedStorage": "uint8", "torch.storage.UntypedStorage": "uint8",
}  # fmt: skip
_DTYPES = {
    f"torch.{name}": name for name in (
        "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
        "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    )
}  # fmt: skip
_TENSOR, _TYPED_TENSOR = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER, _ORDERED_DICT, _SIZE = "torch._utils._rebuild_parameter", "collections.OrderedDict", "torch.Size"
_GLOBALS = {_TENSOR, _TYPED_TENSOR, _PARAMETER, _ORDERED_DICT, _SIZE, *_STORAGES, *_DTYPES}
ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

_ARGUMENTS = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8",
))  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = "tensors, numbers, strings, lists, tuples and dicts, as in a state_dict"
_AGAIN = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class TorchStorage:
    """A storage as the pickle names it. count: its elements of `dtype`"""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A view of a storage, inside of it. strides and offset are in elements of `dtype`."""

    storage: TorchStorage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def extent(self) -> int:
        """Return the number of elements of the storage from the first to the last one."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class TorchGlobal:
    """A global of the table, such as a dtype, that is only named."""

    name: str


def read_torch_pickle(data: BinaryIO, path: Path) -> tuple[object, dict[str, TorchStorage]]:
    """Read one pickle from `data`, and return its object and the storages that it names, by their keys.

    path: the file, for messages. raises CheckpointError if the pickle is damaged, too large, or needs a global or an
    opcode that is not allowed
    """
    machine = _StackMachine(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of escape sequences in strings of protocol 0
            for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
                if count >= MAX_OPCODES:
                    raise CheckpointError(f"{path} has a pickle of more opcodes", f"at most {MAX_OPCODES:,}", _AGAIN)
                machine.run(opcode.name, argument)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} has a damaged pickle: {error}", "a file of torch.save", _AGAIN) from error
    return machine.result(), machine.storages


class _StackMachine:
    """The stack, the marks in it and the memo of one pickle."""

    def __init__(self, path: Path) -> None:
        self.storages: dict[str, TorchStorage] = {}
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, object] = {}

    def result(self) -> object:
        """Return the object. raises CheckpointError if the stack holds anything else"""
        if len(self._stack) != 1 or self._marks:
            self._damaged(f"leaves {len(self._stack)} objects on the stack")
        return self._stack[0]

    def run(self, opcode: str, argument: Any) -> None:
        """Run one opcode. raises CheckpointError"""
        if opcode in _ARGUMENTS:
            if type(argument) is int and argument.bit_length() > _MAX_INT_BITS:
                self._damaged(f"has an integer of {argument.bit_length()} bits")
            self._stack.append(argument)
        elif opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode])
        elif opcode in _TUPLES:
            self._stack.append(tuple(self._take(_TUPLES[opcode])))
        elif opcode == "EMPTY_DICT":
            self._stack.append({})
        elif opcode == "EMPTY_LIST":
            self._stack.append([])
        elif opcode in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif opcode in ("GET", "BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                self._damaged(f"reads the memo at {argument}, where nothing is")
            self._stack.append(self._memo[argument])
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            self._run_on_containers(opcode, argument)

    def _run_on_containers(self, opcode: str, argument: Any) -> None:
        match opcode:
            case "MARK":
                if len(self._marks) >= MAX_MARKS:
                    self._damaged(f"nests more than {MAX_MARKS} containers")
                self._marks.append(len(self._stack))
            case "TUPLE":
                self._stack.append(tuple(self._to_mark()))
            case "LIST":
                self._stack.append(self._to_mark())
            case "DICT":
                items = self._to_mark()
                self._stack.append({})
                self._set(self._top(), items)
            case "APPEND":
                self._append(self._take(1))
            case "APPENDS":
                self._append(self._to_mark())
            case "SETITEM":
                items = self._take(2)
                self._set(self._top(), items)
            case "SETITEMS":
                items = self._to_mark()
                self._set(self._top(), items)
            case "POP":
                if self._marks and self._marks[-1] == len(self._stack):
                    self._marks.pop()
                else:
                    self._take(1)
            case "POP_MARK":
                self._to_mark()
            case "DUP":
                self._stack.append(self._top())
            case _:
                self._run_on_globals(opcode, argument)

    def _run_on_globals(self, opcode: str, argument: Any) -> None:
        match opcode:
            case "GLOBAL":
                self._stack.append(self._global(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                self._stack.append(self._global(".".join(map(str, self._texts(2)))))
            case "REDUCE":
                function, arguments = self._take(2)
                self._stack.append(self._call(function, arguments))
            case "BUILD":
                (state,) = self._take(1)
                if type(self._top()) is not OrderedDict or type(state) is not dict:  # `_metadata` of a state_dict
                    self._refuse(f"sets attributes of an object of type {type(self._top()).__name__}")
            case "BINPERSID":
                self._stack.append(self._storage(*self._take(1)))
            case "INST":
                self._refuse(f"names {argument.replace(' ', '.', 1)}")
            case _:
                self._refuse(f"has the opcode {opcode}")

    def _top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._damaged("takes more from the stack than is there")
        return self._stack[-1]

    def _take(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            self._damaged("takes more from the stack than is there")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _texts(self, count: int) -> list[str]:
        texts = self._take(count)
        if not all(type(text) is str for text in texts):
            self._damaged("names a global without strings")
        return texts

    def _to_mark(self) -> list[Any]:
        if not self._marks:
            self._damaged("has no mark on the stack")
        items = self._take(len(self._stack) - self._marks[-1])
        self._marks.pop()
        return items

    def _append(self, items: list[Any]) -> None:
        if type(self._top()) is not list:
            self._damaged(f"appends to an object of type {type(self._top()).__name__}")
        self._top().extend(items)

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            self._damaged(f"sets items of an object of type {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # other keys could be deep tuples, whose hash recurses
            if type(key) is not str and not (type(key) in (int, bool) and -_MAX_KEY <= key < _MAX_KEY):
                self._refuse(f"has a dict with a key of type {type(key).__name__}")
            target[key] = value

    def _global(self, name: str) -> TorchGlobal:
        if name not in _GLOBALS:
            self._refuse(f"names {name}")
        return TorchGlobal(name)

    def _call(self, function: object, arguments: object) -> object:
        name = function.name if isinstance(function, TorchGlobal) else type(function).__name__
        match name, arguments:
            case "collections.OrderedDict", ():
                return OrderedDict[Any, Any]()
            case "collections.OrderedDict", (list() as pairs,) if all(_is_pair(each) for each in pairs):  # Python 2's
                result = OrderedDict[Any, Any]()
                self._set(result, [part for pair in pairs for part in pair])
                return result
            case "torch.Size", (tuple() | list() as sizes,):
                return tuple(sizes)
            case "torch._utils._rebuild_parameter", (TorchTensor() as tensor, *_):
                return tensor
            case "torch._utils._rebuild_tensor_v2", (TorchStorage() as storage, offset, shape, strides, _, _, *more):
                self._check_metadata(more)
                return self._tensor(storage, storage.dtype, (offset, shape, strides))
            case (
                "torch._utils._rebuild_tensor_v3",
                (TorchStorage() as storage, offset, shape, strides, _, _, TorchGlobal(dtype), *more),
            ) if dtype in _DTYPES:
                self._check_metadata(more)
                return self._tensor(storage, _DTYPES[dtype], (offset, shape, strides))
        self._refuse(f"calls {name} with arguments that torch.save does not write")

    def _check_metadata(self, more: list[Any]) -> None:
        """Refuse lazy conjugation and negation, which would change the values."""
        if len(more) > 1 or any(not isinstance(each, dict) or any(v is not False for v in each.values())
                                for each in more if each is not None):  # fmt: skip
            self._refuse("has a tensor with metadata")

    def _storage(self, id_: object) -> TorchStorage:
        match id_:
            case ("storage", TorchGlobal(kind), str(key), str(), int(count), *view) if (
                kind in _STORAGES and 0 <= count < 2**62 and view in ([], [None])
            ):
                storage = TorchStorage(key, _STORAGES[kind], count)
                self.storages.setdefault(key, storage)  # views of other dtypes name the same key
                return storage
        self._damaged("has a persistent id that names no storage")

    def _tensor(self, storage: TorchStorage, dtype: str, place: tuple[object, object, object]) -> TorchTensor:
        offset, shape, strides = place
        if not (_are_sizes((offset,)) and _are_sizes(shape) and _are_sizes(strides)):
            self._damaged("has a tensor whose offset, sizes or strides are no sizes")
        if storage.dtype not in (dtype, "uint8"):
            self._damaged(f"has a tensor of {dtype} in a storage of {storage.dtype}")
        shape, strides = tuple(cast(list[int], shape)), tuple(cast(list[int], strides))
        if len(shape) != len(strides):
            self._damaged(f"has a tensor of {len(shape)} sizes and {len(strides)} strides")
        tensor = TorchTensor(storage, dtype, shape, strides, cast(int, offset))
        count = storage.count * ITEM_BYTES[storage.dtype] // ITEM_BYTES[dtype]
        if tensor.offset + tensor.extent > count:
            self._damaged(f"has a tensor of {tensor.extent} elements from {tensor.offset} on in a storage of {count}")
        return tensor

    def _damaged(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} has a damaged pickle, which {what}", "a file of torch.save", _AGAIN)

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(
            f"{self._path} {what}, which is refused; nothing of the file was executed", _PLAIN,
            "save the state_dict alone: torch.save(model.state_dict(), FILE), where the file comes from",
        )  # fmt: skip


def _are_sizes(value: object) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) <= MAX_RANK
        and all(type(n) is int and 0 <= n < 2**62 for n in value)
    )


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2
