"""Tables of whole texts for attention on a device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TextTables:
    """Tables of T tokens of S texts, packed; i32 on the device.

    starts (S + 1,) | blocks (n, 2), one per program: a text, and the first of its rows (tokens x query heads of a KV
    head) | block_rows: rows per program
    """

    starts: Tensor
    blocks: Tensor
    block_rows: int
