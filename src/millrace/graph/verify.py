"""The definition of a legal graph, checked after tracing and after every pass."""

import re
from collections import Counter

from millrace.errors import GraphError
from millrace.graph.dims import parse_dim, symbols_of
from millrace.graph.types import Graph, Node, Port, Symbol, Value

_NAME = re.compile(r"\w+(\.\w+)*")


def verify(graph: Graph, after: str) -> Graph:
    """Return the graph, or raise GraphError naming the pass and the node."""
    for ports, kind in ((graph.inputs, "inputs"), (graph.outputs, "outputs")):
        _check_names(ports, kind, after)
    symbols = {d for port in graph.inputs for d in port.value.shape if isinstance(d, Symbol)}
    _check_symbols(graph, symbols, after)
    defined: set[Value] = {p.value for p in graph.inputs}
    for node in graph.nodes:
        for value in node.inputs:
            if value not in defined and not value.constant:
                raise _error(after, node, "it reads a value that nothing before it computes")
        if defined.intersection(node.outputs):
            raise _error(after, node, "its output is assigned twice")
        _check_node(node, after)
        for free in (s for v in node.outputs for d in v.shape for s in symbols_of(d) if s not in symbols):
            raise _free(after, node, free, graph)
        defined.update(node.outputs)
    for port in graph.outputs:
        if port.value not in defined and not port.value.constant:
            raise GraphError(
                f"after {after}: the output {port.name} is computed by no node",
                "an output", "return a tensor from forward()",
            )  # fmt: skip
    return graph


def _check_names(ports: tuple[Port, ...], kind: str, after: str) -> None:
    for name, count in Counter(p.name for p in ports).items():
        if count > 1 or not _NAME.fullmatch(name):
            raise GraphError(
                f"after {after}: {count} {kind} of the name {name!r:.80}" if count > 1 else
                f"after {after}: {kind} with the name {name!r:.80}",
                "names in letters, digits, _ and dots, each once", f"rename the model's {kind}",
            )  # fmt: skip
    if not ports:
        raise GraphError(f"after {after}: a graph without {kind}", "at least one", f"name the model's {kind}")


def _check_symbols(graph: Graph, bare: set[Symbol], after: str) -> None:
    """Check that each symbol has a readable name, and is a dimension of an input, which determines it in a run."""
    for symbol in graph.symbols:
        if symbol in bare and parse_dim(symbol.name) == symbol:
            continue
        raise GraphError(
            f"after {after}: no input has the dimension {symbol.name:.60} by itself", "each symbol as a dimension",
            f'name it so in the shape of an input, as in Signature({{"x": ("{symbol.name:.60}", 64)}}, ...)',
        )  # fmt: skip


def _check_node(node: Node, after: str) -> None:
    op = node.operator
    if not op.inputs[0] <= len(node.inputs) <= op.inputs[1]:
        raise _error(after, node, f"{len(node.inputs)} inputs, expected {op.inputs[0]} to {op.inputs[1]}")
    unknown = set(node.attrs) - op.attrs
    if unknown:
        raise _error(after, node, f"unknown attributes {sorted(unknown)}")
    results = op.results(node.inputs, node.attrs)
    if [(v.shape, v.dtype) for v in results] != [(v.shape, v.dtype) for v in node.outputs]:
        alike = [v.dtype for v in results] == [v.dtype for v in node.outputs]
        described = ", ".join(str(list(v.shape) if alike else v) for v in results)
        raise _error(
            after, node, f"it is said to give {', '.join(map(str, node.outputs))}, the operator gives {described}"
        )


def _free(after: str, node: Node, free: Symbol, graph: Graph) -> GraphError:
    """Return the error for a symbol that no input determines."""
    inputs = ", ".join(f"{p.name} {list(p.value.shape)}" for p in graph.inputs)
    return GraphError(
        f"after {after}: {node.op} of {_place(node)}: its output has a dimension {free} that no input has",
        f"dimensions of the inputs, which are {inputs}",
        f'use one of theirs, or name {free} in the shape of an input, as in Signature({{"x": ("{free}", 64)}}, ...)',
    )  # fmt: skip


def _place(node: Node) -> str:
    return "/".join(node.origin) or "?"


def _error(after: str, node: Node, what: str) -> GraphError:
    return GraphError(
        f"after {after}: {node.op} of {_place(node)}: {what}",
        f"a node as {node.op} takes it",
        "report this, or fix the pass",
    )
