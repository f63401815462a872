"""The table of legal operators: how many inputs, which attributes, and the shape that comes out.

Operators marked "fused" exist only behind the compiler's passes. The meaning of each is its NumPy reference
(kernels/*/ref.py), and engine/reference.py ties the two together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.errors import GraphError, nearest
from millrace.graph.types import S, Shape, Storage, T, Value

Attrs = Mapping[str, object]

UNARY = ("neg", "exp", "sigmoid", "tanh", "sqrt", "abs")
BINARY = ("add", "sub", "mul", "div", "max", "min")


@dataclass(frozen=True, slots=True)
class Op:
    """`inputs` is (at least, at most); `shape` computes the output's shape and raises GraphError."""

    inputs: tuple[int, int]
    shape: Callable[[tuple[Value, ...], Attrs], Shape]
    attrs: frozenset[str] = frozenset()
    fused: bool = False


def illegal(op: str, what: str, expected: str) -> GraphError:
    return GraphError(f"{op}: {what}", expected, "change the model's forward(), or the pass that wrote this")


def _embedding(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    tokens, table = inputs
    if tokens.storage.kind != "i32" or len(table.shape) != 2:
        raise illegal("embedding", f"inputs {tokens}, {table}", "int32 tokens [T] and a table [vocabulary, width]")
    return (*tokens.shape, table.shape[1])


def _linear(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
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
    return out


def _gated_linear(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    x, gate, up = inputs
    _check_tree("gated_linear", attrs, 2)
    if gate.shape != up.shape or len(gate.shape) != 2 or x.shape[1:] != gate.shape[1:]:
        raise illegal("gated_linear", f"x {x}, gate {gate}, up {up}", "x [rows, K], gate and up [N, K]")
    return (x.shape[0], gate.shape[0])


def _rescore(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    """The `count` largest of the logits are computed again as x @ w.T in another precision."""
    logits, x, w = inputs
    if logits.shape != (S, w.shape[0]) or x.shape != (S, w.shape[1]):
        raise illegal("rescore", f"logits {logits}, x {x}, w {w}", "logits [S, N], x [S, K] and w [N, K]")
    return logits.shape


_DEEPEST_TREE = 32  # more than a kernel's operations


def _check_tree(op: str, attrs: Attrs, n_inputs: int) -> None:
    """A tree is an int (which input), a float (a number), or (operation, operand, ...)."""
    level = [attrs.get("tree")]
    for _ in range(_DEEPEST_TREE):
        below = (operand for tree in level for operand in _operands(op, tree, n_inputs))
        level = list({id(tree): tree for tree in below}.values())  # what is shared is looked at once
    if level:
        raise illegal(op, f"a tree of more than {_DEEPEST_TREE} levels", "what a kernel can hold")


def _operands(op: str, tree: object, n_inputs: int) -> tuple[object, ...]:
    if isinstance(tree, float):
        return ()
    if isinstance(tree, int) and not isinstance(tree, bool):
        if not 0 <= tree < n_inputs:
            raise illegal(op, f"its tree has an input {tree}", f"0 to {n_inputs - 1}")
        return ()
    if not isinstance(tree, tuple) or not tree:
        raise illegal(op, f"its tree has {tree!r:.80}", "an input, a number, or (operation, operand, ...)")
    name = tree[0]
    if name not in UNARY + BINARY:
        raise illegal(op, f"its tree has the operation {name!r:.80}", nearest(str(name)[:80], UNARY + BINARY))
    if len(tree) != (2 if name in UNARY else 3):
        raise illegal(op, f"its tree has {name} of {len(tree) - 1} operands", "1" if name in UNARY else "2")
    return tree[1:]


def _elementwise(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
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
    return whole.shape


def _rms_norm(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    x, w = inputs
    if w.shape != x.shape[-1:]:
        raise illegal(
            "rms_norm", f"x {list(x.shape)} and weight {list(w.shape)}", "a weight as long as x's last dimension"
        )
    return x.shape


def _reshape(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    (x,) = inputs
    shape = attrs["shape"]
    assert isinstance(shape, tuple)
    if Value(shape).width != x.width or shape[0] != x.shape[0]:
        raise illegal("reshape", f"{list(x.shape)} to {list(shape)}", "the same first dimension and as many elements")
    return shape


def _slice(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    (x,) = inputs
    start, stop = attrs["start"], attrs["stop"]
    assert isinstance(start, int) and isinstance(stop, int)
    if len(x.shape) != 2 or not 0 <= start < stop <= x.width:
        raise illegal("slice", f"columns {start}:{stop} of {list(x.shape)}", "columns inside a matrix")
    return (x.shape[0], stop - start)


def _rope(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    x, table = inputs
    if len(x.shape) != 3 or table.shape[1:] != x.shape[2:]:
        raise illegal(
            "rope", f"x {list(x.shape)} and table {list(table.shape)}", "x [T, heads, D] and table [context, D]"
        )
    return x.shape


def _attention(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    q, k, v = inputs[:3]
    if not (len(q.shape) == 3 and k.shape == v.shape and len(k.shape) == 3 and q.shape[2] == k.shape[2]):
        raise illegal("attention", f"q {q}, k {k}, v {v}", "q [T, H, D], k and v [T, K, D]")
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
    assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(size, int)
    if heads % kv_heads:
        raise illegal("attention", f"{heads} query heads over {kv_heads} KV heads", "a multiple")
    if size % 8 or size > 512:
        raise illegal("attention", f"a head size of {size}", "a multiple of 8, at most 512")
    return q.shape


def _sampled_rows(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    (x,) = inputs
    if len(x.shape) != 2 or x.shape[0] != T:
        raise illegal("sampled_rows", f"x {list(x.shape)}", "x [T, width]")
    return (S, x.shape[1])


def _same(inputs: tuple[Value, ...], attrs: Attrs) -> Shape:
    return inputs[0].shape


OPS: dict[str, Op] = {
    "embedding": Op((2, 2), _embedding, frozenset({"scale"})),
    "linear": Op((2, 4), _linear, frozenset({"bias", "residual", "precision"})),
    "elementwise": Op((1, 4), _elementwise, frozenset({"tree"})),
    "rms_norm": Op((2, 2), _rms_norm, frozenset({"eps", "storage"})),
    "reshape": Op((1, 1), _reshape, frozenset({"shape"})),
    "rope": Op((2, 2), _rope),
    "attention": Op((3, 3), _attention, frozenset({"layer", "scale"})),
    "sampled_rows": Op((1, 1), _sampled_rows),
    "slice": Op((1, 1), _slice, frozenset({"start", "stop"}), fused=True),
    "convert": Op((1, 1), _same, frozenset({"storage"}), fused=True),
    "gated_linear": Op((3, 3), _gated_linear, frozenset({"tree", "precision"}), fused=True),
    "rescore": Op((3, 3), _rescore, frozenset({"precision", "count"}), fused=True),
    "rope_attention": Op((4, 4), _attention, frozenset({"layer", "scale"}), fused=True),
}


def storage_of(op: str, attrs: Attrs) -> Storage:
    """How a node's output lies in memory: float32 unless the node packs it."""
    storage = attrs.get("storage", Storage("f32"))
    assert isinstance(storage, Storage)
    return storage
