"""Passes on element-wise expressions: fold constants, grow expressions, gather rows before norms."""

import numpy as np

from millrace.graph.expression_types import is_integer
from millrace.graph.expressions import Tree, evaluate, substitute
from millrace.graph.rewrite import GraphView, Replacement, joined_origins, make_node, rewrite, tree_of
from millrace.graph.types import Array, Constant, DType, Graph, Node, Value
from millrace.kernels.declare import MAX_INPUTS
from millrace.kernels.elementwise.op import ELEMENTWISE
from millrace.kernels.expression import TooComplexError, compile_tree
from millrace.kernels.gather_rows.op import GATHER_ROWS
from millrace.kernels.operators import runnable


def fold_constants(graph: Graph) -> Graph:
    """Compute element-wise arithmetic on constants at load (Gemma's weight + 1)."""

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if node.op != "elementwise" or not all(v.constant and v.dtype == DType.F32 for v in node.inputs):
            return None
        if node.output.dtype != DType.F32:
            return None
        return Replacement((), (Value(node.output.shape, constant=_folded(node.inputs, tree_of(node))),))

    return rewrite(graph, rule)


def _folded(inputs: tuple[Value, ...], tree: Tree) -> Constant:
    constants = [v.constant for v in inputs if v.constant]

    def load() -> Array:
        arrays = [c.load().astype(np.float64) for c in constants]
        return evaluate(tree, arrays).astype(np.float32)

    return Constant(load, tuple(o for c in constants for o in c.origin))


def gather_early(graph: Graph) -> Graph:
    """Gather the sampled rows before the last norm, which needs no others."""

    def rule(node: Node, live: GraphView) -> Replacement | None:
        norm = live.producer(node.inputs[0]) if node.op == "gather_rows" else None
        if not norm or not runnable(norm).row_wise or not live.read_once(norm.output):
            return None
        x, *weights = norm.inputs
        rows = make_node(GATHER_ROWS, (x, node.inputs[1]), {}, norm.origin)
        return Replacement.from_nodes(rows, make_node(norm.operator, (rows.output, *weights), norm.attrs, norm.origin))

    return rewrite(graph, rule)


def fuse_elementwise(graph: Graph) -> Graph:
    """Merge an expression into the only expression that reads it, within the limits of one kernel."""

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if node.op != "elementwise":
            return None
        grown = node
        while fused := _grown(grown, live):
            grown = fused
        return None if grown is node else Replacement.from_nodes(grown)

    return rewrite(graph, rule)


def _grown(node: Node, live: GraphView) -> Node | None:
    for value in node.inputs:
        inner = live.producer(value)
        if inner and inner.op == "elementwise" and live.read_once(value) and _computed_alike(node, inner):
            fused = _inlined(node, inner)
            if fused:
                return fused
    return None


def _computed_alike(outer: Node, inner: Node) -> bool:
    """Return whether the outer kernel computes the inner expression to the same bits, and no more often."""
    integer = [is_integer(tree_of(node), [v.dtype for v in node.inputs]) for node in (outer, inner)]
    exact = (DType.I64 if integer[1] else DType.F32, DType.BOOL)  # storing it in this type changes nothing
    return inner.output.dtype in exact and integer[0] == integer[1] and inner.output.shape == outer.output.shape


def _inlined(outer: Node, inner: Node) -> Node | None:
    inputs: list[Value] = []
    for v in outer.inputs:
        inputs += [w for w in (inner.inputs if v is inner.output else (v,)) if w not in inputs]
    if len(inputs) > MAX_INPUTS:
        return None
    inputs.sort(key=lambda v: v.constant is not None)  # a matrix first: it determines the number of rows
    body = substitute(tree_of(inner), [inputs.index(v) for v in inner.inputs])
    tree = substitute(tree_of(outer), [body if v is inner.output else inputs.index(v) for v in outer.inputs])
    try:
        compile_tree(tree, len(inputs))
    except TooComplexError:
        return None
    grown = make_node(ELEMENTWISE, tuple(inputs), {"tree": tree}, joined_origins(outer, inner))
    return grown if grown.output.dtype == outer.output.dtype else None
