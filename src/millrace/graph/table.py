"""A graph as a plain table, and back: what an engine keeps of its model, for people and to be lowered again.

{"inputs": [{"name", "shape", "dtype"}], "constants": {name: shape}, "nodes": [{"op", "inputs", "outputs", "shapes",
"attrs", "origin"}], "outputs": [{"name", "value"}]}. Values are numbered, inputs first; constants go by the names that
they have in the checkpoint; a dimension that only a run knows is a word.
"""

from collections.abc import Mapping
from typing import Any

from millrace.errors import GraphError
from millrace.graph.rules import named
from millrace.graph.trees import tuples
from millrace.graph.types import Array, Constant, Dim, DType, Graph, Node, Operators, Port, Shape, Symbol, Value
from millrace.graph.verify import verify

Table = dict[str, Any]


def graph_table(graph: Graph) -> Table:
    """JSON-able."""
    numbers: dict[Value, int] = {port.value: i for i, port in enumerate(graph.inputs)}

    def ref(value: Value) -> int | str:
        return _name(value) if value.constant else numbers[value]

    nodes = []
    for node in graph.nodes:
        for value in node.outputs:
            numbers[value] = len(numbers)
        nodes.append(
            {
                "op": node.op,
                "inputs": [ref(v) for v in node.inputs],
                "outputs": [numbers[v] for v in node.outputs],
                "shapes": [_shape(v.shape) for v in node.outputs],
                "attrs": {k: _shape(v) if k == "shape" else v for k, v in node.attrs.items()},
                "origin": list(node.origin),
            }
        )
    return {
        "inputs": [{"name": p.name, "shape": _shape(p.value.shape), "dtype": p.value.dtype} for p in graph.inputs],
        "constants": {_name(v): _shape(v.shape) for v in graph.constants()},
        "nodes": nodes,
        "outputs": [{"name": p.name, "value": ref(p.value)} for p in graph.outputs],
    }


def _name(value: Value) -> str:
    assert value.constant
    return "+".join(value.constant.origin)


def _shape(shape: object) -> list[int | str]:
    assert isinstance(shape, tuple)
    return [d.name if isinstance(d, Symbol) else d for d in shape]


def read_graph(table: Mapping[str, Any], operators: Operators) -> Graph:
    """The graph again, its constants without their content; verified. `table` is as graph_table() made it."""
    inputs = tuple(Port(p["name"], Value(_dims(p["shape"]), DType(p["dtype"]))) for p in table["inputs"])
    values: dict[int | str, Value] = {i: port.value for i, port in enumerate(inputs)}
    for name, shape in table["constants"].items():
        values[name] = Value(_dims(shape), constant=Constant(_unread, (name,)))
    nodes = []
    for found in table["nodes"]:
        outputs = tuple(Value(_dims(shape)) for shape in found["shapes"])
        attrs = {k: _dims(v) if k == "shape" else tuples(v) for k, v in found["attrs"].items()}
        sources = tuple(values[i] for i in found["inputs"])
        nodes.append(Node(named(operators, found["op"]), sources, outputs, attrs, tuple(found["origin"])))
        values.update(zip(found["outputs"], outputs, strict=True))
    results = tuple(Port(p["name"], values[p["value"]]) for p in table["outputs"])
    return verify(Graph(inputs, results, tuple(nodes)), after="reading")


def _dims(shape: list[int | str]) -> Shape:
    dims: list[Dim] = [Symbol(d) if isinstance(d, str) else d for d in shape]
    return tuple(dims)


def _unread() -> Array:
    raise GraphError("a constant without content is read", "a graph of a checkpoint", "build the engine again")
