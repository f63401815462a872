"""Passes on matmuls: choose their precisions, and merge those of one kind over the same rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix, combined, joined_format
from millrace.compile.precision import PrecisionMap
from millrace.graph.rewrite import GraphView, Replacement, head_of, joined_origins, make_node, rewrite, tree_of
from millrace.graph.types import Array, Constant, DType, Graph, Node, Value
from millrace.kernels.expert_linear.op import EXPERT_GATED_LINEAR
from millrace.kernels.expression import compile_tree, needs_broadcast
from millrace.kernels.matmul.op import GATED_LINEAR, LINEAR, matrices_of, precision_of
from millrace.kernels.matmul.pack import stored_codes
from millrace.kernels.precision import Precision
from millrace.kernels.views.op import SPLIT


def choose_precision(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Give each linear layer its precision by name, or as the head.

    raises ConfigError if two precisions are requested for the head
    """
    head = head_of(graph)
    if head:
        precisions.check_head(head.origin[0])

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if node.op not in ("linear", "expert_linear"):
            return None
        if own_precision := node.attrs.get("precision"):  # the model's own choice
            attrs = {**node.attrs, "precision": Precision(str(own_precision))}
            return Replacement.from_nodes(make_node(node.operator, node.inputs, attrs, node.origin))
        name, is_head = node.origin[0], bool(head and node.output is head.output)
        own = {"x_group": group} if (group := precisions.x_group_of(name, is_head=is_head)) else {}
        attrs = {**node.attrs, "precision": precisions.precision_of(name, is_head=is_head), **own}
        return Replacement.from_nodes(make_node(node.operator, node.inputs, attrs, node.origin))

    return rewrite(graph, rule)


def merge_gated(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Merge expression(gate(x), up(x)) into one matmul with the two interleaved, and the expression in its epilogue."""

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if node.op != "elementwise" or len(node.inputs) != 2 or node.inputs[0].shape != node.inputs[1].shape:
            return None
        if not fits_epilogue(node):
            return None
        gate, up = (live.producer(v) for v in node.inputs)
        if not (gate and up and gate.op == up.op and gate.inputs[0] is up.inputs[0] and node.inputs[0] in gate.outputs):
            return None
        experts = gate.op == "expert_linear" and gate.inputs[1] is up.inputs[1]
        if not experts and not (is_plain_linear(gate) and is_plain_linear(up)):
            return None
        (w,), (v,) = matrices_of(gate), matrices_of(up)
        if _kind(gate, precisions) != _kind(up, precisions) or w.shape != v.shape:
            return None
        if not all(live.read_once(v) for v in node.inputs):
            return None
        attrs = {"tree": tree_of(node), **_requested(gate)}
        origins = joined_origins(gate, up)
        if not experts:
            return Replacement.from_nodes(make_node(GATED_LINEAR, (gate.inputs[0], w, v), attrs, origins))
        if gate.attrs.get("bias") != up.attrs.get("bias"):
            return None
        inputs = (*gate.inputs[:2], w, v, *gate.inputs[3:], *up.inputs[3:])
        attrs["bias"] = gate.attrs.get("bias", False)
        return Replacement.from_nodes(make_node(EXPERT_GATED_LINEAR, inputs, attrs, origins))

    return rewrite(graph, rule)


def _kind(node: Node, precisions: PrecisionMap) -> object:
    """Return the kind of a matmul. Matmuls of one kind, with equal precision and packing, can be merged."""
    return tuple(_requested(node).items()), kept_format_of(matrices_of(node), precision_of(node), precisions)


def _requested(node: Node) -> Mapping[str, object]:
    """Return the attributes of a matmul that were requested."""
    return {name: node.attrs[name] for name in ("precision", "x_group") if name in node.attrs}


def kept_format_of(weights: Sequence[Value], precision: Precision, precisions: PrecisionMap) -> QuantisedFormat | None:
    """Return the checkpoint's format that a matmul keeps; None: its weights are quantized here."""
    stored_formats = [precisions.stored_format(w.constant.format if w.constant else None, precision) for w in weights]
    kinds = {f and replace(f, bits=precision.bits) for f in stored_formats}
    return kinds.pop() if len(kinds) == 1 else None


def is_plain_linear(node: Node) -> bool:
    return node.op == "linear" and not any(node.attrs.get(name) for name in ("bias", "residual", "tree"))


def merge_linears(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Merge linear layers of one kind over the same input (q, k, v) into one matmul, which is then split."""
    families: dict[tuple[Value, object], list[Node]] = {}
    results = graph.results
    for node in graph.nodes:
        if node.op == "linear" and not node.attrs.get("residual") and node.output not in results:
            families.setdefault((node.inputs[0], _kind(node, precisions)), []).append(node)
    family_of = {n.output: family for family in families.values() if len(family) > 1 for n in family}
    parts: dict[Value, Value] = {}  # of the merged matmul, by the output that each replaces

    def rule(node: Node, live: GraphView) -> Replacement | None:
        family = family_of.get(node.outputs[0])
        if family is None:
            return None
        if node.output in parts:
            return Replacement((), (parts[node.output],))
        merged = _merged(family, node.inputs[0])
        widths = tuple(n.output.width for n in family)
        split = make_node(SPLIT, (merged.output,), {"widths": widths}, joined_origins(*family))
        parts.update(zip((n.output for n in family), split.outputs, strict=True))
        return Replacement((merged, split), split.outputs[:1])

    return rewrite(graph, rule)


def _merged(family: list[Node], x: Value) -> Node:
    inputs = [x, _concatenated([n.inputs[1] for n in family])]
    biases = [n.inputs[2] if n.attrs.get("bias") else None for n in family]
    biased = any(b is not None for b in biases)
    if biased:
        inputs.append(_concatenated([b or _zeros(n) for b, n in zip(biases, family, strict=True)]))
    attrs = {"bias": biased, **_requested(family[0])}
    return make_node(LINEAR, tuple(inputs), attrs, joined_origins(*family))


def _zeros(node: Node) -> Value:
    width = node.output.width
    return Value((width,), constant=Constant(lambda: np.zeros(width, np.float32), ()))


def _concatenated(values: list[Value]) -> Value:
    constants = [v.constant for v in values]
    assert all(constants), "only constants are concatenated"
    total = sum(d for v in values if isinstance(d := v.shape[0], int))

    def load() -> Array:
        arrays = [c.load() for c in constants if c]
        if len({array.dtype for array in arrays}) > 1:  # NumPy has no common type of float16 and bfloat16
            arrays = [array.astype(np.float32) for array in arrays]
        return np.concatenate(arrays)

    def stored(bits: int, group: int) -> QuantisedMatrix | None:
        parts = stored_codes([c for c in constants if c], bits, group)
        return combined(parts, np.concatenate) if parts else None

    origin = tuple(o for c in constants if c for o in c.origin)
    constant = Constant(load, origin, stored, joined_format([c.format for c in constants if c]))
    return Value((total, *values[0].shape[1:]), constant=constant)


def fits_epilogue(node: Node) -> bool:
    """Return whether the epilogue of a matmul supports a node's operations and result."""
    return node.output.dtype == DType.F32 and not needs_broadcast(compile_tree(tree_of(node), len(node.inputs))[0])
