"""What will lie in a device's memory, by the graph alone: so a start that succeeds cannot fail later.

Weights, pages and the inputs of decode steps are counted to the byte. What a step computes is bounded from above: of
each value the bytes that it has, as long as somebody will read it, and room for what its node needs meanwhile.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millrace.engine.cuda.placement import PRODUCTS, Placement, elements
from millrace.engine.cuda.work import PROGRAMS, Kind, aligned, bounds, bucket_parts, room
from millrace.engine.executor import SAMPLING, ExecutorLimits
from millrace.engine.kv import PAGE_TOKENS, KvFormat
from millrace.errors import MachineError, mib
from millrace.graph.types import Graph, Node, Symbol, Value
from millrace.kernels.declare import RowFormat
from millrace.kernels.layout import SLAB
from millrace.kernels.matmul.op import matrices_of, precision_of
from millrace.kernels.operators import size, whole
from millrace.kernels.storage import storage_of

ATTENTION = ("attention", "rope_attention")
WIDE = ("embedding", "elementwise", "layer_norm", "mean_rows", "normalise")  # what gives float32
ELEMENTS: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes, by the engine's type
SHARE = 0.9  # of a device's free memory; the rest is what an allocator loses, and others that come
RESERVE = 512 << 20  # workspaces of libraries, kernels' code
DRAWN, CAPTURED = 72, 24  # bytes for each row and token of the vocabulary while tokens are drawn; in a graph
_WORKED = 8  # bytes a node takes beside its result for each element that it reads or writes: two of float32
_CODED = 16  # of a slab of codes that become floats, for each


@dataclass(frozen=True, slots=True)
class Needs:
    """What an executor takes: `fixed_bytes`, and one page more than it gives away, for rows that fill a bucket.

    step_bytes: what the largest step computes; graphs_bytes: of decode steps in buckets, inputs and all
    least_pages: of one sequence of the whole context
    """

    weights_bytes: int
    step_bytes: int
    graphs_bytes: int
    page_bytes: int
    least_pages: int

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.step_bytes + self.graphs_bytes + RESERVE

    def total_bytes(self, n_pages: int) -> int:
        return self.fixed_bytes + (n_pages + 1) * self.page_bytes

    def pages_in(self, free_bytes: float) -> int:
        """How many fit into a share of so much free memory; less than 0 where not even the rest does."""
        return int(SHARE * free_bytes - self.fixed_bytes) // max(self.page_bytes, 1) - 1

    def fits_in(self, free_bytes: float) -> bool:
        """With one sequence of the whole context."""
        return self.pages_in(free_bytes) >= self.least_pages


@dataclass(frozen=True, slots=True)
class DevicePlan:
    needs: Needs
    n_pages: int

    @property
    def total_bytes(self) -> int:
        return self.needs.total_bytes(self.n_pages)


def needs_of(
    graph: Graph, limits: ExecutorLimits, *, dtype: str, kv: KvFormat | None = None, buckets: Sequence[int] = (),
    multiprocessors: int = 1,
) -> Needs:  # fmt: skip
    """As of CudaExecutor. limits: but for how many pages there are"""
    element, vocab = ELEMENTS[dtype], limits.vocab_size
    most_pages = -(-limits.max_context // limits.page_tokens)
    largest = {"T": limits.max_step_tokens, "S": limits.max_sequences, "R": limits.max_rows}
    step = max(_computed(graph, largest, element, multiprocessors), DRAWN * limits.max_rows * vocab)
    captured = [
        max(_computed(graph, dict.fromkeys("TSR", n), element, multiprocessors), CAPTURED * n * vocab) for n in buckets
    ]
    inputs = sum(bucket_bytes(graph, n, most_pages, multiprocessors) for n in buckets)
    return Needs(
        weights_bytes=Placement.of(graph).bytes(element), step_bytes=step,
        graphs_bytes=inputs + sum(4 * n * vocab for n in buckets) + max(captured, default=0),
        page_bytes=page_bytes(graph, limits.page_tokens, element, kv), least_pages=most_pages,
    )  # fmt: skip


def page_bytes(graph: Graph, page_tokens: int, element: int, kv: KvFormat | None) -> int:
    """Of one page of all layers: keys and values, and where they are codes a float32 scale for each."""
    layers = {whole(n, "layer"): n for n in graph.nodes if n.op in ATTENTION}
    heads = [(size(n.inputs[1], 1), size(n.inputs[1], 2) + size(n.inputs[2], 2)) for n in layers.values()]
    return sum(n * page_tokens * (width * element if kv is None else width + 8) for n, width in heads)


def kinds_of(graph: Graph) -> tuple[Kind, ...]:
    """Of attention: query heads for each KV head, and KV heads."""
    heads = {(size(n.inputs[0], 1), size(n.inputs[1], 1)) for n in graph.nodes if n.op in ATTENTION}
    return tuple(sorted((queries // kv_heads, kv_heads) for queries, kv_heads in heads))


def head_bytes(graph: Graph, element: int) -> int:
    """Of a head's keys or values as they are computed, the widest there are."""
    return max((size(x, 2) * element for n in graph.nodes if n.op in ATTENTION for x in n.inputs[1:3]), default=0)


def bucket_bytes(graph: Graph, sequences: int, most_pages: int, multiprocessors: int) -> int:
    """Of a bucket's inputs: tokens, positions, slots, rows and what they ask for, pages, attention's work."""
    _, n = aligned(bucket_parts(sequences, most_pages, kinds_of(graph), multiprocessors))
    return 8 * len(SAMPLING.names or ()) * sequences + 4 * (n + sequences + 1)


def read_last(graph: Graph) -> list[tuple[Value, ...]]:
    """For each node, what nobody reads after it: inputs of the graph, and what nodes gave that is no output of it."""
    last = {v: i for i, node in enumerate(graph.nodes) for v in (*node.outputs, *node.inputs) if not v.constant}
    found: list[list[Value]] = [[] for _ in graph.nodes]
    for value, at in last.items():
        if value not in graph.results:
            found[at].append(value)
    return [tuple(values) for values in found]


def _computed(graph: Graph, sizes: Mapping[str, int], element: int, multiprocessors: int) -> int:
    """The most bytes at a time of what nodes compute. sizes: of the dimensions that only a run knows"""
    behind = read_last(graph)
    owner: dict[Value, Value] = {}  # of a view, whose memory it is
    readers: dict[Value, int] = {}  # names under which that is still to be read
    held: dict[Value, int] = {}
    kinds = {p.value: 4 for p in graph.inputs}
    now = most = 0
    for node, gone in zip(graph.nodes, behind, strict=True):
        for value in node.outputs:
            kinds[value] = _element(node, kinds, element)
            viewed = node.op in ("reshape", "split")
            owner[value] = owner.get(node.inputs[0], node.inputs[0]) if viewed else value
            readers[owner[value]] = readers.get(owner[value], 0) + 1
            if not viewed:
                held[value] = _rows(value, sizes) * value.width * kinds[value]
                now += held[value]
        most = max(most, now + _meanwhile(node, sizes, element, multiprocessors))
        for value in gone:
            if value in owner:
                readers[owner[value]] -= 1
                if not readers[owner[value]]:
                    now -= held.get(owner[value], 0)
    return most


def _rows(value: Value, sizes: Mapping[str, int]) -> int:
    first = value.shape[0]
    return sizes[first.name] if isinstance(first, Symbol) else first


def _element(node: Node, kinds: Mapping[Value, int], element: int) -> int:
    """Bytes of an element of what it gives, at most."""
    if node.op in WIDE or (node.op == "linear" and node.attrs.get("residual")):
        return 4
    if node.op in ("gather_rows", "reshape", "split"):
        return kinds[node.inputs[0]]
    if node.op == "convert":
        return 2 if storage_of(node).format == RowFormat.BF16 else 3  # a float32 scale for 4 codes, or more
    return element


def _meanwhile(node: Node, sizes: Mapping[str, int], element: int, multiprocessors: int) -> int:
    """What a node takes beside what it gives."""
    if node.op in ("reshape", "split"):
        return 0
    found = sum(_WORKED * _rows(v, sizes) * v.width for v in (*node.inputs, *node.outputs) if not v.constant)
    if node.op == "gated_linear":  # both halves, and their product in float32
        found += (2 * element + _WORKED) * _rows(node.output, sizes) * node.output.width
    if node.op in PRODUCTS and precision_of(node).coded:
        found += max(_CODED * min(elements(w), max(SLAB, size(w, 1))) for w in matrices_of(node))
    if node.op in ATTENTION:  # what the parts of blocks sum
        kv_heads = size(node.inputs[1], 1)
        parts = {
            rows: bounds(_rows(node.inputs[0], sizes), room(rows, kv_heads, multiprocessors))[2] for rows in PROGRAMS
        }
        found += 4 * max(rows * n for rows, n in parts.items()) * kv_heads * (size(node.inputs[2], 2) + 2)
    return found


def check_fits(needs: Needs, free_bytes: float, smaller: Iterable[tuple[str, Needs]] = ()) -> None:
    """Of a network that keeps nothing between its runs. raises MachineError, naming what would fit, of `smaller`"""
    if not needs.fits_in(free_bytes):
        fits = [words for words, other in smaller if other.fits_in(free_bytes)]
        raise MachineError(
            f"this takes {mib(needs.fixed_bytes)} of the GPU: weights {mib(needs.weights_bytes)}, "
            f"steps {mib(needs.step_bytes)}, libraries {mib(RESERVE)}; {mib(SHARE * free_bytes)} may be used",
            f"at most {SHARE:.0%} of the {mib(free_bytes)} that are free",
            f"what would fit: {'; or '.join(fits)}" if fits else "free memory of the GPU, or take a larger one",
        )  # fmt: skip


def plan_device(
    needs: Needs, free_bytes: float, most_pages: int, *, kv_memory: int | None = None,
    smaller: Iterable[tuple[str, Needs]] = (),
) -> DevicePlan:  # fmt: skip
    """Pages for `kv_memory` bytes; unasked, `most_pages`, or as many as fit.

    smaller: what else could be asked for, in words, and what it takes: read only where this does not fit
    raises MachineError where one sequence of the whole context would not fit, naming what would
    """
    fits = needs.pages_in(free_bytes)
    n_pages = min(fits, most_pages) if kv_memory is None else kv_memory // max(needs.page_bytes, 1)
    if needs.least_pages <= n_pages <= fits:
        return DevicePlan(needs, n_pages)
    raise _too_little(needs, free_bytes, kv_memory, fits, smaller)


def _too_little(
    needs: Needs, free_bytes: float, kv_memory: int | None, fits: int, smaller: Iterable[tuple[str, Needs]]
) -> MachineError:
    kept = needs.least_pages * needs.page_bytes
    if kv_memory is not None and kv_memory < kept <= max(fits, 0) * needs.page_bytes:
        return MachineError(
            f"--kv-memory {mib(kv_memory)} is less than one sequence takes", f"{mib(kept)} for the whole context",
            "raise it, or lower --max-context",
        )  # fmt: skip
    asked = kept if kv_memory is None else kv_memory
    found = []
    if kv_memory is not None and fits >= needs.least_pages:
        found.append(f"--kv-memory {fits * needs.page_bytes >> 20}M")
    elif fits > 0:
        found.append(f"--max-context {fits * PAGE_TOKENS}")
    found += [words for words, other in smaller if other.fits_in(free_bytes)]
    return MachineError(
        f"this takes {mib(needs.total_bytes(0) + asked)} of the GPU: weights {mib(needs.weights_bytes)}, "
        f"steps {mib(needs.step_bytes + needs.graphs_bytes)}, KV pages {mib(asked)}, libraries {mib(RESERVE)}; "
        f"{mib(SHARE * free_bytes)} may be used",
        f"at most {SHARE:.0%} of the {mib(free_bytes)} that are free",
        f"what would fit: {'; or '.join(found)}" if found else "free memory of the GPU, or take a larger one",
    )  # fmt: skip
