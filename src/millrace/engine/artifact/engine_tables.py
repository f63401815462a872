"""Tables of an engine folder: the program (program.json) and the traced graph (graph.json)."""

import re
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, json

from millrace.engine.artifact.manifest import GRAPH, PROGRAM_TABLE, UNREADABLE, damaged
from millrace.graph.expressions import as_tree, faults, formula, tuples
from millrace.kernels.declare import MAX_INPUTS

T = TypeVar("T")
# JSON's escapes of control characters; a backslash itself is written as two.
_ESCAPE = re.compile(rb"(?<!\\)(\\\\)*\\[bfnrtu]")


class CallEntry(Struct, frozen=True):
    kernel: str
    note: str
    origin: list[str]
    operands: dict[str, dict[str, str | int]]  # {"weight": name, "bytes": n} or {"buffer": number, "offset": n}
    params: dict[str, int | float]
    expression: str = ""  # of the epilogue, or of the whole call

    @property
    def matrix_bytes(self) -> int:
        """Bytes of a matmul's weights, which each step reads completely; 0 for other calls."""
        nbytes = self.operands.get("w", {}).get("bytes") if self.kernel == "matmul" else None
        return nbytes if isinstance(nbytes, int) else 0


class Weight(Struct, frozen=True):
    name: str
    origin: list[str]
    shape: list[int]
    format: str
    bytes: int
    offset: int
    checksum: str  # of its bytes, made like the manifest's checksums


class BufferEntry(Struct, frozen=True):
    """A buffer that is live from the call `first` to the call `last`, both included."""

    name: str
    bytes: int
    offset: int
    first: int
    last: int


class ProgramTable(Struct, frozen=True):
    """program.json, as `compile/lower_cpu/program_report.py` writes it."""

    passes: list[str]
    calls: list[CallEntry]
    weights: list[Weight]
    buffers: list[BufferEntry]


class NodeEntry(Struct, frozen=True):
    op: str
    inputs: list[int | str]  # numbers of values, names of constants
    outputs: list[int]
    shapes: list[list[int | str]]
    origin: list[str]
    attrs: dict[str, Any] = {}

    @property
    def expression(self) -> str:
        """Expression of an element-wise operation over its inputs a, b, c, d, or x; "" for other operations."""
        if "tree" not in self.attrs:
            return ""
        tree, n = tuples(self.attrs["tree"]), len(self.inputs)
        if n > MAX_INPUTS or any(faults(tree, n)):
            return "?"
        return formula(as_tree(tree), "abcd" if n > 1 else "x")


class GraphInput(Struct, frozen=True):
    name: str
    shape: list[int | str]
    dtype: str


class GraphOutput(Struct, frozen=True):
    name: str
    value: int | str  # like a node's inputs


class GraphTable(Struct, frozen=True):
    """graph.json, as `graph/graph_json.py` writes it; values are numbered, inputs first."""

    nodes: list[NodeEntry]
    inputs: list[GraphInput] = []
    constants: dict[str, list[int]] = {}
    outputs: list[GraphOutput] = []


def read_program_table(folder: Path) -> ProgramTable:
    """Read the program table. raises EngineError if `millrace build` did not write it so"""
    return _read(folder, PROGRAM_TABLE, ProgramTable)


def read_graph_table(folder: Path) -> GraphTable:
    """Read the graph table. raises EngineError if `millrace build` did not write it so"""
    return _read(folder, GRAPH, GraphTable)


def _read(folder: Path, name: str, kind: type[T]) -> T:
    data = (folder / name).read_bytes()
    try:
        table, text = json.decode(data, type=kind), data.decode()  # ignored keys may not be valid text
    except UNREADABLE as error:
        raise damaged(folder, f"{name} is not readable: {error}") from error
    if _ESCAPE.search(data) or not text.replace("\n", "").isprintable():  # names will be displayed
        raise damaged(folder, f"{name} holds control characters")
    return table
