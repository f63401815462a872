"""Keys and values in pages on a device, and where a step's tokens are in them: what attention takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Keys (P, K, page tokens, D) and values (P, K, page tokens, DV): what a kernel's program reads lies together."""

    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        """Of a page."""
        return int(self.keys.shape[2])


@dataclass(frozen=True, slots=True)
class StepTables:
    """All i32 on the device; T tokens, S sequences.

    positions, slots (T,): a slot is a page's number times its tokens, and the place in it
    starts, table_starts (S + 1,) | tables: the sequences' pages, one after the other
    blocks (n, 2): a sequence, and the first of the rows (tokens x query heads of a KV head) that a program takes
    block_rows: how many it takes | splits: of each program's pages, a power of two
    """

    positions: Tensor
    slots: Tensor
    starts: Tensor
    tables: Tensor
    table_starts: Tensor
    blocks: Tensor
    block_rows: int
    splits: int
