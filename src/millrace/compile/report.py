"""Graph and program as plain tables: what the engine folder keeps for people, and what `millrace inspect` shows."""

from collections.abc import Mapping
from typing import Any

from millrace.engine.program import Place, Program
from millrace.graph.types import Graph, Value
from millrace.kernels.declare import Space


def program_table(program: Program) -> dict[str, Any]:
    """JSON-able: steps with their origins, weights with their formats, the memory plan with its lower bound."""
    return {
        "passes": list(program.passes),
        "steps": [
            {
                "kernel": step.kernel,
                "note": step.note,
                "origin": list(step.origin),
                "operands": {name: _place(p, program) for name, p in step.operands.items() if p},
                "params": {k: v for k, v in step.params.items() if not isinstance(v, list)},
            }
            for step in program.steps
        ],
        "weights": [
            {
                "name": w.name,
                "origin": list(w.origin),
                "shape": list(w.shape),
                "format": w.format,
                "bytes": w.nbytes,
                "offset": o,
            }
            for w, o in zip(program.weights, program.weights_offsets, strict=True)
        ],
        "buffers": [
            {"name": n, "bytes": b, "offset": o}
            for n, b, o in zip(program.buffer_names, program.buffer_bytes, program.buffer_offsets, strict=True)
        ],
        "activation_bytes": program.activation_bytes,
        "activation_lower_bound": program.activation_lower_bound,
    }


def _place(place: Place, program: Program) -> dict[str, Any]:
    if place.space == Space.WEIGHTS:
        return {"weight": program.weights[place.number].name, "bytes": program.weights[place.number].nbytes}
    return {"buffer": place.number, "offset": place.offset}


def graph_table(graph: Graph) -> dict[str, Any]:
    """The graph with values numbered; constants by the names that they have in the checkpoint."""
    numbers: dict[Value, int] = {graph.tokens: 0}

    def ref(value: Value) -> int | str:
        return "+".join(value.constant.origin) if value.constant else numbers[value]

    nodes = []
    for node in graph.nodes:
        numbers[node.output] = len(numbers)
        nodes.append(
            {
                "op": node.op,
                "inputs": [ref(v) for v in node.inputs],
                "output": numbers[node.output],
                "shape": [str(d) for d in node.output.shape],
                "attrs": _plain(node.attrs),
                "origin": list(node.origin),
            }
        )
    return {"tokens": 0, "nodes": nodes, "result": ref(graph.output)}


def _plain(attrs: Mapping[str, object]) -> dict[str, Any]:
    return {k: [str(d) for d in v] if k == "shape" and isinstance(v, tuple) else v for k, v in attrs.items()}
