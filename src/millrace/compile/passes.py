"""The compiler's passes: each is pure and has one reason. Which run, and in what order, pipeline.py says."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from millrace.checkpoint.quantised import QuantisedFormat, QuantisedMatrix, combined
from millrace.compile.precision import RESCORED, PrecisionMap, check_x_group
from millrace.graph.rewrite import Instead, Live, head_of, make_node, rewrite
from millrace.graph.trees import Tree, as_tree, evaluate, substitute
from millrace.graph.types import Array, Constant, Graph, Node, Value
from millrace.kernels.attention.op import ROPE_ATTENTION
from millrace.kernels.convert.op import CONVERT
from millrace.kernels.declare import MAX_INPUTS
from millrace.kernels.elementwise.op import ELEMENTWISE
from millrace.kernels.expression import TooComplexError, compile_tree
from millrace.kernels.gather_rows.op import GATHER_ROWS
from millrace.kernels.matmul.op import GATED_LINEAR, LINEAR, precision_of
from millrace.kernels.matmul.pack import stored_codes
from millrace.kernels.operators import runnable, whole
from millrace.kernels.precision import Precision
from millrace.kernels.rescore.op import RESCORE
from millrace.kernels.storage import DENSE, Storage, storage_of
from millrace.kernels.views.op import SPLIT


def fold_constants(graph: Graph) -> Graph:
    """Element-wise arithmetic on constants alone is done now (Gemma's weight + 1), when the constant is loaded."""

    def rule(node: Node, live: Live) -> Instead | None:
        if node.op != "elementwise" or not all(v.constant for v in node.inputs):
            return None
        return Instead((), (Value(node.output.shape, constant=_folded(node.inputs, _tree(node))),))

    return rewrite(graph, rule)


def _folded(inputs: tuple[Value, ...], tree: Tree) -> Constant:
    constants = [v.constant for v in inputs if v.constant]

    def load() -> Array:
        arrays = [c.load().astype(np.float64) for c in constants]
        return evaluate(tree, arrays).astype(np.float32)

    return Constant(load, tuple(o for c in constants for o in c.origin))


def _tree(node: Node) -> Tree:
    return as_tree(node.attrs["tree"])


def gather_early(graph: Graph) -> Graph:
    """The last norm is needed only for the rows that are wanted: they are gathered before it."""

    def rule(node: Node, live: Live) -> Instead | None:
        norm = live.producer(node.inputs[0]) if node.op == "gather_rows" else None
        if not norm or not runnable(norm).row_wise or not live.read_once(norm.output):
            return None
        x, *weights = norm.inputs
        rows = make_node(GATHER_ROWS, (x, node.inputs[1]), {}, norm.origin)
        return Instead.of(rows, make_node(norm.operator, (rows.output, *weights), norm.attrs, norm.origin))

    return rewrite(graph, rule)


def fuse_elementwise(graph: Graph) -> Graph:
    """An expression read only by another expression becomes part of it, as far as one kernel can hold it."""

    def rule(node: Node, live: Live) -> Instead | None:
        if node.op != "elementwise":
            return None
        grown = node
        while fused := _grown(grown, live):
            grown = fused
        return None if grown is node else Instead.of(make_node(ELEMENTWISE, grown.inputs, grown.attrs, grown.origin))

    return rewrite(graph, rule)


def _grown(node: Node, live: Live) -> Node | None:
    for value in node.inputs:
        inner = live.producer(value)
        if inner and inner.op == "elementwise" and live.read_once(value):
            fused = _inlined(node, inner)
            if fused:
                return fused
    return None


def _inlined(outer: Node, inner: Node) -> Node | None:
    inputs: list[Value] = []
    for v in outer.inputs:
        inputs += [w for w in (inner.inputs if v is inner.output else (v,)) if w not in inputs]
    if len(inputs) > MAX_INPUTS:
        return None
    inputs.sort(key=lambda v: v.constant is not None)  # a matrix first: it says how many rows there are
    body = substitute(_tree(inner), [inputs.index(v) for v in inner.inputs])
    tree = substitute(_tree(outer), [body if v is inner.output else inputs.index(v) for v in outer.inputs])
    try:
        compile_tree(tree, len(inputs))
    except TooComplexError:
        return None
    return Node(ELEMENTWISE, tuple(inputs), outer.outputs, {"tree": tree}, _joined(outer, inner))


def _joined(*nodes: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o for n in nodes for o in n.origin))


def choose_precision(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Each linear layer gets its precision by its name, or as the head. Not searched: the map is what was asked for.

    raises ConfigError where two things are asked for the head
    """
    head = head_of(graph)
    if head:
        precisions.check_head(head.origin[0])

    def rule(node: Node, live: Live) -> Instead | None:
        if node.op != "linear":
            return None
        name, is_head = node.origin[0], bool(head and node.output is head.output)
        own = {"x_group": asked} if (asked := precisions.x_group_of(name, is_head=is_head)) else {}
        attrs = {**node.attrs, "precision": precisions.of(name, is_head=is_head), **own}
        return Instead.of(make_node(LINEAR, node.inputs, attrs, node.origin))

    return rewrite(graph, rule)


def merge_gated(graph: Graph, precisions: PrecisionMap) -> Graph:
    """expression(gate(x), up(x)) becomes one product with the two interleaved, and the expression in its epilogue."""

    def rule(node: Node, live: Live) -> Instead | None:
        if node.op != "elementwise" or len(node.inputs) != 2 or node.inputs[0].shape != node.inputs[1].shape:
            return None
        gate, up = (live.producer(v) for v in node.inputs)
        if not (gate and up and _plain_linear(gate) and _plain_linear(up) and gate.inputs[0] is up.inputs[0]):
            return None
        if _kind(gate, precisions) != _kind(up, precisions) or gate.inputs[1].shape != up.inputs[1].shape:
            return None
        if not all(live.read_once(v) for v in node.inputs):
            return None
        attrs = {"tree": _tree(node), **_asked(gate)}
        inputs = (gate.inputs[0], gate.inputs[1], up.inputs[1])
        return Instead.of(make_node(GATED_LINEAR, inputs, attrs, _joined(gate, up)))

    return rewrite(graph, rule)


def _kind(node: Node, precisions: PrecisionMap) -> object:
    """Products of one kind can be one: of one precision, of weights that are packed alike."""
    return tuple(_asked(node).items()), _kept(node.inputs[1:2], precision_of(node), precisions)


def _asked(node: Node) -> Mapping[str, object]:
    """What was asked of a product."""
    return {name: node.attrs[name] for name in ("precision", "x_group") if name in node.attrs}


def _kept(weights: Sequence[Value], precision: Precision, precisions: PrecisionMap) -> QuantisedFormat | None:
    """The kind of codes that a product takes over as the checkpoint holds them; None: it rounds weights itself."""
    kept = [precisions.kept(w.constant.format if w.constant else None, precision) for w in weights]
    kinds = {f and replace(f, bits=precision.bits) for f in kept}
    return kinds.pop() if len(kinds) == 1 else None


def _plain_linear(node: Node) -> bool:
    return node.op == "linear" and not any(node.attrs.get(name) for name in ("bias", "residual", "tree"))


def merge_linears(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Linear layers of one kind over the same input (q, k, v) become one product, which is then split."""
    families: dict[tuple[Value, object], list[Node]] = {}
    results = graph.results
    for node in graph.nodes:
        if node.op == "linear" and not node.attrs.get("residual") and node.output not in results:
            families.setdefault((node.inputs[0], _kind(node, precisions)), []).append(node)
    family_of = {n.output: family for family in families.values() if len(family) > 1 for n in family}
    parts: dict[Value, Value] = {}  # of the merged product, by the output that each stands for

    def rule(node: Node, live: Live) -> Instead | None:
        family = family_of.get(node.outputs[0])
        if family is None:
            return None
        if node.output in parts:
            return Instead((), (parts[node.output],))
        merged = _merged(family, node.inputs[0])
        widths = tuple(n.output.width for n in family)
        split = make_node(SPLIT, (merged.output,), {"widths": widths}, _joined(*family))
        parts.update(zip((n.output for n in family), split.outputs, strict=True))
        return Instead((merged, split), split.outputs[:1])

    return rewrite(graph, rule)


def _merged(family: list[Node], x: Value) -> Node:
    inputs = [x, _concatenated([n.inputs[1] for n in family])]
    biases = [n.inputs[2] if n.attrs.get("bias") else None for n in family]
    biased = any(b is not None for b in biases)
    if biased:
        inputs.append(_concatenated([b or _zeros(n) for b, n in zip(biases, family, strict=True)]))
    attrs = {"bias": biased, **_asked(family[0])}
    return make_node(LINEAR, tuple(inputs), attrs, _joined(*family))


def _zeros(node: Node) -> Value:
    width = node.output.width
    return Value((width,), constant=Constant(lambda: np.zeros(width, np.float32), ()))


def _concatenated(values: list[Value]) -> Value:
    constants = [v.constant for v in values]
    assert all(constants), "only constants are concatenated"
    total = sum(d for v in values if isinstance(d := v.shape[0], int))

    def load() -> Array:
        arrays = [c.load() for c in constants if c]
        if len({array.dtype for array in arrays}) > 1:  # NumPy knows no common type of float16 and bfloat16
            arrays = [array.astype(np.float32) for array in arrays]
        return np.concatenate(arrays)

    def stored(bits: int, group: int) -> QuantisedMatrix | None:
        parts = stored_codes([c for c in constants if c], bits, group)
        return combined(parts, np.concatenate) if parts else None

    origin = tuple(o for c in constants if c for o in c.origin)
    constant = Constant(load, origin, stored, _joined_format([c.format for c in constants if c]))
    return Value((total, *values[0].shape[1:]), constant=constant)


def _joined_format(formats: list[QuantisedFormat | None]) -> QuantisedFormat | None:
    """Of matrices below each other, with room for the widest codes; None for a mixture."""
    widest = max((f.bits for f in formats if f), default=0)
    alike = {f and replace(f, bits=widest) for f in formats}
    return alike.pop() if len(alike) == 1 else None


def fuse_epilogue(graph: Graph) -> Graph:
    """An expression of one product alone (an activation) is computed where the product is."""

    def rule(node: Node, live: Live) -> Instead | None:
        linear = live.producer(node.inputs[0]) if node.op == "elementwise" and len(node.inputs) == 1 else None
        if not linear or linear.op != "linear" or linear.attrs.get("residual") or "tree" in linear.attrs:
            return None
        if not live.read_once(linear.output):
            return None
        attrs = {**linear.attrs, "tree": _tree(node)}
        return Instead.of(make_node(LINEAR, linear.inputs, attrs, _joined(linear)))

    return rewrite(graph, rule)


def fuse_residual(graph: Graph) -> Graph:
    """x + linear(y) becomes an addition in the product's epilogue."""

    def rule(node: Node, live: Live) -> Instead | None:
        if node.op != "elementwise" or _tree(node) not in (("add", 0, 1), ("add", 1, 0)):
            return None
        for product, other in (node.inputs, node.inputs[::-1]):
            linear = live.producer(product)
            if not (linear and linear.op == "linear" and not linear.attrs.get("residual")):
                continue
            if live.read_once(product) and not other.constant and other.shape == product.shape:
                attrs = {**linear.attrs, "residual": True}
                return Instead.of(make_node(LINEAR, (*linear.inputs, other), attrs, _joined(linear)))
        return None

    return rewrite(graph, rule)


def fuse_rope_attention(graph: Graph) -> Graph:
    """attention(rope(q), rope(k), v): the rotation and the write into the KV pages become one kernel."""

    def rule(node: Node, live: Live) -> Instead | None:
        if node.op != "attention":
            return None
        q, k = live.producer(node.inputs[0]), live.producer(node.inputs[1])
        if not (q and k and q.op == k.op == "rope" and q.inputs[1:] == k.inputs[1:]):
            return None
        if q.inputs[1] is not node.inputs[3] or not (live.read_once(q.output) and live.read_once(k.output)):
            return None
        inputs = (q.inputs[0], k.inputs[0], *node.inputs[2:], q.inputs[2])
        return Instead.of(make_node(ROPE_ATTENTION, inputs, node.attrs, _joined(node)))

    return rewrite(graph, rule)


def convert_inputs(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Puts the conversion that a product's precision asks for before it; products over one input share it.

    Weights come in groups as `precisions` has them, or where a product keeps a checkpoint's codes in the groups of
    these; where it does not, weights and activations are both transformed before they are rounded
    (kernels/matmul/pack.py). Activations come in the same groups, unless smaller ones were asked for.
    raises ConfigError for such as do not divide these
    """
    converted: dict[tuple[Value, Storage], Node] = {}

    def rule(node: Node, live: Live) -> Instead | None:
        if node.op not in ("linear", "gated_linear"):
            return None
        x = node.inputs[0]
        precision = precision_of(node)
        kept = _kept(node.inputs[1 : 3 if node.op == "gated_linear" else 2], precision, precisions)
        own = kept.group if kept else precisions.group
        x_group = whole(node, "x_group") if "x_group" in node.attrs else own
        check_x_group(node.origin[0] if node.origin else "a product", x_group, own)
        storage = precision.storage(x_group, hadamard=not kept)
        if storage == DENSE:
            return None
        fresh = []
        if (x, storage) not in converted:
            converted[x, storage] = make_node(CONVERT, (x,), {"storage": storage}, node.origin)
            fresh = [converted[x, storage]]
        inputs = (converted[x, storage].output, *node.inputs[1:])
        attrs = {**node.attrs, "group": own if precision.quantised else 0}
        return Instead.of(*fresh, make_node(node.operator, inputs, attrs, node.origin))

    return rewrite(graph, rule)


def fuse_convert(graph: Graph) -> Graph:
    """convert(x) becomes an x whose own kernel writes such rows, where it can and nobody else reads it."""

    def rule(node: Node, live: Live) -> Instead | None:
        found, storage = live.producer(node.inputs[0]) if node.op == "convert" else None, storage_of(node)
        if not found or not live.read_once(node.inputs[0]):
            return None
        view = found if runnable(found).is_view and len(found.outputs) == 1 else None  # heads side by side
        if view:
            found = live.producer(view.inputs[0])
        if not found or not live.read_once(found.outputs[0]) or not runnable(found).packs(found, storage):
            return None
        packed = make_node(found.operator, found.inputs, {**found.attrs, "storage": storage}, _joined(found))
        if view is None:
            return Instead.of(packed)
        attrs = {**view.attrs, "storage": storage}
        return Instead.of(packed, make_node(view.operator, (packed.output,), attrs, view.origin))

    return rewrite(graph, rule)


def rescore_head(graph: Graph, precisions: PrecisionMap) -> Graph:
    """A W4A8 head computes its likeliest tokens again in 8 bits: half the bytes, nearly always the same ranking.

    Not where four bits hold what the checkpoint stores: nothing can come closer to it.
    """
    head, results = head_of(graph), graph.results

    def rule(node: Node, live: Live) -> Instead | None:
        if not (head and node.outputs == head.outputs and node.output in results and _plain_linear(node)):
            return None
        x, w = node.inputs
        if precision_of(node) != Precision.W4A8 or _kept((w,), Precision.W4A8, precisions):
            return None
        rough = make_node(LINEAR, (x, w), node.attrs, node.origin)
        attrs = {"precision": Precision.W8A8, "count": RESCORED}
        return Instead.of(rough, make_node(RESCORE, (rough.output, x, w), attrs, node.origin))

    return rewrite(graph, rule)
