"""A GPU's programs without one: what Triton compiles to PTX, instruction by instruction, for all threads of a program.

Only what kernels here are made of, and only where all threads take the same branches. Registers are int64 with the
bits of their type. Tensor cores cut off: products and what they are added to 24 bits below the largest of them, and the
sum once more to float32, as earlier ones are known to (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021),
with one bit more. Source of all else: NVIDIA's PTX ISA.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]

SHARED_BYTES = 1 << 17
_WORD = 0xFFFFFFFF
_ASKS = re.compile(r"\{ \.reg \.pred p;.*?mov\.u32 (%r\d+), 0; \}", re.DOTALL)  # what is asked for ahead
_PASSES = "bar.sync", "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
            "ne": np.not_equal}  # fmt: skip


def _signed(x: Words) -> Words:
    return ((x & _WORD) ^ 0x80000000) - 0x80000000


def _unsigned(x: Words) -> Words:
    return x & _WORD


def _float(x: Words) -> Floats:
    return (x & _WORD).astype(np.uint32).view(np.float32).astype(np.float64)


def _bits(x: Floats) -> Words:
    return x.astype(np.float32).view(np.uint32).astype(np.int64)


def _from_bf16(x: Words) -> Floats:
    return _float((x & 0xFFFF) << 16)


def _from_fp16(x: Words) -> Floats:
    return (x & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)


def _bf16(x: Words) -> Words:
    """The bits of a float32 to nearest, ties to even."""
    return ((x & _WORD) + 0x7FFF + (x >> 16 & 1)) >> 16 & 0xFFFF


def _fp16(x: Words) -> Words:
    return _float(x).astype(np.float16).view(np.uint16).astype(np.int64)


def _field(x: Words, at: Words, n: Words) -> Words:
    return _unsigned(x) >> at & ((1 << n) - 1)


def _signed_field(x: Words, at: Words, n: Words) -> Words:
    found = _field(x, at, n)
    return found - (found >> (n - 1) << n)


def _select(x: Words, y: Words, where: Words) -> Words:
    found: Words = np.where(where != 0, x, y)
    return found


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit by bit what a table says of three bits."""
    found = np.zeros_like(a)
    for i in range(8):
        if table[0] >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _prmt(a: Words, b: Words, which: Words) -> Words:
    both, found = _unsigned(a) | b << 32, np.zeros_like(a)
    for i in range(4):
        found |= (both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i
    return found


# By the words of an instruction, its longest beginning; types that do not matter are left out.
_OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov": lambda x: x, "shl": lambda x, n: x << n, "shr.u32": lambda x, n: _unsigned(x) >> n,
    "shr.s32": lambda x, n: _signed(x) >> n, "and": lambda x, y: x & y, "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y, "add.s": lambda x, y: x + y, "sub.s": lambda x, y: x - y, "neg.s32": lambda x: -x,
    "mul.lo.s32": lambda x, y: _signed(x) * _signed(y), "mul.wide.s32": lambda x, y: _signed(x) * _signed(y),
    "mul.wide.u32": lambda x, y: _unsigned(x) * _unsigned(y),
    "mad.lo.s32": lambda x, y, z: _signed(x) * _signed(y) + z,
    "mad.wide.s32": lambda x, y, z: _signed(x) * _signed(y) + z,
    "mad.wide.u32": lambda x, y, z: _unsigned(x) * _unsigned(y) + z,
    "min.s32": lambda x, y: np.minimum(_signed(x), _signed(y)), "cvt.u64.u32": _unsigned, "cvt.s64.s32": _signed,
    "bfe.u32": _field, "bfe.s32": _signed_field, "lop3.b32": _lop3, "prmt.b32": _prmt,
    "selp.b32": _select,
    "cvt.f32.f16": lambda x: _bits(_from_fp16(x)), "cvt.f32.bf16": lambda x: (x & 0xFFFF) << 16,
    "cvt.rn.bf16.f32": _bf16, "cvt.rn.f16.f32": _fp16,
    "cvt.rn.bf16x2.f32": lambda high, low: _bf16(high) << 16 | _bf16(low),
    "cvt.rn.f16x2.f32": lambda high, low: _fp16(high) << 16 | _fp16(low),
    "add.f32": lambda x, y: _bits(_float(x) + _float(y)), "add.rn.f32": lambda x, y: _bits(_float(x) + _float(y)),
    "mul.f32": lambda x, y: _bits(_float(x) * _float(y)), "mul.rn.f32": lambda x, y: _bits(_float(x) * _float(y)),
    "fma.rn.f32": lambda x, y, z: _bits(_float(x) * _float(y) + _float(z)),
}  # fmt: skip


def tensor_core(a: Floats, b: Floats, c: Floats) -> Floats:
    """a (W, 16, 16), b (W, 16, 8), c (W, 16, 8), float32 -> a b + c, cut off as the file says."""
    terms = np.concatenate([(a[:, :, :, None] * b[:, None]).transpose(0, 1, 3, 2), c[..., None]], -1)
    return _cut(_cut(terms, np.abs(terms).max(-1, keepdims=True), 24).sum(-1), None, 23)


def _cut(x: Floats, largest: Floats | None, bits: int) -> Floats:
    at = np.abs(x) if largest is None else largest
    unit = 2.0 ** (np.floor(np.log2(np.where(at > 0, at, 1))) - bits)
    return np.trunc(x / unit) * unit


class Program:
    """threads: of a program; memory: a device's, whose places are what pointers say"""

    def __init__(self, ptx: str, threads: int, memory: Bytes) -> None:
        body = re.sub(r"//[^\n]*", "", ptx[ptx.index("$L__func_begin0") : ptx.index("$L__func_end0")])
        body = _ASKS.sub(r"mov.u32 \1, 0;", body)
        self._lines, self._labels = list[str](), dict[str, int]()
        for line in map(str.strip, body.split("\n")):
            if label := re.fullmatch(r"(\$\w+):", line):
                self._labels[label[1]] = len(self._lines)
            elif line and line[0] not in ".}":
                self._lines += [part.strip() for part in line.split(";") if part.strip()]
        self._thread = np.arange(threads, dtype=np.int64)
        self._memory, self._shared = memory, np.zeros(SHARED_BYTES, np.uint8)
        self._values = dict[str, Words]()

    def run(self, arguments: Sequence[int], program: int) -> None:
        """arguments: pointers and numbers, in order. raises NotImplementedError for what it does not know"""
        self._values = {"%tid.x": self._thread, "%ctaid.x": self._all(program), "global_smem": self._all(0)}
        at = 0
        while at < len(self._lines):
            line, at = self._lines[at], at + 1
            guard = re.match(r"@(!?)(%p\d+)\s+", line)
            does = np.ones(len(self._thread), bool)
            if guard:
                does = (self._values[guard[2]] != 0) != (guard[1] == "!")
            name, *rest = line[guard.end() if guard else 0 :].split(None, 1)
            given = [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", rest[0])] if rest else []
            if name == "ret":
                return
            if name in ("bra", "bra.uni"):
                assert (does == does[0]).all(), f"threads part at {line}"
                at = self._labels[given[0]] if does[0] else at
            elif name.startswith("ld.param"):
                number = re.search(r"param_(\d+)", given[1])
                assert number
                self._set(given[0], self._all(arguments[int(number[1])]))
            elif name not in _PASSES:
                self._do(name, given, does)

    def _do(self, name: str, given: list[str], does: NDArray[np.bool_]) -> None:
        if name.startswith(("ld.", "st.")):
            self._moves(name, given, does)
        elif name.startswith(("ldmatrix", "stmatrix")):
            self._moves_matrices(name, given)
        elif name.startswith("mma.sync.aligned.m16n8k16"):
            self._multiplies(given, _from_bf16 if "bf16" in name else _from_fp16)
        elif name.startswith("setp."):
            how, kind = name.split(".")[1:]
            x, y = (_signed(v) if kind == "s32" else _unsigned(v) for v in map(self._get, given[1:]))
            self._set(given[0], _COMPARE[how](x, y).astype(np.int64))
        elif name.startswith("shfl.sync.bfly"):
            self._set(given[0], self._get(given[1])[self._thread ^ int(given[2])])
        elif name.startswith("shfl.sync.idx"):
            self._set(given[0], self._get(given[1])[self._thread & ~31 | self._get(given[2]) & 31])
        elif name.startswith("mov") and given[0].startswith("{"):
            for i, half in enumerate(_listed(given[0])):
                self._set(half, self._get(given[1]) >> 16 * i)
        else:
            known = [n for n in _OPERATIONS if name.startswith(n)]
            if not known:
                raise NotImplementedError(f"{name} {given}")
            self._set(given[0], _OPERATIONS[max(known, key=len)](*map(self._get, given[1:])))

    def _moves(self, name: str, given: list[str], does: NDArray[np.bool_]) -> None:
        bytes_each = int(name.rsplit("b", 1)[1]) // 8
        place, what = (given[1], given[0]) if name.startswith("ld") else given
        at = self._place(place)
        for i, value in enumerate(_listed(what)):
            if name.startswith("st"):
                self._store("global" in name, at + i * bytes_each, bytes_each, self._get(value), does)
            else:
                found = self._load("global" in name, at + i * bytes_each, bytes_each, does)
                self._set(value, np.where(does, found, self._values.get(value, found)))

    def _moves_matrices(self, name: str, given: list[str]) -> None:
        """Of 8 x 8 halves of a word; eight threads each say where a matrix's rows are."""
        does, lane = np.ones(len(self._thread), bool), self._thread % 32
        place, what = (given[1], given[0]) if name.startswith("ld") else given
        at = self._place(place)
        for i, value in enumerate(_listed(what)):
            pair = []
            for n in range(2):
                row, column = lane // 4, 2 * (lane % 4) + n
                if ".trans" in name:
                    row, column = column, row
                pair.append(at[self._thread // 32 * 32 + 8 * i + row] + 2 * column)
            if name.startswith("st"):
                for n in range(2):
                    self._store(False, pair[n], 2, self._get(value) >> 16 * n, does)
            else:
                self._set(value, self._load(False, pair[0], 2, does) | self._load(False, pair[1], 2, does) << 16)

    def _multiplies(self, given: list[str], floats: Callable[[Words], Floats]) -> None:
        """A warp's 16 x 16 by 16 x 8: of which thread an element is, PTX says."""
        warp, row, pair = self._thread // 32, self._thread % 32 // 4, 2 * (self._thread % 4)
        out, *operands = (_listed(part) for part in given)
        shapes = (16, 16), (16, 8), (16, 8)
        a, b, c = (np.zeros((len(self._thread) // 32, *shape)) for shape in shapes)
        for i, value in enumerate(map(self._get, operands[0])):
            for n in range(2):
                a[warp, row + i % 2 * 8, pair + i // 2 * 8 + n] = floats(value >> 16 * n)
        for i, value in enumerate(map(self._get, operands[1])):
            for n in range(2):
                b[warp, pair + i * 8 + n, row] = floats(value >> 16 * n)
        for i, value in enumerate(map(self._get, operands[2])):
            c[warp, row + i // 2 * 8, pair + i % 2] = _float(value)
        found = tensor_core(a, b, c)
        for i, name in enumerate(out):
            self._set(name, _bits(found[warp, row + i // 2 * 8, pair + i % 2]))

    def _all(self, value: int) -> Words:
        return np.full(len(self._thread), value, np.int64)

    def _get(self, operand: str) -> Words:
        if operand.startswith("{"):
            low, high = map(self._get, _listed(operand))
            return low & 0xFFFF | (high & 0xFFFF) << 16
        if operand.startswith("0f"):
            return self._all(int(operand[2:], 16))
        return self._all(int(operand, 0)) if operand[0] in "-0123456789" else self._values[operand]

    def _set(self, name: str, value: Words) -> None:
        kept = {"%rs": 0xFFFF, "%rd": -1, "%p": 1}.get(name.rstrip("0123456789"), _WORD)
        self._values[name] = value & kept

    def _place(self, operand: str) -> Words:
        name, _, more = operand.strip("[] ").partition("+")
        return self._get(name.strip()) + int(more or 0)

    def _load(self, is_global: bool, at: Words, n: int, does: NDArray[np.bool_]) -> Words:
        memory, found = self._within(is_global, at, n, does), np.zeros_like(at)
        for i in range(n):
            found[does] |= memory[at[does] + i].astype(np.int64) << 8 * i
        return found

    def _store(self, is_global: bool, at: Words, n: int, value: Words, does: NDArray[np.bool_]) -> None:
        memory = self._within(is_global, at, n, does)
        for i in range(n):
            memory[at[does] + i] = value[does] >> 8 * i & 255

    def _within(self, is_global: bool, at: Words, n: int, does: NDArray[np.bool_]) -> Bytes:
        memory, places = self._memory if is_global else self._shared, at[does]
        assert not (places % n).any() and (places >= 0).all() and (places + n <= len(memory)).all(), "out of memory"
        return memory


def _listed(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]
