"""Which rows of whole texts a program of attention takes, on a device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TextTables:
    """All i32 on the device; T tokens of S texts, one behind the other.

    starts (S + 1,) | blocks (n, 2): a text, and the first of the rows (tokens x query heads of a KV head) that a
    program takes | block_rows: how many it takes
    """

    starts: Tensor
    blocks: Tensor
    block_rows: int
