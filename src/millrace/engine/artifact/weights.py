"""Read an engine's weights back, exactly: from the packed panels of CPUs to rows of floats or of codes.

The program tells their places: a matmul's matrix is found by the names of its weights and its packing, other weights,
which are stored in rows, by their names. Every number is validated before it is used.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import CallEntry, Weight, read_program_table
from millrace.engine.artifact.manifest import MANIFEST, PROGRAM_TABLE, WEIGHTS, damaged, weights_checksum
from millrace.errors import EngineError
from millrace.graph.types import Array, Constant, Graph, Node, Value
from millrace.kernels.declare import RowFormat, Scaling, WeightFormat
from millrace.kernels.layout import matrix_bytes, up
from millrace.kernels.matmul.op import GATED_LINEAR, LINEAR, Packing, matrices_of, packing_of, precision_of
from millrace.kernels.matmul.unpack import part_codes, part_halves, unpack_codes, unpack_floats
from millrace.kernels.operand_places import constant_of
from millrace.kernels.operators import static_dim
from millrace.kernels.precision import BF16_BY_TILES, Precision
from millrace.kernels.row_storage import DENSE, storage_of

Names = tuple[str, ...]
T = TypeVar("T")
_ROWS = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}  # of weights that are not a matmul's


@dataclass(frozen=True, slots=True)
class _Panels:
    """A packed matrix of n rows and k inputs; n counts both of two interleaved matrices."""

    read: Callable[[], NDArray[np.uint8]]
    n: int
    k: int
    packing: Packing

    def floats(self) -> Array:
        return unpack_floats(self.read(), self.packing.format, self.n, self.k)

    def codes(self) -> QuantisedMatrix:
        p = self.packing
        return unpack_codes(self.read(), p.format, self.n, self.k, p.group, p.scaling)

    def parts(self, n_rows: int) -> tuple["_Part", ...]:
        """Return the parts: the matrix, or gate and up of `n_rows` rows."""
        codes, floats = self.codes, self.floats
        if self.n == n_rows:
            return (_Part(self.packing, codes=codes) if self.packing.bits else _Part(self.packing, floats=floats),)
        if self.packing.bits:
            of_codes = _Halves(lambda: part_codes(codes(), n_rows))
            return tuple(_Part(self.packing, codes=partial(of_codes.half, i)) for i in range(2))
        of_floats = _Halves(lambda: part_halves(floats(), n_rows))
        return tuple(_Part(self.packing, floats=partial(of_floats.half, i)) for i in range(2))


@dataclass(frozen=True, slots=True)
class _Part:
    """A constant's matrix as one of its matmuls packs it, from which floats or codes are read."""

    packing: Packing
    floats: Callable[[], Array] | None = None
    codes: Callable[[], QuantisedMatrix] | None = None


class _Halves(Generic[T]):
    """The halves of gate and up, which are read together: whichever is read first keeps the other for later."""

    def __init__(self, read: Callable[[], tuple[T, T]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._left: dict[int, T] = {}

    def half(self, index: int) -> T:
        with self._lock:
            if index not in self._left:
                self._left = dict(enumerate(self._read()))
            return self._left.pop(index)


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """The packed weights of an engine.

    products: by weight names, precision and packing; rows: all others, by name
    """

    engine: Engine
    products: Mapping[tuple[Names, str, Packing], Weight]
    rows: Mapping[Names, Weight]

    @classmethod
    def from_engine(cls, engine: Engine) -> "EngineWeights":
        """Index the weights. raises EngineError if the program table is invalid"""
        table, nbytes = read_program_table(engine.folder), engine.manifest.cpu.weights_bytes
        if nbytes != engine.manifest.files[WEIGHTS].bytes:
            raise damaged(engine.folder, f"{MANIFEST} tells of {nbytes} bytes of weights in another {WEIGHTS}")
        for weight in table.weights:
            if min(weight.offset, weight.bytes, *weight.shape, 0) < 0 or weight.offset + weight.bytes > nbytes:
                raise damaged(engine.folder, f"{PROGRAM_TABLE} has {weight.name} outside of {WEIGHTS}")
        products, rows = dict[tuple[Names, str, Packing], Weight](), dict[Names, Weight]()
        for call in table.calls:
            for name, operand in call.operands.items():
                if (number := operand.get("number")) is None:
                    continue
                if not isinstance(number, int) or not 0 <= number < len(table.weights):
                    raise damaged(engine.folder, f"{PROGRAM_TABLE} has a weight {number!r:.40} of {len(table.weights)}")
                weight = table.weights[number]
                if call.kernel == "matmul" and name == "w":
                    products[tuple(weight.origin), _precision(call), _packing(engine, call)] = weight
                elif call.kernel == "rescore" and name == "w":
                    continue  # the head has them in addition
                elif rows.setdefault(tuple(weight.origin), weight) is not weight:
                    raise damaged(engine.folder, f"{PROGRAM_TABLE} has two of {weight.name} in rows")
        return cls(engine, products, rows)

    def as_packed(self, graph: Graph) -> Graph:
        """Return a traced graph whose constants are in the formats in which matmuls have their codes.

        Passes merge by these formats, and must merge what they merged at build. If one of two matmuls over the same
        input has the checkpoint's codes and the other was quantized to the same layout, the other gets no format;
        either may be the one. (For byte rows, quantized codes are transformed, and so are laid out differently.)
        """
        packed = {name: key for key in self.products for name in key[0]}
        first, formats = dict[tuple[Value, str, Packing], Names](), dict[Value, QuantisedFormat]()
        for node in graph.nodes:
            w = node.inputs[1] if node.operator is LINEAR else None
            if w is None or w.constant is None or w.constant.origin[0] not in packed:
                continue
            names, precision, packing = packed[w.constant.origin[0]]
            joined = names == first.setdefault((node.inputs[0], precision, packing), names)
            if packing.codes and (joined or Precision(precision).takes_bytes):
                formats[w] = packing.codes
        return _with_constants(graph, {w: replace(constant_of(w), format=codes) for w, codes in formats.items()})

    def bound(self, graph: Graph) -> Graph:
        """Return a graph after its passes with the contents of its constants. raises EngineError if one is missing"""
        producers, parts = graph.producers(), dict[Value, list[_Part]]()
        for node in graph.nodes:
            if node.operator in (LINEAR, GATED_LINEAR):
                rows = producers.get(node.inputs[0])
                packing = packing_of(node, storage_of(rows) if rows else DENSE)
                for w, part in zip(matrices_of(node), self._parts(node, packing), strict=True):
                    parts.setdefault(w, []).append(part)
        return _with_constants(graph, {v: self._constant(v, parts.get(v, ())) for v in graph.constants()})

    def _parts(self, node: Node, packing: Packing) -> tuple[_Part, ...]:
        """Return the parts of each matrix of a matmul."""
        matrices = matrices_of(node)
        names = tuple(name for w in matrices for name in constant_of(w).origin)
        each, k = static_dim(matrices[0], 0), static_dim(matrices[0], 1)
        n = 2 * up(each, 16) if len(matrices) == 2 else each
        precision = precision_of(node)
        weight = self.products.get((names, precision.value, packing))
        if weight is None and precision == Precision.BF16:  # a GPU's float16, which float32 represents exactly
            packing = replace(packing, format=WeightFormat.F32)
            weight = self.products.get((names, Precision.FP32.value, packing))
        if weight is None:
            raise self._lacks(f"{'+'.join(names)} for {precision}")
        if weight.bytes != matrix_bytes(packing.format, n, k, packing.group, packing.scaling):
            raise self._lacks(f"{weight.name} of {n} x {k}")
        return _Panels(partial(self._bytes, weight), n, k, packing).parts(each)

    def _constant(self, value: Value, parts: Sequence[_Part]) -> Constant:
        constant, in_rows = constant_of(value), self.rows.get(constant_of(value).origin)
        coded = {(p.packing.bits, p.packing.group, p.packing.hadamard_group): p.codes for p in parts if p.codes}
        load = next((part.floats for part in parts if part.floats), None)
        if in_rows is not None:
            load = self._in_rows(in_rows, value)
        if load is None and not coded:
            raise self._lacks("+".join(constant.origin))

        def stored(bits: int, group: int) -> QuantisedMatrix | None:
            read = coded.get((bits, group, 0))
            return read() if read else None

        def transformed(bits: int, group: int, hadamard_group: int) -> QuantisedMatrix:
            return coded[bits, group, hadamard_group]()

        def no_floats() -> Array:
            raise self._lacks(f"{'+'.join(constant.origin)} as floats")

        return replace(constant, load=load or no_floats, stored=stored, transformed=transformed)

    def _in_rows(self, weight: Weight, value: Value) -> Callable[[], Array]:
        dtype, shape = _ROWS.get(weight.format), tuple(weight.shape)
        if dtype is None or shape != value.shape or math.prod(shape) * dtype.itemsize != weight.bytes:
            raise self._lacks(f"{weight.name} as {value}")
        return lambda: self._bytes(weight).view(dtype).reshape(shape)

    def _bytes(self, weight: Weight) -> NDArray[np.uint8]:
        """Read into a new array and verify the checksum. raises EngineError if it does not match"""
        path, data = self.engine.folder / WEIGHTS, np.empty(weight.bytes, np.uint8)
        try:
            with path.open("rb") as file:
                file.seek(weight.offset)
                done = file.readinto(data.data)
        except OSError as error:
            raise EngineError(f"{path} cannot be read: {error}", "a file that may be read", "check it") from error
        if done < len(data) or weights_checksum(data) != weight.checksum:
            raise damaged(self.engine.folder, f"{WEIGHTS} is damaged: the checksum of {weight.name} differs")
        return data

    def _lacks(self, what: str) -> EngineError:
        return damaged(self.engine.folder, f"{WEIGHTS} does not hold {what}")


def _with_constants(graph: Graph, constants: Mapping[Value, Constant]) -> Graph:
    """Return a graph with some constants replaced."""
    new = {value: replace(value, constant=constant) for value, constant in constants.items()}
    nodes = (replace(node, inputs=tuple(new.get(v, v) for v in node.inputs)) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _precision(call: CallEntry) -> str:
    return Precision.BF16.value if call.note == BF16_BY_TILES else call.note


def _packing(engine: Engine, call: CallEntry) -> Packing:
    """Return the packing of a call. raises EngineError if it is invalid"""
    try:
        p = {name: int(call.params[name]) for name in ("weights", "group", "format", "x_group", "scaling")}
        hadamard_group = p["x_group"] if p["format"] == RowFormat.HADAMARD_Q8 else 0
        return Packing(WeightFormat(p["weights"]), p["group"], hadamard_group, Scaling(p["scaling"]))
    except (KeyError, ValueError, OverflowError) as error:
        raise damaged(engine.folder, f"{PROGRAM_TABLE} has a product that is none: {error}") from error
