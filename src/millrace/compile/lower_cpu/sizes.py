"""The sizes of a program: its symbols, then every derived dimension that its calls use, each with its bound."""

from collections.abc import Mapping

from millrace.compile.lower_cpu.program import Bounds
from millrace.engine.io_slots import Size
from millrace.errors import ConfigError
from millrace.graph.dims import Dim, NotWholeError, Symbol, operands, range_of, symbols_of, value_of
from millrace.graph.types import Graph, Value
from millrace.kernels.declare import MAX_SIZES

MAX_SIZE = 2**31 - 1  # of any size of a run


class SizeTable:
    """Numbers the dimensions in order of use; a dimension follows its operands."""

    def __init__(self, bounds: Mapping[Symbol, Bounds]) -> None:
        self._ranges = {symbol: (b.low, b.high) for symbol, b in bounds.items()}
        self._numbers: dict[Dim, int] = {symbol: i for i, symbol in enumerate(bounds)}
        self._derived: list[Size] = []

    def number(self, dim: Dim) -> int:
        """Return a dimension's number. raises ConfigError if it may become too large"""
        if dim not in self._numbers:
            for part in operands(dim):
                self.number(part)
            if len(self._derived) == MAX_SIZES:
                raise ConfigError(
                    f"the network has more than {MAX_SIZES} distinct dimensions", "fewer distinct dimensions",
                    "split the network",
                )  # fmt: skip
            self._derived.append(Size(dim, self.upper_bound(dim)))
            self._numbers[dim] = len(self._numbers)
        return self._numbers[dim]

    def upper_bound(self, dim: Dim) -> int:
        """Return the largest value of a dimension. raises ConfigError"""
        _, most = range_of(dim, self._ranges)
        if most > MAX_SIZE:
            raise ConfigError(
                f"a value has up to {dim} = {most:,} elements",
                f"at most {MAX_SIZE:,}",
                "lower the bounds of its symbols",
            )
        return most

    @property
    def derived(self) -> tuple[Size, ...]:
        """The derived dimensions in the order of their numbers."""
        return tuple(self._derived)


def check_dims(graph: Graph, bounds: Mapping[Symbol, Bounds]) -> None:
    """Check that each dimension is a positive integer at the bounds of the symbols. raises ConfigError"""
    dims = {d for v in _values(graph) for d in v.shape if not isinstance(d, int | Symbol)}
    for dim in sorted(dims, key=repr):
        for name in ("low", "usual", "high"):
            sizes: dict[Symbol, int] = {s: getattr(b, name) for s, b in bounds.items()}
            at = ", ".join(f"{s} = {sizes[s]}" for s in dict.fromkeys(symbols_of(dim)))
            try:
                result = value_of(dim, sizes)
            except NotWholeError:
                raise ConfigError(
                    f"the dimension {dim} is not an integer for {at}",
                    "bounds for which it is an integer",
                    f"change the {name} bounds in the profile",
                ) from None
            if result < 1:
                raise ConfigError(
                    f"the dimension {dim} is {result} where {at}",
                    "1 at least",
                    f"raise the {name} bounds in the profile",
                )


def _values(graph: Graph) -> list[Value]:
    return [*(p.value for p in graph.inputs), *(v for node in graph.nodes for v in node.outputs)]
