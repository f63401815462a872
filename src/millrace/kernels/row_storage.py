"""How a value's rows lie in memory: an attribute of the node that writes it, which passes set and models never do."""

from dataclasses import dataclass

from millrace.graph.types import Node
from millrace.kernels.declare import RowFormat


@dataclass(frozen=True, slots=True)
class Storage:
    """One row, in a format and, where that has groups, in groups of so many elements."""

    format: RowFormat
    group: int = 0

    @property
    def hadamard(self) -> bool:
        """Whether groups are transformed before they are rounded, as are the weights that they meet."""
        return self.format == RowFormat.HADAMARD_Q8

    @property
    def hadamard_group(self) -> int:
        """Elements of the groups that are transformed; 0: none are."""
        return self.group if self.hadamard else 0

    def __repr__(self) -> str:
        name = self.format.name.lower()
        return f"{name}g{self.group}" if self.group else name


DENSE = Storage(RowFormat.F32)


def storage_of(node: Node) -> Storage:
    """Of its outputs: dense floats unless the node packs them."""
    storage = node.attrs.get("storage", DENSE)
    assert isinstance(storage, Storage)
    return storage
