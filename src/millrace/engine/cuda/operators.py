"""What each operator computes on a device, by its name: tensors in, tensors out.

Products take and give the engine's type; what they are added to, the residual stream, stays float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from millrace.engine.cuda.glue import coding_of
from millrace.graph.trees import Tree, as_tree
from millrace.graph.types import Node, Value
from millrace.kernels.matmul.coded import CodedRows, Coding, Matrix
from millrace.kernels.operators import number, size, whole
from millrace.kernels.storage import storage_of


class Run(Protocol):
    """One step through a graph."""

    dtype: torch.dtype

    def tensor(self, value: Value) -> Tensor:
        """Of a constant, or as the node that computed it left it."""

    def products(self, node: Node, bias: Tensor | None = None) -> list[Tensor]:
        """Its rows, which may be coded, times each of its matrices, each (M, N) of `dtype`."""

    def matrix(self, value: Value) -> Matrix:
        """As `tensor`, of rows that may be coded."""

    def coded_rows(self, x: Tensor, coding: Coding) -> CodedRows:
        """x (R, K) of floats, coded."""

    def added(self, node: Node, y: Tensor) -> Tensor:
        """What a product with a residual gives: y added to that, float32."""

    def gated(self, node: Node, halves: Sequence[Tensor]) -> Matrix:
        """By the tree of a gated product."""

    def normalised(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """By its root mean square; of `dtype`."""

    def attended(self, node: Node, heads: tuple[Tensor, Tensor, Tensor], table: Tensor | None) -> Tensor:
        """Keeps keys and values, rotated where there is a table, and attends to all that is kept: (T, H, DV)."""

    def attended_whole(self, node: Node, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Each token to all of its text: (T, H, DV)."""


_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "exp": torch.exp, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf,
    "sqrt": torch.sqrt, "abs": torch.abs,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


def evaluate(tree: Tree, inputs: Sequence[Tensor]) -> Tensor:
    """The tree's value, as graph/trees.py means it."""
    if isinstance(tree, int):
        return inputs[tree]
    if isinstance(tree, float):
        return torch.full((), tree, dtype=inputs[0].dtype, device=inputs[0].device)  # no copy: graphs capture none
    operation, operands = str(tree[0]), [evaluate(as_tree(t), inputs) for t in tree[1:]]
    return _UNARY[operation](*operands) if operation in _UNARY else _BINARY[operation](*operands)


def _embedding(node: Node, run: Run) -> Tensor:
    ids, table = (run.tensor(v) for v in node.inputs)
    found, scale = functional.embedding(ids, table).float(), number(node, "scale")
    return found if scale == 1 else found * scale


def _rms_norm(node: Node, run: Run) -> Tensor:
    x, w = (run.tensor(v) for v in node.inputs)
    return run.normalised(x, w, number(node, "eps"))


def _layer_norm(node: Node, run: Run) -> Tensor:
    """float32, as what is added to it later."""
    x, w, bias = (run.tensor(v) for v in node.inputs)
    return functional.layer_norm(x.float(), (x.shape[-1],), w, bias, number(node, "eps"))


def _linear(node: Node, run: Run) -> Tensor:
    (y,) = run.products(node, run.tensor(node.inputs[2]) if node.attrs.get("bias") else None)
    if "tree" in node.attrs:
        y = evaluate(as_tree(node.attrs["tree"]), [y.float()]).to(run.dtype)
    return run.added(node, y) if node.attrs.get("residual") else y


def _gated_linear(node: Node, run: Run) -> Matrix:
    return run.gated(node, run.products(node))


def _convert(node: Node, run: Run) -> Matrix:
    """Rows as the products want them that read them: 16-bit floats of the engine's type, or int8."""
    x, storage = run.matrix(node.inputs[0]), storage_of(node)
    if isinstance(x, CodedRows):
        return x  # made so at once, where only such products read it
    if (coding := coding_of(storage)) is not None:
        return run.coded_rows(x.flatten(1), coding)
    return x.to(torch.bfloat16 if run.dtype == torch.float32 else run.dtype)


def _elementwise(node: Node, run: Run) -> Tensor:
    inputs = [run.tensor(v) for v in node.inputs]
    found = evaluate(as_tree(node.attrs["tree"]), [x.float() for x in inputs])
    return found if any(x.dtype == torch.float32 for x in inputs) else found.to(run.dtype)


def _attention(node: Node, run: Run) -> Tensor:
    q, k, v = (run.tensor(x) for x in node.inputs[:3])
    return run.attended(node, (q, k, v), run.tensor(node.inputs[5]) if node.op == "rope_attention" else None)


def _full_attention(node: Node, run: Run) -> Tensor:
    q, k, v, _ = (run.tensor(x) for x in node.inputs)
    return run.attended_whole(node, (q, k, v))


def _mean_rows(node: Node, run: Run) -> Tensor:
    """Of each text's rows. Nothing waits to see whether the lengths are right: they are those of the rows."""
    x, lengths = (run.tensor(v) for v in node.inputs)
    return torch.segment_reduce(x.float(), "mean", lengths=lengths.long(), axis=0, unsafe=True)


def _normalise(node: Node, run: Run) -> Tensor:
    return functional.normalize(run.tensor(node.inputs[0]).float(), dim=-1, eps=number(node, "eps"))


def _gather_rows(node: Node, run: Run) -> Tensor:
    x, rows = (run.tensor(v) for v in node.inputs)
    return x[rows]


def _reshape(node: Node, run: Run) -> Tensor:
    return run.tensor(node.inputs[0]).reshape(-1, *(size(node.output, i) for i in range(1, len(node.output.shape))))


def _split(node: Node, run: Run) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = run.tensor(node.inputs[0]).split_with_sizes([v.width for v in node.outputs], 1)
    return found


OPERATORS: Mapping[str, Callable[[Node, Run], Matrix | tuple[Tensor, ...]]] = {
    "embedding": _embedding, "rms_norm": _rms_norm, "linear": _linear, "gated_linear": _gated_linear,
    "elementwise": _elementwise, "attention": _attention, "rope_attention": _attention, "gather_rows": _gather_rows,
    "reshape": _reshape, "split": _split, "convert": _convert, "layer_norm": _layer_norm,
    "full_attention": _full_attention, "mean_rows": _mean_rows, "normalise": _normalise,
}  # fmt: skip


def layer_of(node: Node) -> int:
    """Of attention."""
    return whole(node, "layer")
