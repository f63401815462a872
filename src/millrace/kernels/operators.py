"""An operator: its shape rule, its reference, its lowering. One op.py per kernel.

The two interfaces that these rules use are declared here, because the rooms that implement them come later:
`EvaluationContext` is the interpreter (engine/reference/interpreter.py), `ProgramWriter` the program builder
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
StoredValue = Rows | Quantised | IntArray | NDArray[np.bool_]  # a value as a kernel would have stored it
Params = dict[str, Param]


class EvaluationContext(Protocol):
    """The values of one run of a graph.

    bf16_table: round embedding tables, as engines other than FP32 do
    embeddings: rows for the ids -1, -2 and so on, in place of a table's
    """

    bf16_table: bool
    embeddings: Rows | None

    def stored_value(self, value: Value) -> StoredValue:
        """Return a value as the node that computed it stored it."""

    def rows(self, value: Value) -> Rows:
        """Return a constant, or a value that is not packed."""

    def numbers(self, value: Value) -> IntArray:
        """Return an i32 value."""

    def integers(self, value: Value) -> IntArray:
        """Return a value of integers or bools, as int64."""

    def sized(self, shape: Shape) -> tuple[int, ...]:
        """Return the shape in this run."""

    def cache_positions(self, positions: Value) -> IntArray:
        """Return each token's position in its sequence: `positions`, unless those are rotary positions only."""

    def stored(self, x: Array, node: Node) -> StoredValue:
        """Round x as the node's kernel writes it, in the type of its first output."""

    def meets_fp8(self, node: Node) -> bool:
        """Return whether this matmul rounds its rows to E4M3, which no kernel does."""

    @property
    def bf16_weights(self) -> bool:
        """Whether attention rounds its weights, as over bfloat16 pages."""

    def as_kept(self, q: Rows, k: Rows, v: Rows) -> tuple[Rows, Rows, Rows]:
        """Round queries, keys and values as attention over the cache does."""

    def remember(self, layer: int, window: int, sequence: int, first: int, k: Rows, v: Rows) -> tuple[Rows, Rows]:
        """Store a sequence's new keys and values from position `first` on; return all that its pages hold now.

        window: tokens for which the layer keeps keys and values; 0: all
        """

    def past_rows(self, layer: int, sequence: int, first: int, x: Rows, n: int) -> Rows:
        """Return the `n` rows before a sequence's new rows x, zeros before position 0; store the last `n` of all."""


class ProgramWriter(Protocol):
    """A program under construction: places of values, and calls.

    table_format: "f32" or "bf16", of embedding tables
    tiles: bfloat16 products are summed as by AMX tiles, not in pairs
    """

    graph: Graph
    table_format: str
    tiles: bool

    def view(self, value: Value) -> View:
        """Return the place of a value."""

    def new(self, value: Value, name: str, storage: Storage = DENSE) -> View:
        """Allocate a buffer for a value. name: for display"""

    def share(self, value: Value, view: View) -> None:
        """Place a value there, because nothing is computed for it, or it was computed in place."""

    def dense(self, value: Value, node: Node) -> View:
        """Return the value with contiguous rows; columns of a wider value are copied."""

    def extent(self, dim: Dim) -> int:
        """Return a dimension's number among the program's sizes. raises ConfigError if it may become too large"""

    def writable(self, value: Value, node: Node) -> View:
        """Return the value's own place if nothing else reads its buffer, otherwise a copy."""

    def constant(self, values: tuple[Value, ...], packing: str, make: Callable[[], PackedPlace]) -> OperandPlace:
        """Pack constants, once per packing, whose name identifies the layout."""

    def vector(self, value: Value) -> OperandPlace:
        """Pack a constant as float32: norm weights, biases, rotary tables."""

    def cache(self, heads: int, key_size: int, value_size: int, *, persistent: bool, window: int = 0) -> CacheLayer:
        """Add a layer. persistent: kept between steps; otherwise its pages last for one run. window: as in CacheSpec"""

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
        """Add a call. note: for display

        cache: whose keys and values it reads or writes; sets the kernel's parameters `cache` and `layer`
        state: which it reads and writes; sets the parameters `state` and `layer`
        """


def only_floats(node: Node, storage: Storage) -> bool:
    """Return False, for kernels that write floats only."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOperator(Operator):
    """reference: computes the outputs in float64 and rounds where a kernel would store.

    lower: adds the calls that compute them

    Properties for passes, which therefore need no lists of names:
    packs: whether the node's kernel can write its rows in this storage, too (its attribute `storage`)
    row_wise: an output row depends on the same row of the first input only; all other inputs are constants
    is_view: nothing is computed; the outputs are other shapes or columns of the input
    whole_sequences: a sequence's rows must all be in one run, because none are kept for the next
    """

    reference: Callable[[Node, EvaluationContext], StoredValue | tuple[StoredValue, ...]]
    lower: Callable[[Node, ProgramWriter], None]
    packs: Callable[[Node, Storage], bool] = only_floats
    row_wise: bool = False
    is_view: bool = False
    whole_sequences: bool = False


def runnable(node: Node) -> KernelOperator:
    """Return a node's operator."""
    assert isinstance(node.operator, KernelOperator), f"{node.op} has no reference and no lowering"
    return node.operator


def float_attr(node: Node, name: str) -> float:
    """Return a float attribute."""
    result = node.attrs[name]
    assert isinstance(result, float), f"{name} of {node.op} is {result!r}"
    return result


def int_attr(node: Node, name: str) -> int:
    """Return an integer attribute."""
    result = node.attrs[name]
    assert isinstance(result, int), f"{name} of {node.op} is {result!r}"
    return result


def static_dim(value: Value, axis: int) -> int:
    """Return a dimension that is a number."""
    result = value.shape[axis]
    assert isinstance(result, int), f"dimension {axis} of {value} is known only in a run"
    return result
