"""The device memory of a lowered graph.

Weights, pages and inputs of decode steps are counted exactly. The activations of a step are bounded from above: the
bytes of each value while it will still be read, and the temporary memory of each node.
"""

import math
from collections.abc import Mapping, Sequence

from millrace.engine.cache_specs import SLOTS_PER_SEQUENCE, KvFormat, max_window_pages
from millrace.engine.cuda.attention_partition import PROGRAMS, aligned, bounds, bucket_parts, room, windows_in
from millrace.engine.cuda.layers import ATTENTION, STATE, attention_kinds, embedding_width, state_shape
from millrace.engine.cuda.lowered import LoweredGraph, Placement
from millrace.engine.cuda.memory_plan import MemoryNeeds, WindowNeeds
from millrace.engine.executor import SAMPLING, ExecutorLimits
from millrace.graph.dims import value_of
from millrace.graph.types import Graph, Node, Symbol, Value
from millrace.kernels.attention.op import window_of
from millrace.kernels.declare import RowFormat
from millrace.kernels.layout import SLAB, n_groups
from millrace.kernels.matmul.op import PRODUCTS, group_of, matrices_of, matrix_size, precision_of, transform_of
from millrace.kernels.matmul.pack import kept_format
from millrace.kernels.operand_places import constant_of
from millrace.kernels.operators import int_attr, static_dim
from millrace.kernels.row_storage import storage_of

# Operators with results in the engine's type. Others count as float32, the widest type of any result.
NARROW = ("attention", "full_attention", "gated_linear", "linear", "rms_norm", "rope_attention", "short_conv")
ELEMENTS: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes, by the engine's type
SAMPLED, CAPTURED = 72, 24  # bytes per row and token of the vocabulary during sampling; within a CUDA graph
_WORKED = 8  # temporary bytes of a node per element that it reads or writes: two float32 values
_CODED = 16  # per element of a slab of codes that is converted to floats


def needs_of(
    lowered: LoweredGraph, limits: ExecutorLimits, *, kv: KvFormat | None = None, buckets: Sequence[int] = (),
    multiprocessors: int = 1,
) -> MemoryNeeds:  # fmt: skip
    """Return the memory needs. Arguments as in CudaExecutor. limits: the number of pages is ignored"""
    graph, element, vocab = lowered.graph, ELEMENTS[lowered.dtype], limits.vocab_size
    max_pages = -(-limits.max_context // limits.page_tokens)
    largest = {"T": limits.max_step_tokens, "S": limits.max_sequences, "R": limits.max_rows}
    rows = 4 * limits.max_step_tokens * embedding_width(graph) if limits.max_rows else 0  # in place of all its tokens
    step = max(_computed(graph, largest, element, multiprocessors) + rows, SAMPLED * limits.max_rows * vocab)
    captured = [
        max(_computed(graph, dict.fromkeys("TSR", n), element, multiprocessors), CAPTURED * n * vocab) for n in buckets
    ]
    page = limits.page_tokens
    inputs = sum(bucket_bytes(graph, n, max_pages, multiprocessors, page) for n in buckets)
    return MemoryNeeds(
        weights_bytes=weights_bytes(lowered.placement, element), step_bytes=step,
        graphs_bytes=inputs + sum(4 * n * vocab for n in buckets) + max(captured, default=0),
        page_bytes=page_bytes(graph, page, element, kv), least_pages=max_pages,
        windows=tuple(
            WindowNeeds(w, page_bytes(graph, page, element, kv, w),
                        max_window_pages(w, limits.max_context, limits.max_step_tokens, page))
            for w in windows_in(attention_kinds(graph))
        ),
        states_bytes=(SLOTS_PER_SEQUENCE * limits.max_sequences + 1) * slot_bytes(graph, element),
    )  # fmt: skip


def weights_bytes(placement: Placement, element: int) -> int:
    """Return the bytes of all constants. element: bytes of the engine's type"""
    floats = element * sum(map(elements, placement.narrow)) + 4 * sum(map(elements, placement.wide))
    return floats + sum(coded_bytes(n, w, rows) for n, rows in placement.coded.items() for w in matrices_of(n))


def elements(value: Value) -> int:
    """Return the number of elements of a constant."""
    return math.prod(d for d in value.shape if isinstance(d, int))


def coded_bytes(node: Node, w: Value, rows: Node | None) -> int:
    """Return the bytes of a matrix's codes and scales, as in kernels/matmul/coded.py. rows: makes its input rows"""
    n, k = matrix_size(w)
    bits, group = precision_of(node).bits, group_of(node)
    if not group:
        return n * (k + 4)  # E4M3 with a float32 scale per row
    stored_format = None if transform_of(rows) else kept_format(constant_of(w), bits, group)
    scale, kinds = (4 if stored_format.two_levels else 2, 1 + stored_format.minimums) if stored_format else (2, 1)
    return n * ((-(-k // 2) if bits == 4 else k) + kinds * scale * n_groups(k, group))


def page_bytes(graph: Graph, page_tokens: int, element: int, kv: KvFormat | None, window: int = 0) -> int:
    """Return the bytes of one page in all layers of a window: keys and values, with float32 scales if quantized."""
    layers = {int_attr(n, "layer"): n for n in graph.nodes if n.op in ATTENTION and window_of(n) == window}
    heads = [
        (static_dim(n.inputs[1], 1), static_dim(n.inputs[1], 2) + static_dim(n.inputs[2], 2)) for n in layers.values()
    ]
    return sum(n * page_tokens * (width * element if kv is None else width + 8) for n, width in heads)


def slot_bytes(graph: Graph, element: int) -> int:
    """Return the bytes of the states of one sequence, in the engine's type."""
    shapes = [state_shape(n) for n in graph.nodes if n.op == STATE]
    return sum(rows * width * element for rows, width in shapes)


def bucket_bytes(graph: Graph, sequences: int, max_pages: int, multiprocessors: int, page_tokens: int) -> int:
    """Return the bytes of a bucket's inputs: tokens, positions, slots, sampling rows, pages, attention's programs."""
    kinds = attention_kinds(graph)
    _, n = aligned(bucket_parts(sequences, max_pages, kinds, multiprocessors, page_tokens))
    starts = (2 + len(windows_in(kinds))) * (sequences + 1)  # including zeros, and the table offsets of windows
    return 8 * len(SAMPLING.names or ()) * sequences + 4 * (n + starts)


def _computed(graph: Graph, sizes: Mapping[str, int], element: int, multiprocessors: int) -> int:
    """Return the most bytes of activations at a time. sizes: of the dimensions that are known at run time"""
    behind = graph.last_reads()
    owner: dict[Value, Value] = {}  # of a view: the value that has its memory
    readers: dict[Value, int] = {}  # how many readers are left, by value
    stored_format: dict[Value, int] = {}
    kinds = {p.value: 4 for p in graph.inputs}
    now = most = 0
    for node, gone in zip(graph.nodes, behind, strict=True):
        for value in node.outputs:
            kinds[value] = _element(node, kinds, element)
            viewed = node.op in ("reshape", "split")
            owner[value] = owner.get(node.inputs[0], node.inputs[0]) if viewed else value
            readers[owner[value]] = readers.get(owner[value], 0) + 1
            if not viewed:
                stored_format[value] = _rows(value, sizes) * value.width * kinds[value]
                now += stored_format[value]
        most = max(most, now + _meanwhile(node, sizes, element, multiprocessors))
        for value in gone:
            if value in owner:
                readers[owner[value]] -= 1
                if not readers[owner[value]]:
                    now -= stored_format.get(owner[value], 0)
    return most


def _rows(value: Value, sizes: Mapping[str, int]) -> int:
    return value_of(value.shape[0], {Symbol(name): size for name, size in sizes.items()})


def _element(node: Node, kinds: Mapping[Value, int], element: int) -> int:
    """Return the most bytes of an element of a node's result."""
    if node.op == "linear" and node.attrs.get("residual"):
        return 4
    if node.op in ("gather_rows", "reshape", "split"):
        return kinds[node.inputs[0]]
    if node.op == "convert":
        return 2 if storage_of(node).format == RowFormat.BF16 else 3  # a float32 scale per 4 codes, or more
    return element if node.op in NARROW else 4


def _meanwhile(node: Node, sizes: Mapping[str, int], element: int, multiprocessors: int) -> int:
    """Return the temporary memory of a node."""
    if node.op in ("reshape", "split"):
        return 0
    result = sum(_WORKED * _rows(v, sizes) * v.width for v in (*node.inputs, *node.outputs) if not v.constant)
    if node.op == "gated_linear":  # both halves, and their product in float32
        result += (2 * element + _WORKED) * _rows(node.output, sizes) * node.output.width
    if node.op in PRODUCTS and precision_of(node).coded:
        result += max(_CODED * min(elements(w), max(SLAB, static_dim(w, 1))) for w in matrices_of(node))
    if node.op in ATTENTION:  # partial sums of split blocks
        kv_heads = static_dim(node.inputs[1], 1)
        parts = {
            rows: bounds(_rows(node.inputs[0], sizes), room(rows, kv_heads, multiprocessors))[2] for rows in PROGRAMS
        }
        result += 4 * max(rows * n for rows, n in parts.items()) * kv_heads * (static_dim(node.inputs[2], 2) + 2)
    return result
