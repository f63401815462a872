"""The operators max_pool and avg_pool, over windows in two dimensions."""

from collections.abc import Callable

from millrace.graph.dims import times
from millrace.graph.shape_rules import illegal
from millrace.graph.types import Attrs, Inputs, Node, Shape
from millrace.kernels.arrays import Array
from millrace.kernels.convolution.op import pair, plane_sizes, window_counts
from millrace.kernels.operators import EvaluationContext, KernelOperator, ProgramWriter, StoredValue
from millrace.kernels.pooling.declare import MAX, MEAN, MEAN_INSIDE
from millrace.kernels.pooling.ref import avg_pool, max_pool

_ATTRS = frozenset({"kernel", "stride", "padding"})


def _shapes(op: str) -> Callable[[Inputs, Attrs], tuple[Shape, ...]]:
    def rule(inputs: Inputs, attrs: Attrs) -> tuple[Shape, ...]:
        (x,) = inputs
        if len(x.shape) != 4:
            raise illegal(op, f"x {x}", "x [N, C, H, W]")
        kernel, stride, padding = (pair(attrs, name) for name in ("kernel", "stride", "padding"))
        if (
            min(*kernel, *stride) < 1
            or min(padding) < 0
            or any(2 * p > k for p, k in zip(padding, kernel, strict=True))
        ):
            what = f"kernel {kernel}, stride {stride}, padding {padding}"
            raise illegal(op, what, "kernel and stride from 1 on, a padding of at most half of the kernel")
        return ((*x.shape[:2], *window_counts(op, x, kernel, stride, padding)),)

    return rule


def _reference(pool: Callable[[Node, Array], Array]) -> Callable[[Node, EvaluationContext], StoredValue]:
    def compute(node: Node, values: EvaluationContext) -> StoredValue:
        (x,) = node.inputs
        return values.stored(pool(node, values.rows(x)), node)

    return compute


def _lower(kind: Callable[[Node], int]) -> Callable[[Node, ProgramWriter], None]:
    def write(node: Node, writer: ProgramWriter) -> None:
        (x,), y = node.inputs, node.output
        params = {
            "planes": writer.extent(times(*x.shape[:2])), **plane_sizes(x, y, writer), "kind": kind(node),
            "dilation_y": 1, "dilation_x": 1,
        }  # fmt: skip
        for name, (down, across) in (
            ("kernel", ("kh", "kw")), ("stride", ("stride_y", "stride_x")), ("padding", ("pad_y", "pad_x")),
        ):  # fmt: skip
            params[down], params[across] = pair(node.attrs, name)
        writer.add("pooling", {"x": writer.dense(x, node), "y": writer.new(y, "pooled")}, params, node, node.op)

    return write


def _max_pool(node: Node, planes: Array) -> Array:
    return max_pool(planes, *(pair(node.attrs, name) for name in ("kernel", "stride", "padding")))


def _mean(node: Node, planes: Array) -> Array:
    kernel, stride, padding = (pair(node.attrs, name) for name in ("kernel", "stride", "padding"))
    return avg_pool(planes, kernel, stride, padding, count_include_pad=bool(node.attrs["count_include_pad"]))


MAX_POOL = KernelOperator(
    name="max_pool", inputs=(1, 1), attrs=_ATTRS, shapes=_shapes("max_pool"), reference=_reference(_max_pool),
    lower=_lower(lambda node: MAX),
)  # fmt: skip
AVG_POOL = KernelOperator(
    name="avg_pool", inputs=(1, 1), attrs=_ATTRS | {"count_include_pad"}, shapes=_shapes("avg_pool"),
    reference=_reference(_mean), lower=_lower(lambda node: MEAN if node.attrs["count_include_pad"] else MEAN_INSIDE),
)  # fmt: skip
OPERATORS = (MAX_POOL, AVG_POOL)
