"""A graph as a table and back: an engine stores it for inspection and to lower it again.

{"inputs": [{"name", "shape", "dtype"}], "constants": {name: shape}, "nodes": [{"op", "inputs", "outputs", "shapes",
"attrs", "origin"}], "outputs": [{"name", "value"}]}. Values are numbered, inputs first; constants have their names in
the checkpoint; a dimension known at run time is a symbol, or an expression such as "N*H/2".
"constant_types" has the types of constants that are not f32, by name; all other types follow from the operators.
"""

from collections.abc import Mapping
from typing import Any

from millrace.errors import GraphError
from millrace.graph.dims import parse_dim
from millrace.graph.expressions import tuples
from millrace.graph.shape_rules import find_operator
from millrace.graph.types import Array, Constant, DType, Graph, Node, Operators, Port, Shape, Value
from millrace.graph.verify import verify

Table = dict[str, Any]


def graph_table(graph: Graph) -> Table:
    """Return a JSON-able table."""
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
    types = {_name(v): v.dtype for v in graph.constants() if v.dtype != DType.F32}
    return {
        "inputs": [{"name": p.name, "shape": _shape(p.value.shape), "dtype": p.value.dtype} for p in graph.inputs],
        "constants": {_name(v): _shape(v.shape) for v in graph.constants()},
        **({"constant_types": types} if types else {}),
        "nodes": nodes,
        "outputs": [{"name": p.name, "value": ref(p.value)} for p in graph.outputs],
    }


def _name(value: Value) -> str:
    assert value.constant
    return "+".join(value.constant.origin)


def _shape(shape: object) -> list[int | str]:
    assert isinstance(shape, tuple)
    return [d if isinstance(d, int) else repr(d) for d in shape]


def read_graph(table: Mapping[str, Any], operators: Operators) -> Graph:
    """Return the verified graph, its constants without contents. `table`: from graph_table()"""
    inputs = tuple(Port(p["name"], Value(_dims(p["shape"]), DType(p["dtype"]))) for p in table["inputs"])
    values: dict[int | str, Value] = {i: port.value for i, port in enumerate(inputs)}
    for name, shape in table["constants"].items():
        dtype = DType(table.get("constant_types", {}).get(name, DType.F32))
        values[name] = Value(_dims(shape), dtype, Constant(_unread, (name,)))
    nodes = []
    for result in table["nodes"]:
        attrs = {k: _dims(v) if k == "shape" else tuples(v) for k, v in result["attrs"].items()}
        sources, operator = tuple(values[i] for i in result["inputs"]), find_operator(operators, result["op"])
        types = [v.dtype for v in operator.results(sources, attrs)]
        outputs = tuple(Value(_dims(shape), dtype) for shape, dtype in zip(result["shapes"], types, strict=True))
        nodes.append(Node(operator, sources, outputs, attrs, tuple(result["origin"])))
        values.update(zip(result["outputs"], outputs, strict=True))
    results = tuple(Port(p["name"], values[p["value"]]) for p in table["outputs"])
    return verify(Graph(inputs, results, tuple(nodes)), after="reading")


def _dims(shape: list[int | str]) -> Shape:
    return tuple(parse_dim(d) if isinstance(d, str) else d for d in shape)


def _unread() -> Array:
    raise GraphError("a constant without content is read", "a graph of a checkpoint", "build the engine again")
