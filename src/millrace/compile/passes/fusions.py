"""Passes that merge matmuls with their neighbors, as kernels compute them, and convert their rows."""

from millrace.compile.passes.products import fits_epilogue, is_plain_linear, kept_format_of
from millrace.compile.precision import RESCORED, PrecisionMap, check_x_group
from millrace.graph.rewrite import GraphView, Replacement, head_of, joined_origins, make_node, rewrite, tree_of
from millrace.graph.types import Graph, Node, Value
from millrace.kernels.attention.op import ROPE_ATTENTION
from millrace.kernels.convert.op import CONVERT
from millrace.kernels.matmul.op import EXPERT_PRODUCTS, LINEAR, PRODUCTS, matrices_of, precision_of
from millrace.kernels.operators import int_attr, runnable
from millrace.kernels.precision import Precision
from millrace.kernels.rescore.op import RESCORE
from millrace.kernels.row_storage import DENSE, Storage, storage_of


def fuse_epilogue(graph: Graph) -> Graph:
    """Compute an expression of one matmul alone (an activation) in the matmul's epilogue."""

    def rule(node: Node, live: GraphView) -> Replacement | None:
        linear = live.producer(node.inputs[0]) if node.op == "elementwise" and len(node.inputs) == 1 else None
        if not linear or linear.op != "linear" or linear.attrs.get("residual") or "tree" in linear.attrs:
            return None
        if not fits_epilogue(node):
            return None
        if not live.read_once(linear.output):
            return None
        attrs = {**linear.attrs, "tree": tree_of(node)}
        return Replacement.from_nodes(make_node(LINEAR, linear.inputs, attrs, joined_origins(linear)))

    return rewrite(graph, rule)


def fuse_residual(graph: Graph) -> Graph:
    """Compute x + linear(y) as an addition in the matmul's epilogue."""

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if node.op != "elementwise" or len(node.inputs) != 2 or tree_of(node) not in (("add", 0, 1), ("add", 1, 0)):
            return None  # with one input, 1 is the number 1.0, which is equal
        for product, other in (node.inputs, node.inputs[::-1]):
            linear = live.producer(product)
            if not (linear and linear.op == "linear" and not linear.attrs.get("residual")):
                continue
            if live.read_once(product) and not other.constant and _alike(other, product):
                attrs = {**linear.attrs, "residual": True}
                return Replacement.from_nodes(make_node(LINEAR, (*linear.inputs, other), attrs, joined_origins(linear)))
        return None

    return rewrite(graph, rule)


def _alike(a: Value, b: Value) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def fuse_rope_attention(graph: Graph) -> Graph:
    """attention(rope(q), rope(k), v): merge the rotation and the write to the KV pages into one kernel.

    Rotations of whole heads alone: others are kernels of their own.
    """

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if node.op != "attention":
            return None
        q, k = live.producer(node.inputs[0]), live.producer(node.inputs[1])
        if not (q and k and q.op == k.op == "rope" and q.inputs[1:] == k.inputs[1:]):
            return None
        if q.attrs or k.attrs or q.inputs[2].shape[1] != q.output.shape[2]:
            return None
        if q.inputs[1] is not node.inputs[3] or not (live.read_once(q.output) and live.read_once(k.output)):
            return None
        inputs = (q.inputs[0], k.inputs[0], *node.inputs[2:5], q.inputs[2], *node.inputs[5:])
        return Replacement.from_nodes(make_node(ROPE_ATTENTION, inputs, node.attrs, joined_origins(node)))

    return rewrite(graph, rule)


def convert_inputs(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Insert the conversions that matmuls' precisions need; matmuls over one input share them.

    Weights are grouped as in `precisions`, or as in the checkpoint's codes if a matmul keeps these; otherwise weights
    and activations are both transformed before they are quantized (kernels/matmul/pack.py). Activations have the same
    groups, unless smaller ones are requested.
    raises ConfigError for groups that do not divide these
    """
    converted: dict[tuple[Value, Storage], Node] = {}

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if node.op not in (*PRODUCTS, *EXPERT_PRODUCTS):
            return None
        x = node.inputs[0]
        precision = precision_of(node)
        stored_format = kept_format_of(matrices_of(node), precision, precisions)
        own = stored_format.group if stored_format else precisions.group
        x_group = int_attr(node, "x_group") if "x_group" in node.attrs else own
        check_x_group(node.origin[0] if node.origin else "a product", x_group, own)
        storage = precision.storage(x_group, hadamard=not stored_format)
        if storage == DENSE:
            return None
        fresh = []
        if (x, storage) not in converted:
            converted[x, storage] = make_node(CONVERT, (x,), {"storage": storage}, node.origin)
            fresh = [converted[x, storage]]
        inputs = (converted[x, storage].output, *node.inputs[1:])
        attrs = {**node.attrs, "group": own if precision.quantised else 0}
        return Replacement.from_nodes(*fresh, make_node(node.operator, inputs, attrs, node.origin))

    return rewrite(graph, rule)


def fuse_convert(graph: Graph) -> Graph:
    """Merge convert(x) into x if x's kernel can write such rows and nothing else reads x."""

    def rule(node: Node, live: GraphView) -> Replacement | None:
        result, storage = live.producer(node.inputs[0]) if node.op == "convert" else None, storage_of(node)
        if not result or not live.read_once(node.inputs[0]):
            return None
        view = result if runnable(result).is_view and len(result.outputs) == 1 else None  # heads side by side
        if view and view.output.rows != view.inputs[0].rows:
            return None  # rows are packed as they are written
        if view:
            result = live.producer(view.inputs[0])
        if not result or not live.read_once(result.outputs[0]) or not runnable(result).packs(result, storage):
            return None
        packed = make_node(result.operator, result.inputs, {**result.attrs, "storage": storage}, joined_origins(result))
        if view is None:
            return Replacement.from_nodes(packed)
        attrs = {**view.attrs, "storage": storage}
        return Replacement.from_nodes(packed, make_node(view.operator, (packed.output,), attrs, view.origin))

    return rewrite(graph, rule)


def rescore_head(graph: Graph, precisions: PrecisionMap) -> Graph:
    """Compute the most likely tokens of a W4A8 head again in 8 bits: half the bytes, nearly always the same ranking.

    Not if four bits hold what the checkpoint stores: nothing can be closer to it.
    """
    head, results = head_of(graph), graph.results

    def rule(node: Node, live: GraphView) -> Replacement | None:
        if not (head and node.outputs == head.outputs and node.output in results and is_plain_linear(node)):
            return None
        x, w = node.inputs
        if precision_of(node) != Precision.W4A8 or kept_format_of((w,), Precision.W4A8, precisions):
            return None
        rough = make_node(LINEAR, (x, w), node.attrs, node.origin)
        attrs = {"precision": Precision.W8A8, "count": RESCORED}
        return Replacement.from_nodes(rough, make_node(RESCORE, (rough.output, x, w), attrs, node.origin))

    return rewrite(graph, rule)
