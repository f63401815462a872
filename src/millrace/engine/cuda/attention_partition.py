"""Partition of attention in a step, so that all multiprocessors of a GPU have work, whatever the context lengths.

The rows of a KV head (tokens of a sequence x query heads that share it) are grouped into blocks, one program each. If
there are few blocks, their pages are split into parts, of a length that gives every multiprocessor its PROGRAMS: a long
context has many parts, a short one a single part. Longer parts start first, so that short ones fill the end.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import IntArray, StepInputs

FEW_ROWS, SOME_ROWS, MANY_ROWS = 16, 64, 128  # of a block: a tensor core's least; of prompts, before Hopper and on it
FLOAT_ROWS = 32  # of prompts in float32, which sums in registers: 64 rows of heads of 128 spill 1,528 bytes
WIDEST = 256  # bytes of a head's keys or values, in the engine's type, up to which a block may have MANY_ROWS
# programs per multiprocessor: an H200's holds three with few rows
PROGRAMS = {FEW_ROWS: 3, FLOAT_ROWS: 2, SOME_ROWS: 2, MANY_ROWS: 2}
MAX_PARTS = 64  # per block
ITEM, MERGE = 8, 5  # numbers per program of each kind; kernels/attention/paged.py::Work lists them
ALIGNED = 4  # in int32: Triton compiles another kernel for data that is not aligned to 16 bytes

Integers = NDArray[np.integer[Any]]


class AttentionKind(NamedTuple):
    """A kind of attention. group: query heads per KV head; window: tokens it attends to; 0: all"""

    group: int
    kv_heads: int
    window: int = 0


class SmGeometry(NamedTuple):
    """Multiprocessors and block sizes of a device. many_rows: of a prompt's block"""

    number: int = 1
    many_rows: int = SOME_ROWS

    @classmethod
    def from_device(cls, number: int, capability: tuple[int, int], head_bytes: int, element: int = 2) -> "SmGeometry":
        """Return a device's geometry. element: bytes of a float

        Before Hopper, and with wide heads anywhere, blocks of 128 rows spill their sums.
        """
        if element > 2:
            return cls(number, FLOAT_ROWS)
        return cls(number, MANY_ROWS if capability >= (9, 0) and head_bytes <= WIDEST else SOME_ROWS)


class Sequences(NamedTuple):
    """Sequences of a step, each field (S,): first token in the step, number of tokens, position of the first token,
    offset of page 0 in a table.

    That offset may be outside the sequence's own part, because a table may omit the pages before a window.
    """

    begins: Integers
    lengths: Integers
    at: Integers
    tables: Integers

    @classmethod
    def from_step(cls, step: StepInputs, tables: Integers) -> "Sequences":
        begins = step.starts[:-1]
        at = step.positions[np.minimum(begins, len(step.positions) - 1)]
        return cls(begins, np.diff(step.starts), at, tables)

    def select(self, indices: Integers) -> "Sequences":
        return Sequences(*(x[indices] for x in self))


class SplitPlan(NamedTuple):
    """Programs of a step. items (n, ITEM), merges (m, MERGE): see Work | parts: of blocks with several, in all"""

    items: IntArray
    merges: IntArray
    parts: int


def split_attention(
    sequences: Sequences, rows: int, group: int, page_tokens: int, room: int, window: int = 0
) -> SplitPlan:
    """Split attention into programs. rows: of a block; room: for how many parts per KV head there are programs

    window: as in AttentionKind: pages before the window of a block's first row are skipped
    """
    owner, first = blocks(sequences.lengths * group, rows)
    begins, lengths, at, tables = sequences.select(owner)
    pages = (at + np.minimum((first + rows - 1) // group, lengths - 1)) // page_tokens + 1
    gone = first_page(at + first // group, window, page_tokens)
    pages = pages - gone
    each = max(1, -(-int(pages.sum()) // room), -(-int(pages.max(initial=0)) // MAX_PARTS))
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
    """Return the number of the first page that a token at each position attends to."""
    return np.maximum(positions - window + 1, 0) // page_tokens if window else np.zeros_like(positions)


def window_pages(window: int, page_tokens: int, max_pages: int) -> int:
    """Return how many pages one token attends to at most. max_pages: of a sequence"""
    return min((window + page_tokens - 2) // page_tokens + 1, max_pages)


def windows_in(kinds: Iterable[AttentionKind]) -> tuple[int, ...]:
    """Return the windows, each once, ascending."""
    return tuple(sorted({kind.window for kind in kinds} - {0}))


def blocks(lengths: Integers, rows: int) -> tuple[Integers, Integers]:
    """Split `lengths` rows of each sequence into blocks. Return the sequence and the first row of each block."""
    counts = -(-lengths // rows)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows


def room(rows: int, kv_heads: int, processors: int) -> int:
    return max(1, PROGRAMS[rows] * processors // kv_heads)


def bounds(n_blocks: int, room: int) -> tuple[int, int, int]:
    """Return the most items, merges and parts of a split.

    A part, except the last one of a block, has at least a `room`-th of all pages, so there are at most `room` parts
    besides one for each block. Each of several parts has more than half of the intended length.
    """
    return n_blocks + room, min(n_blocks, room), min(n_blocks * MAX_PARTS, 2 * room)


def rows_for(limit: int) -> int:
    """Return the rows of a block for sequences of at most `limit` rows, such as the query heads of a KV head."""
    return FEW_ROWS if limit <= FEW_ROWS else SOME_ROWS


def bucket_parts(
    sequences: int, max_pages: int, kinds: Sequence[AttentionKind], processors: int, page_tokens: int
) -> tuple[int, ...]:
    """Return the lengths of a bucket's inputs.

    They are: tokens, positions, rotary positions, adapters, slots, rows, state slots before and after, table offsets;
    items and merges of each kind of attention; slots, first pages and tables of each window; last the tables of
    full-attention layers, if there are any.
    """
    result = [sequences] * 8 + [sequences + 1]
    for group, kv_heads, _ in kinds:
        rows = rows_for(group)
        items, merges, _ = bounds(sequences * -(-group // rows), room(rows, kv_heads, processors))
        result += [ITEM * items, MERGE * merges]
    for window in windows_in(kinds):
        result += [sequences, sequences, sequences * window_pages(window, page_tokens, max_pages)]
    return (*result, sequences * max_pages if any(not kind.window for kind in kinds) else 0)


def aligned(lengths: Collection[int]) -> tuple[list[slice], int]:
    """Return aligned slices for parts of these lengths in one array, and its length."""
    padded = [-(-n // ALIGNED) * ALIGNED for n in lengths]
    begins = np.cumsum([0, *padded])
    return [slice(int(at), int(at) + n) for at, n in zip(begins, lengths, strict=False)], int(begins[-1])


def pack_arrays(parts: Sequence[IntArray]) -> tuple[IntArray, list[slice]]:
    """Pack parts into one int32 array, and return their slices."""
    places, n = aligned([p.size for p in parts])
    packed = np.zeros(n, np.int32)
    for place, part in zip(places, parts, strict=True):
        packed[place] = part.reshape(-1)
    return packed, places
