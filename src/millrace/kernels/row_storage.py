"""The storage of a value's rows: an attribute of the node that writes it, set by passes and never by models."""

from dataclasses import dataclass

from millrace.graph.types import Node
from millrace.kernels.declare import RowFormat


@dataclass(frozen=True, slots=True)
class Storage:
    """The format of a row and, if it has groups, their size."""

    format: RowFormat
    group: int = 0

    @property
    def hadamard(self) -> bool:
        """Whether groups are transformed before they are rounded, as are the weights."""
        return self.format == RowFormat.HADAMARD_Q8

    @property
    def hadamard_group(self) -> int:
        """Elements of the transformed groups; 0: not transformed."""
        return self.group if self.hadamard else 0

    def __repr__(self) -> str:
        name = self.format.name.lower()
        return f"{name}g{self.group}" if self.group else name


DENSE = Storage(RowFormat.F32)


def storage_of(node: Node) -> Storage:
    """Return the storage of a node's outputs: dense floats unless it packs them."""
    storage = node.attrs.get("storage", DENSE)
    assert isinstance(storage, Storage)
    return storage
