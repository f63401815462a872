"""From the graph to the program: each node becomes the calls that its operator says, values become places."""

from millrace.compile.placement import Placement
from millrace.compile.program import Program
from millrace.errors import GraphError
from millrace.graph.types import Value
from millrace.kernels.operators import runnable
from millrace.kernels.places import View
from millrace.kernels.storage import DENSE


class Lowering(Placement):
    """One use: `Lowering(graph, bounds, ...).program()`."""

    def program(self) -> Program:
        for port in self.graph.inputs:
            if port.value in self._readers or port.value in self._results:
                self.new(port.value, port.name)
        for node in self.graph.nodes:
            runnable(node).lower(node, self)
        return self._planned([self._result(port.name, port.value) for port in self.graph.outputs])

    def _result(self, name: str, value: Value) -> tuple[str, Value, View]:
        """Dense rows that live to the end."""
        if value not in self._views or self._views[value].storage != DENSE:
            raise GraphError(
                f"the output {name} is {value}, which is not computed", "rows of floats that a node computes",
                "return what an operator gives",
            )  # fmt: skip
        view = self._views[value]
        if view.stride != value.width or view.offset:
            view = self._copy(value, self._producers[value])
        self._lives[view.buffer].last = len(self._calls)
        return name, value, view
