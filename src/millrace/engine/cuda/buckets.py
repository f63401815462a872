"""Decode steps in buckets: of so many sequences, at fixed places, that a device replays what it captured once.

A step of S sequences, one token each, goes into the least bucket that has room. Rows that only fill it hold token 0 at
position 0 of a page that no sequence has: they write and read there, and nobody reads what they give.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.cuda.sampling import FIELDS, Rows, as_lines
from millrace.engine.cuda.transfer import pinned
from millrace.engine.cuda.work import (
    ITEM,
    MERGE,
    MOST_PARTS,
    Kind,
    Sequences,
    aligned,
    bounds,
    bucket_parts,
    cut,
    room,
    rows_for,
)  # fmt: skip
from millrace.engine.executor import IntArray, StepInputs
from millrace.kernels.attention.paged import StepTables, Work

Tables = Callable[[int, int], StepTables]  # of query heads for each KV head, and of KV heads
_CAPTURE = threading.Lock()  # of a process, one at a time: each begins by waiting for its device, which no other bears


def usual_buckets(most: int) -> tuple[int, ...]:
    """Up to `most` sequences: powers of two to 8, then in steps of 8, from 64 on in quarters of a power of two."""
    found = [1, 2, 4, 8]
    while found[-1] < most:
        found.append(found[-1] + max(8, 1 << (found[-1].bit_length() - 3)))
    return (*found[: bisect_left(found, most)], most)


def bucket_of(step: StepInputs, buckets: Sequence[int]) -> int | None:
    """The least that has room for a step of one token a sequence, and rows, but no more than these; None: none has."""
    n = len(step.tokens)
    at, fits = bisect_left(buckets, n), len(step.starts) == n + 1 and 0 < len(step.sampling) <= n
    return buckets[at] if fits and at < len(buckets) else None


@dataclass(slots=True)
class Bucket:
    """Inputs of a decode step of `size` sequences, on the device, where they stay; written by two copies from the host.

    scratch: the page of rows that fill it | most_pages: of one sequence | multiprocessors: of the device
    kinds: of attention that there are
    """

    size: int
    scratch: int
    most_pages: int
    page_tokens: int
    device: torch.device
    multiprocessors: int
    kinds: tuple[Kind, ...]
    _places: list[slice] = field(init=False)
    _host: IntArray = field(init=False)
    _host_parts: list[IntArray] = field(init=False)
    _held: Tensor = field(init=False)
    _starts: Tensor = field(init=False)
    rows: Rows = field(init=False)
    _lines: Tensor = field(init=False)
    _host_lines: NDArray[np.float64] = field(init=False)
    _tables: dict[tuple[int, int], StepTables] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._host_lines = np.zeros((len(FIELDS), self.size))
        self._lines = torch.zeros(self._host_lines.shape, dtype=torch.float64, device=self.device)
        self.rows = Rows(self._lines)
        self._places, n = aligned(bucket_parts(self.size, self.most_pages, self.kinds, self.multiprocessors))
        self._host = np.zeros(n, np.int32)
        self._host_parts = [self._host[place] for place in self._places]
        self._held = torch.zeros(n, dtype=torch.int32, device=self.device)
        self._starts = torch.arange(self.size + 1, dtype=torch.int32, device=self.device)

    def fill(self, step: StepInputs) -> None:
        """step: for which `bucket_of` gives this size."""
        tokens, positions, slots, rows, table_starts, *work, tables = self._host_parts
        n, used, at = len(step.tokens), len(step.pages), step.positions
        for part, values in ((tokens, step.tokens), (positions, at), (rows, step.sampling["token"])):
            part[: len(values)], part[len(values) :] = values, 0
        pages = step.pages[step.page_starts[:-1] + at // self.page_tokens]
        slots[:n], slots[n:] = pages * self.page_tokens + at % self.page_tokens, self.scratch * self.page_tokens
        padding = self.size - n
        table_starts[: n + 1], table_starts[n + 1 :] = step.page_starts, used + 1 + np.arange(padding)
        tables[:used], tables[used : used + padding] = step.pages, self.scratch
        of = Sequences(np.arange(self.size), np.ones(self.size, np.int32), positions, table_starts[:-1])
        for (group, kv_heads), items, merges in zip(self.kinds, work[::2], work[1::2], strict=True):
            rows_each = rows_for(group)
            most = room(rows_each, kv_heads, self.multiprocessors)
            found = cut(of, rows_each, group, self.page_tokens, most)
            for part, values in ((items, found.items.reshape(-1)), (merges, found.merges.reshape(-1))):
                part[: len(values)], part[len(values) :] = values, 0
        end = self._places[-1].start + used + padding
        lines = self._host_lines
        as_lines(step.sampling, lines[:, : len(step.sampling)])
        lines[:, len(step.sampling) :] = 0
        self._lines.copy_(pinned(torch.from_numpy(lines), self.device), non_blocking=True)
        self._held[:end].copy_(pinned(torch.from_numpy(self._host[:end]), self.device), non_blocking=True)

    def inputs(self) -> dict[str, Tensor]:
        """By the names of the graph's."""
        tokens, positions, _, rows, *_ = self._parts()
        ones = self._starts[1:2].expand(self.size)  # the second one is 1
        return {"tokens": tokens, "positions": positions, "rows": rows, "lengths": ones}

    def tables(self, group: int, kv_heads: int) -> StepTables:
        """A graph has captured programs for as much work as there may be; which there is, `fill` writes."""
        if (group, kv_heads) not in self._tables:
            _, positions, slots, _, table_starts, *work, tables = self._parts()
            at, rows = self.kinds.index((group, kv_heads)), rows_for(group)
            blocks = self.size * -(-group // rows)
            _, _, parts = bounds(blocks, room(rows, kv_heads, self.multiprocessors))
            items, merges = work[2 * at].view(-1, ITEM), work[2 * at + 1].view(-1, MERGE)
            step = Work(items, merges, rows, min(rows, group), parts, MOST_PARTS)
            self._tables[group, kv_heads] = StepTables(positions, slots, self._starts, tables, table_starts, (step,))
        return self._tables[group, kv_heads]

    def _parts(self) -> list[Tensor]:
        """tokens, positions, slots, rows, table starts, of each kind items and merges, tables: views."""
        return [self._held[place] for place in self._places]


class Graphs:
    """Where one executor's graphs are captured: on one stream, into memory that they share.

    Kernels run once on that very stream before they are captured: cuBLAS has a workspace for each stream that it meets,
    on Hopper of 32 MiB, which it keeps, and PyTorch as many streams as one asks for, up to 32.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._memory, self._captured = torch.cuda.graph_pool_handle(), 0

    def captured(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """raises RuntimeError where it cannot be: nothing is left of it, and others can"""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):  # a capture that fails at its end leaves its stream the current one
                compute()  # kernels are compiled, libraries ready
                with _CAPTURE:
                    return self._graph(compute)
        finally:  # what has begun there may still read inputs that are filled next
            before.wait_stream(self._stream)

    def _graph(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Other threads, such as one that loads another model, may do meanwhile what a capture must not."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
            ):  # fmt: skip
                output = compute()
        except RuntimeError as error:
            # Of no use to others: what no graph is left of, and what a capture that cannot end still takes memory from.
            if not self._captured or not isinstance(error, torch.OutOfMemoryError):
                self._memory = torch.cuda.graph_pool_handle()
            raise
        self._captured += 1

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def captured(compute: Callable[[], Tensor], graphs: Graphs | None) -> Callable[[], Tensor]:
    """What computes it again, from inputs where they were and into the same output: a CUDA graph, on a GPU.

    There each may write over what another one gave. graphs: None on a CPU, where it is called as it is
    """
    return compute if graphs is None else graphs.captured(compute)
