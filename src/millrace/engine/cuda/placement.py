"""Which of a graph's constants a device has in which form, and how many bytes each takes: before one is read."""

import math
from dataclasses import dataclass

from millrace.graph.types import Graph, Node, Value
from millrace.kernels.layout import n_groups
from millrace.kernels.matmul.op import group_of, matrices_of, precision_of
from millrace.kernels.matmul.pack import kept_format
from millrace.kernels.places import constant_of
from millrace.kernels.storage import storage_of

PRODUCTS = ("linear", "gated_linear")


@dataclass(frozen=True, slots=True)
class Placement:
    """coded: products whose weights are codes, with the node that made the rows that they meet

    narrow: constants in the engine's type; wide: in float32, or int32
    """

    coded: dict[Node, Node | None]
    narrow: tuple[Value, ...]
    wide: tuple[Value, ...]

    @classmethod
    def of(cls, graph: Graph) -> "Placement":
        producers = graph.producers()
        coded = {n: producers.get(n.inputs[0]) for n in coded_products(graph)}
        narrow = {w for n in graph.nodes if n.op in PRODUCTS and n not in coded for w in matrices_of(n)}
        narrow |= {n.inputs[1] for n in graph.nodes if n.op == "embedding"}
        narrow |= {n.inputs[2] for n in graph.nodes if n.op == "linear" and n.attrs.get("bias")}
        alone = {w for n in coded for w in matrices_of(n)} - narrow  # read as codes, and by nobody else
        kept = [value for value in graph.constants() if value not in alone]
        return cls(coded, tuple(v for v in kept if v in narrow), tuple(v for v in kept if v not in narrow))

    def bytes(self, element: int) -> int:
        """Of all of them. element: bytes of the engine's type"""
        floats = element * sum(map(elements, self.narrow)) + 4 * sum(map(elements, self.wide))
        return floats + sum(coded_bytes(n, w, rows) for n, rows in self.coded.items() for w in matrices_of(n))


def coded_products(graph: Graph) -> list[Node]:
    """Whose weights are codes."""
    return [n for n in graph.nodes if n.op in PRODUCTS and precision_of(n).coded]


def matrix_size(value: Value) -> tuple[int, int]:
    """Rows and width of a constant."""
    rows, width = value.shape
    assert isinstance(rows, int) and isinstance(width, int), value
    return rows, width


def elements(value: Value) -> int:
    """Of a constant."""
    return math.prod(d for d in value.shape if isinstance(d, int))


def transform_of(rows: Node | None) -> int:
    """The groups in which weights are transformed, as the rows are that they meet. rows: what made these; 0: not"""
    return storage_of(rows).hadamard_group if rows else 0


def coded_bytes(node: Node, w: Value, rows: Node | None) -> int:
    """Of one matrix, codes and scales, as kernels/matmul/coded.py has them. rows: what made those that it meets"""
    n, k = matrix_size(w)
    bits, group = precision_of(node).bits, group_of(node)
    if not group:
        return n * (k + 4)  # E4M3, a float32 scale for each row
    held = None if transform_of(rows) else kept_format(constant_of(w), bits, group)
    scale, kinds = (4 if held.two_levels else 2, 1 + held.minimums) if held else (2, 1)
    return n * ((-(-k // 2) if bits == 4 else k) + kinds * scale * n_groups(k, group))
