"""An operator with all that it takes to run: its shape rule, its reference, its lowering. One op.py for each kernel.

The two interfaces that these rules use are declared here, because the rooms that implement them come later:
`EvaluationContext` is the interpreter (engine/reference/interpreter.py), `ProgramWriter` the program under construction
(compile/lower_cpu/program_builder.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.graph.types import Dim, Graph, Node, Operator, Shape, Value
from millrace.kernels.arrays import Array, IntArray
from millrace.kernels.convert.ref import Quantised
from millrace.kernels.declare import Param
from millrace.kernels.operand_places import CacheLayer, OperandPlace, Operands, PackedPlace, StateLayer, View
from millrace.kernels.row_storage import DENSE, Storage

Rows = NDArray[np.float64]
StoredValue = Rows | Quantised | IntArray | NDArray[np.bool_]  # a value, as a kernel would have stored it
Params = dict[str, Param]


class EvaluationContext(Protocol):
    """The values of one run of a graph.

    bf16_table: embedding tables are rounded, as in engines other than FP32
    embeddings: rows that stand in for those of a table, of the ids -1, -2 and so on
    """

    bf16_table: bool
    embeddings: Rows | None

    def stored_value(self, value: Value) -> StoredValue:
        """As the node that computed it stored it."""

    def rows(self, value: Value) -> Rows:
        """Of a constant, or of what is not packed."""

    def numbers(self, value: Value) -> IntArray:
        """Of an i32 value."""

    def integers(self, value: Value) -> IntArray:
        """Of a value of integers or bools, as int64."""

    def sized(self, shape: Shape) -> tuple[int, ...]:
        """The shape as it is in this run."""

    def cache_positions(self, positions: Value) -> IntArray:
        """Of each token in its sequence: `positions`, unless those are the rotary ones alone."""

    def stored(self, x: Array, node: Node) -> StoredValue:
        """Rounded as the node's kernel writes it, in the type of its first output."""

    def meets_fp8(self, node: Node) -> bool:
        """Whether rows are rounded to E4M3 before this product takes them, which no kernel does."""

    @property
    def bf16_weights(self) -> bool:
        """Whether attention rounds its weights, as over bfloat16 pages."""

    def as_kept(self, q: Rows, k: Rows, v: Rows) -> tuple[Rows, Rows, Rows]:
        """Rounded as queries meet keys and values in a cache."""

    def remember(self, layer: int, window: int, sequence: int, first: int, k: Rows, v: Rows) -> tuple[Rows, Rows]:
        """Keeps a sequence's new keys and values, from its position `first` on; gives all that its pages hold by now.

        window: 0, or of how many tokens the layer keeps keys and values
        """

    def past_rows(self, layer: int, sequence: int, first: int, x: Rows, n: int) -> Rows:
        """The `n` rows before a sequence's new ones x, zeros before its position 0; keeps the last `n` of all."""


class ProgramWriter(Protocol):
    """A program while it is written: where values lie, and the calls so far.

    table_format: "f32" or "bf16", of embedding tables
    tiles: products of bfloat16 are summed as the tiles of AMX do it, and not in pairs
    """

    graph: Graph
    table_format: str
    tiles: bool

    def view(self, value: Value) -> View:
        """Where it lies."""

    def new(self, value: Value, name: str, storage: Storage = DENSE) -> View:
        """A fresh buffer for a value; `name` is for people."""

    def share(self, value: Value, view: View) -> None:
        """The value lies there: nothing is computed for it, or it was in place."""

    def dense(self, value: Value, node: Node) -> View:
        """The value's rows side by side; columns of a wider value are copied."""

    def extent(self, dim: Dim) -> int:
        """The number of a dimension among the program's sizes. raises ConfigError for what none can be"""

    def writable(self, value: Value, node: Node) -> View:
        """The value's own place where nobody else reads what it is of, else a copy."""

    def constant(self, values: tuple[Value, ...], packing: str, make: Callable[[], PackedPlace]) -> OperandPlace:
        """These constants, packed once for all that ask for the same packing: its name tells kernels' layouts apart."""

    def vector(self, value: Value) -> OperandPlace:
        """A constant as float32, as it is: norm weights, biases, rotary tables."""

    def cache(self, heads: int, key_size: int, value_size: int, *, persistent: bool, window: int = 0) -> CacheLayer:
        """Add a layer. kept: from step to step; else its pages live for one run. window: as CacheSpec's"""

    def written_cache(self, node: Node) -> CacheLayer | None:
        """Return the cache that an earlier attention node writes and this one only reads; None: there is none."""

    def writes_cache(self, node: Node, cache: CacheLayer) -> None:
        """Remember the cache of an attention node for those that share it: the attribute `layer` is the same."""

    def state(self, floats: int) -> StateLayer:
        """Add a state of this many floats per sequence, kept between steps."""

    def add(
        self, kernel: str, operands: Operands, params: Mapping[str, Param], node: Node, note: str = "",
        cache: CacheLayer | None = None, state: StateLayer | None = None,
    ) -> None:  # fmt: skip
        """One call more; `note` is for people.

        cache: whose keys and values it reads or writes; becomes the kernel's parameters `cache` and `layer`
        state: which it reads and writes; becomes its parameters `state` and `layer`
        """


def only_floats(node: Node, storage: Storage) -> bool:
    """Of a kernel that packs nothing."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOperator(Operator):
    """reference: what the outputs are; computes in float64 and rounds where a kernel would store.

    lower: which calls compute them

    What passes go by, so that they need no list of names:
    packs: whether the node's kernel can write its rows in this storage, too (its attribute `storage`)
    row_wise: an output's row is made of the first input's same row, all other inputs being constants
    is_view: nothing is computed, the outputs are other shapes or columns of what its input wrote
    whole_sequences: a sequence's rows are all in one run, since none are kept for the next
    """

    reference: Callable[[Node, EvaluationContext], StoredValue | tuple[StoredValue, ...]]
    lower: Callable[[Node, ProgramWriter], None]
    packs: Callable[[Node, Storage], bool] = only_floats
    row_wise: bool = False
    is_view: bool = False
    whole_sequences: bool = False


def runnable(node: Node) -> KernelOperator:
    """Its operator."""
    assert isinstance(node.operator, KernelOperator), f"{node.op} has no reference and no lowering"
    return node.operator


def float_attr(node: Node, name: str) -> float:
    """An attribute that is one."""
    result = node.attrs[name]
    assert isinstance(result, float), f"{name} of {node.op} is {result!r}"
    return result


def int_attr(node: Node, name: str) -> int:
    """An attribute that is a whole number."""
    result = node.attrs[name]
    assert isinstance(result, int), f"{name} of {node.op} is {result!r}"
    return result


def static_dim(value: Value, axis: int) -> int:
    """Of a dimension that is a number."""
    result = value.shape[axis]
    assert isinstance(result, int), f"dimension {axis} of {value} is known only in a run"
    return result
