"""Paged keys and values on a device, and the tables of a step that attention reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.kernels.matmul.coded import E4M3


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Keys (P, K, page tokens, D) and values (P, K, page tokens, DV) of a layer: a page of a head is contiguous.

    key_scales, value_scales: (P, K, page tokens) float32 if the pages are int8 or E4M3; otherwise empty
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> "LayerPages":
        """Allocate pages. shape: (P, K, page tokens); sizes: D, DV; dtype: floats, int8 or E4M3"""
        keys, values = (torch.zeros((*shape, size), dtype=dtype, device=device) for size in sizes)
        of_scales = shape if keys.itemsize == 1 else (0, 0, 0)
        return cls(keys, values, *(torch.zeros(of_scales, device=device) for _ in range(2)))

    @property
    def tokens(self) -> int:
        """Tokens per page."""
        return int(self.keys.shape[2])

    @property
    def coded(self) -> bool:
        return bool(self.keys.itemsize == 1)

    @property
    def transformed(self) -> bool:
        """Whether keys and queries are multiplied by a Hadamard matrix first, as for E4M3 (attention/ref.py)."""
        return bool(self.keys.dtype == E4M3)

    def floats(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of these pages, each (n, K, page tokens, size); float32 if they are quantized."""
        if not self.coded:
            return self.keys[pages], self.values[pages]
        caches = (self.keys, self.key_scales), (self.values, self.value_scales)
        codes = (x.view(torch.int8)[pages].view(x.dtype) for x, _ in caches)  # some PyTorch versions cannot index E4M3
        keys, values = (x.float() * scales[pages][..., None] for x, (_, scales) in zip(codes, caches, strict=True))
        return keys, values

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of a page to another."""
        for x in (self.keys, self.values, *((self.key_scales, self.value_scales) if self.coded else ())):
            x[target] = x[source]


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Programs of attention over blocks of `rows` rows (tokens of a sequence x query heads of a KV head); i32 on the
    device.

    items (n, 8), one for each program of a KV head: offset of the sequence's page 0 in `tables`, first page to attend
    to and the one after the last, index of the part of the block's pages (-1: there is only one), the sequence's first
    token in the step, its number of tokens, the first one's position, the block's first row. An item without pages, and
    all else 0, is padding.
    merges (m, 5), one for each block with several parts: the first of these, their number (0: padding), the sequence's
    first token, its number of tokens, the block's first row
    max_rows: the most rows of any block | parts: most parts, over all blocks with several
    max_parts: the most parts of one block, a power of two
    """

    items: Tensor
    merges: Tensor
    rows: int
    max_rows: int
    parts: int
    max_parts: int


@dataclass(frozen=True, slots=True)
class StepTables:
    """The tables of a step, i32 on the device; T tokens, S sequences.

    positions, slots (T,): a slot is the page's number times its tokens, plus the place in it
    rotary (T,): positions for the rotary embedding
    starts, table_starts (S + 1,), first (S,), number of each sequence's first page: for plain PyTorch only
    tables: the sequences' pages, concatenated; those before a window may be released
    work: for the kernels; each token is in one of the items
    """

    positions: Tensor
    rotary: Tensor
    slots: Tensor
    starts: Tensor
    tables: Tensor
    table_starts: Tensor
    first: Tensor
    work: tuple[AttentionWork, ...]
