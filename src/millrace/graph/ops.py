"""The table of legal operators: how many inputs, which attributes, and the shapes that come out.

Operators marked "fused" exist only behind the compiler's passes. The meaning of each is its NumPy reference
(kernels/*/ref.py), and engine/reference.py ties the two together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.errors import GraphError
from millrace.graph.trees import faults
from millrace.graph.types import DType, Shape, Value

MAX_HEAD = 512  # elements of a key or a value: what kernels hold (a test compares)
Attrs = Mapping[str, object]
Inputs = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """`inputs` is (at least, at most); `shapes` computes those of the outputs and raises GraphError."""

    inputs: tuple[int, int]
    shapes: Callable[[Inputs, Attrs], tuple[Shape, ...]]
    attrs: frozenset[str] = frozenset()
    fused: bool = False


def illegal(op: str, what: str, expected: str) -> GraphError:
    return GraphError(f"{op}: {what}", expected, "change the model's forward(), or the pass that wrote this")


def _embedding(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    ids, table = inputs
    if ids.dtype != DType.I32 or len(ids.shape) != 1 or len(table.shape) != 2:
        raise illegal("embedding", f"inputs {ids}, {table}", "i32 ids [n] and a table [vocabulary, width]")
    return ((*ids.shape, table.shape[1]),)


def _linear(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, w = inputs[:2]
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise illegal("linear", f"x {list(x.shape)} and w {list(w.shape)}", "x [rows, K] and w [N, K]")
    out: Shape = (x.shape[0], w.shape[0])
    if attrs.get("bias"):
        bias = inputs[2]
        if bias.shape != (w.shape[0],):
            raise illegal("linear", f"bias {list(bias.shape)} for w {list(w.shape)}", "bias [N]")
    if attrs.get("residual") and inputs[-1].shape != out:
        raise illegal("linear", f"residual {list(inputs[-1].shape)}", f"the shape of the result, {list(out)}")
    _check_tree("linear", {"tree": attrs.get("tree", 0)}, 1)
    return (out,)


def _gated_linear(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, gate, up = inputs
    _check_tree("gated_linear", attrs, 2)
    if gate.shape != up.shape or len(gate.shape) != 2 or x.shape[1:] != gate.shape[1:]:
        raise illegal("gated_linear", f"x {x}, gate {gate}, up {up}", "x [rows, K], gate and up [N, K]")
    return ((x.shape[0], gate.shape[0]),)


def _rescore(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    """The `count` largest of the logits are computed again as x @ w.T in another precision."""
    logits, x, w = inputs
    if logits.shape != (x.shape[0], w.shape[0]) or x.shape[1:] != w.shape[1:]:
        raise illegal("rescore", f"logits {logits}, x {x}, w {w}", "logits [R, N], x [R, K] and w [N, K]")
    return (logits.shape,)


def _check_tree(op: str, attrs: Attrs, n_inputs: int) -> None:
    for what, expected in faults(attrs.get("tree"), n_inputs):
        raise illegal(op, what, expected)


def _elementwise(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    _check_tree("elementwise", attrs, len(inputs))
    whole = next((v for v in inputs if not v.constant), inputs[0])
    for v in inputs:
        row = v.constant is not None and len(whole.shape) == 2 and v.shape == whole.shape[1:]
        if v.shape != whole.shape and not row:
            raise illegal(
                "elementwise",
                f"operands {[list(v.shape) for v in inputs]}",
                "equal shapes, or a constant row for a matrix",
            )
    return (whole.shape,)


def _rms_norm(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, w = inputs
    if w.shape != x.shape[-1:]:
        raise illegal(
            "rms_norm", f"x {list(x.shape)} and weight {list(w.shape)}", "a weight as long as x's last dimension"
        )
    return (x.shape,)


def _layer_norm(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, w, b = inputs
    if len(x.shape) != 2 or not w.shape == b.shape == x.shape[1:]:
        raise illegal(
            "layer_norm", f"x {list(x.shape)}, weight {list(w.shape)}, bias {list(b.shape)}",
            "x [rows, N], weight [N] and bias [N]",
        )  # fmt: skip
    return (x.shape,)


def _reshape(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,) = inputs
    shape = attrs["shape"]
    assert isinstance(shape, tuple)
    if Value(shape).width != x.width or shape[0] != x.shape[0]:
        raise illegal("reshape", f"{list(x.shape)} to {list(shape)}", "the same first dimension and as many elements")
    return (shape,)


def _split(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    (x,) = inputs
    widths = attrs["widths"]
    assert isinstance(widths, tuple)
    if len(x.shape) != 2 or sum(widths) != x.width or min(widths) < 1:
        raise illegal("split", f"{list(x.shape)} into columns of {list(widths)}", "widths that add up to a matrix's")
    return tuple((x.shape[0], width) for width in widths)


def _rope(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, positions, table = inputs
    if len(x.shape) != 3 or table.shape[1:] != x.shape[2:]:
        raise illegal(
            "rope", f"x {list(x.shape)} and table {list(table.shape)}", "x [T, heads, D] and table [context, D]"
        )
    _check_ids("rope", positions, x)
    return (x.shape,)


def _check_ids(op: str, ids: Value, x: Value) -> None:
    """One number for each row of x."""
    if ids.dtype != DType.I32 or ids.shape != x.shape[:1]:
        raise illegal(op, f"x {x} and its positions {ids}", "i32, one for each of its rows")


def _heads(op: str, inputs: Inputs) -> tuple[Shape, ...]:
    q, k, v, lengths = inputs
    ranks = {len(x.shape) for x in (q, k, v)}
    if ranks != {3} or k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise illegal(op, f"q {q}, k {k}, v {v}", "q [T, H, D], k [T, K, D] and v [T, K, values' size]")
    if lengths.dtype != DType.I32 or len(lengths.shape) != 1:
        raise illegal(op, f"lengths {lengths}", "i32 [S], the tokens of each sequence")
    heads, kv_heads, sizes = q.shape[1], k.shape[1], (q.shape[2], v.shape[2])
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    if heads % kv_heads:
        raise illegal(op, f"{heads} query heads over {kv_heads} KV heads", "a multiple")
    for size in sizes:
        assert isinstance(size, int)
        if size % 8 or size > MAX_HEAD:
            raise illegal(op, f"a head size of {size}", f"a multiple of 8, at most {MAX_HEAD}")
    return ((*q.shape[:2], v.shape[2]),)


def _attention(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    q, k, v, positions, lengths = inputs[:5]
    _check_ids("attention", positions, q)
    return _heads("attention", (q, k, v, lengths))


def _full_attention(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    return _heads("full_attention", inputs)


def _gather_rows(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, rows = inputs
    if len(x.shape) != 2 or rows.dtype != DType.I32 or len(rows.shape) != 1:
        raise illegal("gather_rows", f"x {x} and rows {rows}", "x [T, width] and i32 rows [R]")
    return ((rows.shape[0], x.shape[1]),)


def _mean_rows(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    x, lengths = inputs
    if len(x.shape) != 2 or lengths.dtype != DType.I32 or len(lengths.shape) != 1:
        raise illegal("mean_rows", f"x {x} and lengths {lengths}", "x [T, width] and i32 lengths [S]")
    return ((lengths.shape[0], x.shape[1]),)


def _same(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
    return (inputs[0].shape,)


OPS: dict[str, Op] = {
    "embedding": Op((2, 2), _embedding, frozenset({"scale"})),
    "linear": Op((2, 4), _linear, frozenset({"bias", "residual", "precision", "tree"})),
    "elementwise": Op((1, 4), _elementwise, frozenset({"tree"})),
    "rms_norm": Op((2, 2), _rms_norm, frozenset({"eps", "storage"})),
    "layer_norm": Op((3, 3), _layer_norm, frozenset({"eps", "storage"})),
    "normalise": Op((1, 1), _same, frozenset({"eps"})),
    "reshape": Op((1, 1), _reshape, frozenset({"shape"})),
    "rope": Op((3, 3), _rope),
    "attention": Op((5, 5), _attention, frozenset({"layer", "scale"})),
    "full_attention": Op((4, 4), _full_attention, frozenset({"scale"})),
    "gather_rows": Op((2, 2), _gather_rows),
    "mean_rows": Op((2, 2), _mean_rows),
    "split": Op((1, 1), _split, frozenset({"widths"})),
    "convert": Op((1, 1), _same, frozenset({"storage"}), fused=True),
    "gated_linear": Op((3, 3), _gated_linear, frozenset({"tree", "precision"}), fused=True),
    "rescore": Op((3, 3), _rescore, frozenset({"precision", "count"}), fused=True),
    "rope_attention": Op((6, 6), _attention, frozenset({"layer", "scale"}), fused=True),
}
