"""Keys and values in pages on a device, and where a step's tokens are in them: what attention takes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.kernels.matmul.coded import E4M3


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Keys (P, K, page tokens, D) and values (P, K, page tokens, DV): what a kernel's program reads lies together.

    key_scales, value_scales: (P, K, page tokens) float32 where they are int8 or E4M3; else of no elements
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> "LayerPages":
        """shape: (P, K, page tokens); sizes: D, DV; dtype: floats, or int8 or E4M3"""
        keys, values = (torch.zeros((*shape, size), dtype=dtype, device=device) for size in sizes)
        of_scales = shape if keys.itemsize == 1 else (0, 0, 0)
        return cls(keys, values, *(torch.zeros(of_scales, device=device) for _ in range(2)))

    @property
    def tokens(self) -> int:
        """Of a page."""
        return int(self.keys.shape[2])

    @property
    def coded(self) -> bool:
        return bool(self.keys.itemsize == 1)

    @property
    def transformed(self) -> bool:
        """Whether keys and queries are multiplied by a Hadamard matrix first: E4M3's are (attention/ref.py)."""
        return bool(self.keys.dtype == E4M3)

    def floats(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these pages, each (n, K, page tokens, size): float32 where they are coded."""
        if not self.coded:
            return self.keys[pages], self.values[pages]
        caches = (self.keys, self.key_scales), (self.values, self.value_scales)
        codes = (x.view(torch.int8)[pages].view(x.dtype) for x, _ in caches)  # not every PyTorch looks E4M3 up
        keys, values = (x.float() * scales[pages][..., None] for x, (_, scales) in zip(codes, caches, strict=True))
        return keys, values

    def copy(self, source: int, target: int) -> None:
        """What is kept in one page becomes the other's, too."""
        for x in (self.keys, self.values, *((self.key_scales, self.value_scales) if self.coded else ())):
            x[target] = x[source]


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Programs of attention that take `rows` rows (tokens of a sequence x query heads of a KV head); i32 on the device.

    items (n, 8), one for each program of a KV head: where the sequence's page 0 would be in `tables`, the first page
    of it to attend to and that behind the last, which part of a block's pages that is (-1: all of them), the
    sequence's first token in the step, how many it has, the first one's position, the block's first row. Where the
    pages are none, and all else 0, there is nothing to do.
    merges (m, 5), one for each block that has several parts: the first of these, how many (0: nothing to do), the
    sequence's first token, how many it has, the block's first row
    most_rows: that any block has, of its `rows` | parts: of all blocks that have several, at most
    most_parts: of one, a power of two
    """

    items: Tensor
    merges: Tensor
    rows: int
    most_rows: int
    parts: int
    most_parts: int


@dataclass(frozen=True, slots=True)
class StepTables:
    """All i32 on the device; T tokens, S sequences.

    positions, slots (T,): a slot is a page's number times its tokens, and the place in it
    rotary (T,): by which queries and keys are rotated
    starts, table_starts (S + 1,), first (S,), which page of its sequence each one's first is: for plain PyTorch alone
    tables: the sequences' pages, one after the other; those before a window may be gone
    work: for kernels, each token's in one of these
    """

    positions: Tensor
    rotary: Tensor
    slots: Tensor
    starts: Tensor
    tables: Tensor
    table_starts: Tensor
    first: Tensor
    work: tuple[AttentionWork, ...]
