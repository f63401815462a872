"""Decode steps in buckets: of so many sequences, at fixed places, that a device replays what it captured once.

A step of S sequences, one token each, goes into the least bucket that has room. Rows that only fill it hold token 0 at
position 0 of a page that no sequence has: they write and read there, and nobody reads what they give.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.cuda.attention_partition import (
    ITEM,
    MERGE,
    MOST_PARTS,
    AttentionKind,
    Sequences,
    aligned,
    bounds,
    bucket_parts,
    first_page,
    room,
    rows_for,
    split_attention,
    window_pages,
    windows_in,
)  # fmt: skip
from millrace.engine.cuda.host_device_copy import pinned
from millrace.engine.cuda.sampling import FIELDS, Rows, as_lines
from millrace.engine.cuda.step_tables import rotary_of, slots_of
from millrace.engine.executor import IntArray, StateSlots, StepInputs, WindowPages
from millrace.kernels.attention.paged import AttentionWork, StepTables
from millrace.kernels.short_conv.slots import SequenceSlots

Tables = Callable[[AttentionKind], StepTables]
_CAPTURE = threading.Lock()  # of a process, one at a time: each begins by waiting for its device, which no other bears


def usual_buckets(most: int) -> tuple[int, ...]:
    """Up to `most` sequences: powers of two to 8, then in steps of 8, from 64 on in quarters of a power of two."""
    result = [1, 2, 4, 8]
    while result[-1] < most:
        result.append(result[-1] + max(8, 1 << (result[-1].bit_length() - 3)))
    return (*result[: bisect_left(result, most)], most)


def bucket_of(step: StepInputs, buckets: Sequence[int]) -> int | None:
    """The least that has room for a step of one token a sequence, and rows, but no more than these; None: none has.

    Nor has one for embedding rows, which prompts bring.
    """
    n = len(step.tokens)
    at, fits = bisect_left(buckets, n), len(step.starts) == n + 1 and 0 < len(step.sampling) <= n
    fits = fits and step.embeddings is None
    return buckets[at] if fits and at < len(buckets) else None


@dataclass(slots=True)
class Bucket:
    """Inputs of a decode step of `size` sequences, on the device, where they stay; written by two copies from the host.

    scratch: the page of rows that fill it | most_pages: of one sequence | multiprocessors: of the device
    kinds: of attention that there are | windows: of each, by its tokens, the page in its caches of rows that fill it
    scratch_slot: of states of rows that fill it
    """

    size: int
    scratch: int
    most_pages: int
    page_tokens: int
    device: torch.device
    multiprocessors: int
    kinds: tuple[AttentionKind, ...]
    windows: Mapping[int, int] = field(default_factory=dict)
    scratch_slot: int = 0
    _places: list[slice] = field(init=False)
    _host: IntArray = field(init=False)
    _host_parts: list[IntArray] = field(init=False)
    _first_pages: Tensor = field(init=False)
    _parts: list[Tensor] = field(init=False)  # views of it, as `bucket_parts` names them
    _starts: Tensor = field(init=False)
    _zeros: Tensor = field(init=False)
    rows: Rows = field(init=False)
    _lines: Tensor = field(init=False)
    _host_lines: NDArray[np.float64] = field(init=False)
    _tables: dict[AttentionKind, StepTables] = field(init=False, default_factory=dict)
    _windows: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._host_lines = np.zeros((len(FIELDS), self.size))
        self._lines = torch.zeros(self._host_lines.shape, dtype=torch.float64, device=self.device)
        self.rows = Rows(self._lines)
        self._windows = windows_in(self.kinds)
        lengths = bucket_parts(self.size, self.most_pages, self.kinds, self.multiprocessors, self.page_tokens)
        self._places, n = aligned(lengths)
        self._host = np.zeros(n, np.int32)
        self._host_parts = [self._host[place] for place in self._places]
        self._first_pages = torch.zeros(n, dtype=torch.int32, device=self.device)
        self._parts = [self._first_pages[place] for place in self._places]
        self._starts = torch.arange(self.size + 1, dtype=torch.int32, device=self.device)
        self._zeros = torch.zeros(self.size, dtype=torch.int32, device=self.device)

    def fill(self, step: StepInputs, windows: Sequence[WindowPages] = (), states: StateSlots | None = None) -> None:
        """step: for which `bucket_of` gives this size. held: the pages of each of `windows`"""
        tokens, positions, rotary, adapters, slots, rows, before, behind, table_starts, *more, tables = self._host_parts
        n, used, at = len(step.tokens), 0, step.positions
        arrays = (
            (tokens, step.tokens), (positions, at), (rotary, rotary_of(step)), (adapters, step.adapters_of_tokens()),
            (rows, step.sampling["token"]),
        )  # fmt: skip
        for part, values in arrays:
            part[: len(values)], part[len(values) :] = values, 0
        (before[:n], behind[:n]), before[n:], behind[n:] = slots_of(step, states), -1, self.scratch_slot
        if len(tables):  # some layer attends to all
            pages = step.pages[step.page_starts[:-1] + at // self.page_tokens]
            slots[:n], slots[n:] = pages * self.page_tokens + at % self.page_tokens, self.scratch * self.page_tokens
            used, padding = len(step.pages), self.size - n
            table_starts[: n + 1], table_starts[n + 1 :] = step.page_starts, used + 1 + np.arange(padding)
            tables[:used], tables[used : used + padding] = step.pages, self.scratch
            used += padding
        begins = {0: table_starts[:-1]}
        of_windows = more[2 * len(self.kinds) :]
        for window, own in zip(self.windows, windows, strict=True):
            i = 3 * self._windows.index(window)
            begins[window] = self._fill_window(window, own, at, of_windows[i : i + 3])
        self._fill_work(positions, begins, more)
        end = self._places[-1].start + used
        lines = self._host_lines
        as_lines(step.sampling, lines[:, : len(step.sampling)])
        lines[:, len(step.sampling) :] = 0
        self._lines.copy_(pinned(torch.from_numpy(lines), self.device), non_blocking=True)
        self._first_pages[:end].copy_(pinned(torch.from_numpy(self._host[:end]), self.device), non_blocking=True)

    def _fill_window(self, window: int, windows: WindowPages, at: IntArray, parts: Sequence[IntArray]) -> IntArray:
        """Give where page 0 of each row is. A row has room for as many pages as one token attends to at most."""
        (slots, first, tables), n, size, scratch = parts, len(at), self.page_tokens, self.windows[window]
        first[:n], first[n:] = first_page(at, window, size), 0
        each = window_pages(window, size, self.most_pages)
        own = first[:n, None] + np.arange(each)
        places = np.minimum((windows.page_starts[:-1] - windows.first)[:, None] + own, len(windows.pages) - 1)
        table = tables.reshape(self.size, each)
        table[:n], table[n:] = np.where(own <= (at // size)[:, None], windows.pages[places], scratch), scratch
        pages = table[np.arange(n), at // size - first[:n]]
        slots[:n], slots[n:] = pages * size + at % size, scratch * size
        begins: IntArray = (np.arange(self.size, dtype=np.int32) * each - first).astype(np.int32)
        return begins

    def _fill_work(self, positions: IntArray, begins: Mapping[int, IntArray], parts: Sequence[IntArray]) -> None:
        """begins: where page 0 of each row is, by window. parts: items and merges of each kind, and others"""
        rows, ones = np.arange(self.size), np.ones(self.size, np.int32)
        for kind, items, merges in zip(self.kinds, parts[::2], parts[1::2], strict=False):
            group, kv_heads, window = kind
            of, rows_each = Sequences(rows, ones, positions, begins[window]), rows_for(group)
            most = room(rows_each, kv_heads, self.multiprocessors)
            result = split_attention(of, rows_each, group, self.page_tokens, most, window)
            for part, values in ((items, result.items.reshape(-1)), (merges, result.merges.reshape(-1))):
                part[: len(values)], part[len(values) :] = values, 0

    def inputs(self) -> dict[str, Tensor]:
        """By the names of the graph's."""
        tokens, _, rotary, adapters, _, rows, *_ = self._parts
        ones = self._starts[1:2].expand(self.size)  # the second one is 1
        return {"tokens": tokens, "positions": rotary, "rows": rows, "lengths": ones, "adapters": adapters}

    def tables(self, kind: AttentionKind) -> StepTables:
        """A graph has captured programs for as much work as there may be; which there is, `fill` writes."""
        if kind not in self._tables:
            _, positions, rotary, _, slots, _, _, _, table_starts, *more, tables = self._parts
            at, rows, first = self.kinds.index(kind), rows_for(kind.group), self._zeros
            if kind.window:
                begin = 2 * len(self.kinds) + 3 * self._windows.index(kind.window)
                slots, first, tables = more[begin : begin + 3]
                table_starts = self._starts * (len(tables) // self.size)
            blocks = self.size * -(-kind.group // rows)
            _, _, parts = bounds(blocks, room(rows, kind.kv_heads, self.multiprocessors))
            items, merges = more[2 * at].view(-1, ITEM), more[2 * at + 1].view(-1, MERGE)
            work = AttentionWork(items, merges, rows, min(rows, kind.group), parts, MOST_PARTS)
            self._tables[kind] = StepTables(
                positions, rotary, slots, self._starts, tables, table_starts, first, (work,)
            )  # fmt: skip
        return self._tables[kind]

    def slots(self) -> SequenceSlots:
        """Of states; each token is a sequence."""
        before, behind = self._parts[6:8]
        return SequenceSlots(self._starts[:-1], self._starts, before, behind)


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
