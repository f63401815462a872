"""Attention's work in a step, cut so that all of a GPU has some of it, whatever the contexts' lengths are.

Rows of a KV head (tokens of a sequence x the query heads that share it) go in blocks, a program each. Where there are
few blocks, their pages go in parts: as many pages to each as leave every multiprocessor its PROGRAMS, so that a long
context has many and a short one is whole. Longer parts begin first, so that short ones fill the end.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import IntArray, StepInputs

FEW_ROWS, SOME_ROWS, MANY_ROWS = 16, 64, 128  # of a block: a tensor core's least; of prompts, before Hopper and on it
FLOAT_ROWS = 32  # of prompts in float32, whose sums are threads' own: 64 rows of heads of 128 spill 1,528 bytes
WIDEST = 256  # bytes of a head's keys or values, in the engine's type, of which a block may have MANY_ROWS
# For each multiprocessor: of few rows an H200's holds three.
PROGRAMS = {FEW_ROWS: 3, FLOAT_ROWS: 2, SOME_ROWS: 2, MANY_ROWS: 2}
MOST_PARTS = 64  # of one block
ITEM, MERGE = 8, 5  # numbers of a program of each kind, as kernels/attention/paged.py::Work has them
ALIGNED = 4  # int32: a kernel is compiled once more for what does not begin at a multiple of 16 bytes

Integers = NDArray[np.integer[Any]]


class AttentionKind(NamedTuple):
    """Of attention. group: query heads for each KV head; window: tokens that it attends to at most; 0: all"""

    group: int
    kv_heads: int
    window: int = 0


class SmGeometry(NamedTuple):
    """Of a device. many_rows: of a prompt's block"""

    number: int = 1
    many_rows: int = SOME_ROWS

    @classmethod
    def of(cls, number: int, capability: tuple[int, int], head_bytes: int, element: int = 2) -> "SmGeometry":
        """Before Hopper 128 rows spill what they sum, and anywhere those of wide heads. element: bytes of floats"""
        if element > 2:
            return cls(number, FLOAT_ROWS)
        return cls(number, MANY_ROWS if capability >= (9, 0) and head_bytes <= WIDEST else SOME_ROWS)


class Sequences(NamedTuple):
    """Each (S,): the first token in the step, how many, the first one's position, where page 0 is in a table.

    That place may lie before the sequence's own: a table need not have the pages before a window.
    """

    begins: Integers
    lengths: Integers
    at: Integers
    tables: Integers

    @classmethod
    def of(cls, step: StepInputs, tables: Integers) -> "Sequences":
        begins = step.starts[:-1]
        at = step.positions[np.minimum(begins, len(step.positions) - 1)]
        return cls(begins, np.diff(step.starts), at, tables)

    def some(self, which: Integers) -> "Sequences":
        return Sequences(*(x[which] for x in self))


class SplitPlan(NamedTuple):
    """items (n, ITEM), merges (m, MERGE): see Work | parts: of blocks that have several, in all"""

    items: IntArray
    merges: IntArray
    parts: int


def split_attention(of: Sequences, rows: int, group: int, page_tokens: int, room: int, window: int = 0) -> SplitPlan:
    """rows: of a block; room: for how many parts of a block's pages all programs of one KV head have work

    window: as Kind's: pages before that of a block's first row are nobody's work
    """
    owner, first = blocks(of.lengths * group, rows)
    begins, lengths, at, tables = of.some(owner)
    pages = (at + np.minimum((first + rows - 1) // group, lengths - 1)) // page_tokens + 1
    gone = first_page(at + first // group, window, page_tokens)
    pages = pages - gone
    each = max(1, -(-int(pages.sum()) // room), -(-int(pages.max(initial=0)) // MOST_PARTS))
    parts = -(-pages // each)
    block, before = np.repeat(np.arange(len(pages)), parts), np.cumsum(parts) - parts
    k = np.arange(len(block)) - before[block]
    here, end = (gone[block] + pages[block] * (k + i) // parts[block] for i in (0, 1))
    shares = parts[block] > 1
    part = np.where(shares, np.cumsum(shares) - 1, -1)
    items = [tables[block], here, end, part, begins[block], lengths[block], at[block], first[block]]
    merged = np.flatnonzero(parts > 1)
    merges = [part[before[merged]], parts[merged], begins[merged], lengths[merged], first[merged]]
    order = np.argsort(here - end, kind="stable")
    return SplitPlan(
        np.stack(items, 1)[order].astype(np.int32), np.stack(merges, 1).astype(np.int32), int(shares.sum())
    )


def first_page(positions: Integers, window: int, page_tokens: int) -> Integers:
    """The number of the first page that a token at each position attends to."""
    return np.maximum(positions - window + 1, 0) // page_tokens if window else np.zeros_like(positions)


def window_pages(window: int, page_tokens: int, most_pages: int) -> int:
    """That one token attends to at most. most_pages: of a sequence"""
    return min((window + page_tokens - 2) // page_tokens + 1, most_pages)


def windows_in(kinds: Iterable[AttentionKind]) -> tuple[int, ...]:
    """Each once, ascending."""
    return tuple(sorted({kind.window for kind in kinds} - {0}))


def blocks(lengths: Integers, rows: int) -> tuple[Integers, Integers]:
    """lengths: rows of each sequence, in blocks of so many: for each block whose it is, and its first row"""
    counts = -(-lengths // rows)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows


def room(rows: int, kv_heads: int, processors: int) -> int:
    return max(1, PROGRAMS[rows] * processors // kv_heads)


def bounds(n_blocks: int, room: int) -> tuple[int, int, int]:
    """Of a cut: how many items, merges and parts there are at most.

    A part but the last of its block has at least a `room`-th of all pages: there are at most so many beside one for
    each block. One of several has more than half of what `cut` means it to have.
    """
    return n_blocks + room, min(n_blocks, room), min(n_blocks * MOST_PARTS, 2 * room)


def rows_for(most: int) -> int:
    """Of blocks of sequences that have at most so many: in a step of one token each, a KV head's query heads."""
    return FEW_ROWS if most <= FEW_ROWS else SOME_ROWS


def bucket_parts(
    sequences: int, most_pages: int, kinds: Sequence[AttentionKind], processors: int, page_tokens: int
) -> tuple[int, ...]:
    """Numbers of each of a bucket's inputs.

    Tokens, positions, rotary positions, adapters, slots, rows, slots of states before and behind, where tables begin;
    of each kind of attention items and merges; of each window slots, first pages and tables; last the tables of layers
    that attend to all, where there are some.
    """
    result = [sequences] * 8 + [sequences + 1]
    for group, kv_heads, _ in kinds:
        rows = rows_for(group)
        items, merges, _ = bounds(sequences * -(-group // rows), room(rows, kv_heads, processors))
        result += [ITEM * items, MERGE * merges]
    for window in windows_in(kinds):
        result += [sequences, sequences, sequences * window_pages(window, page_tokens, most_pages)]
    return (*result, sequences * most_pages if any(not kind.window for kind in kinds) else 0)


def aligned(lengths: Collection[int]) -> tuple[list[slice], int]:
    """Where parts lie in one array so that each begins aligned, and its length."""
    padded = [-(-n // ALIGNED) * ALIGNED for n in lengths]
    begins = np.cumsum([0, *padded])
    return [slice(int(at), int(at) + n) for at, n in zip(begins, lengths, strict=False)], int(begins[-1])


def pack_arrays(parts: Sequence[IntArray]) -> tuple[IntArray, list[slice]]:
    """One int32 array, and where each part lies."""
    places, n = aligned([p.size for p in parts])
    packed = np.zeros(n, np.int32)
    for place, part in zip(places, parts, strict=True):
        packed[place] = part.reshape(-1)
    return packed, places
