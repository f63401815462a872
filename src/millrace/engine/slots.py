"""What goes into a program and comes out of it, by name: shapes, types and where the bytes lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.graph.types import DType, Shape, Symbol


@dataclass(frozen=True, slots=True)
class Slot:
    """A named input or output of a program: dense rows, `offset` bytes into the activations; None: it is not read."""

    name: str
    shape: Shape
    dtype: DType
    offset: int | None

    def sized(self, sizes: Mapping[Symbol, int]) -> list[int]:
        """Its shape in a run where the symbols are so large."""
        return [sizes[d] if isinstance(d, Symbol) else d for d in self.shape]


def slot(slots: Sequence[Slot], name: str) -> Slot | None:
    return next((s for s in slots if s.name == name), None)
