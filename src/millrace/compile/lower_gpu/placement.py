"""Choose the form in which a device holds each constant of a graph."""

from millrace.engine.cuda.lowered import Placement
from millrace.graph.types import Graph
from millrace.kernels.matmul.op import PRODUCTS, matrices_of, precision_of


def placement_of(graph: Graph) -> Placement:
    """Return the placement: codes for quantized matmuls; their tables and biases in the engine's type."""
    producers = graph.producers()
    coded = {n: producers.get(n.inputs[0]) for n in graph.nodes if n.op in PRODUCTS and precision_of(n).coded}
    narrow = {w for n in graph.nodes if n.op in PRODUCTS and n not in coded for w in matrices_of(n)}
    narrow |= {n.inputs[1] for n in graph.nodes if n.op == "embedding"}
    narrow |= {n.inputs[2] for n in graph.nodes if n.op == "linear" and n.attrs.get("bias")}
    alone = {w for n in coded for w in matrices_of(n)} - narrow  # read as codes only
    shared = [value for value in graph.constants() if value not in alone]
    return Placement(coded, tuple(v for v in shared if v in narrow), tuple(v for v in shared if v not in narrow))
