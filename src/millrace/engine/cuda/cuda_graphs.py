"""Decode steps as CUDA graphs: padded to a bucket of sequences with fixed buffers, captured once and replayed.

A step of S sequences, one token each, uses the smallest bucket that fits. Padding rows have token 0 at position 0 of a
scratch page that no sequence owns: they read and write there, and their outputs are ignored.
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
    MAX_PARTS,
    MERGE,
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
_CAPTURE = threading.Lock()  # one capture at a time per process: it synchronizes the device first, which breaks others


def default_buckets(max_size: int) -> tuple[int, ...]:
    """Return bucket sizes up to `max_size`: powers of two to 8, multiples of 8, from 64 on quarters of powers."""
    result = [1, 2, 4, 8]
    while result[-1] < max_size:
        result.append(result[-1] + max(8, 1 << (result[-1].bit_length() - 3)))
    return (*result[: bisect_left(result, max_size)], max_size)


def select_bucket(step: StepInputs, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket for a step of one token per sequence and at most as many rows; None if there is none.

    Steps with embedding rows, which belong to prompts, have none.
    """
    n = len(step.tokens)
    at, fits = bisect_left(buckets, n), len(step.starts) == n + 1 and 0 < len(step.sampling) <= n
    fits = fits and step.embeddings is None
    return buckets[at] if fits and at < len(buckets) else None


@dataclass(slots=True)
class Bucket:
    """Inputs of a decode step of `size` sequences on the device, at fixed addresses; filled by two copies from the
    host.

    scratch: the page of padding rows | max_pages: of one sequence | multiprocessors: of the device
    kinds: the kinds of attention | windows: the scratch page of each window, by its tokens
    scratch_slot: the state slot of padding rows
    """

    size: int
    scratch: int
    max_pages: int
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
    _parts: list[Tensor] = field(init=False)  # views of it, in the order of `bucket_parts`
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
        lengths = bucket_parts(self.size, self.max_pages, self.kinds, self.multiprocessors, self.page_tokens)
        self._places, n = aligned(lengths)
        self._host = np.zeros(n, np.int32)
        self._host_parts = [self._host[place] for place in self._places]
        self._first_pages = torch.zeros(n, dtype=torch.int32, device=self.device)
        self._parts = [self._first_pages[place] for place in self._places]
        self._starts = torch.arange(self.size + 1, dtype=torch.int32, device=self.device)
        self._zeros = torch.zeros(self.size, dtype=torch.int32, device=self.device)

    def fill(self, step: StepInputs, windows: Sequence[WindowPages] = (), states: StateSlots | None = None) -> None:
        """Fill the inputs from a step for which `select_bucket` returns this size."""
        tokens, positions, rotary, adapters, slots, rows, before, behind, table_starts, *more, tables = self._host_parts
        n, used, at = len(step.tokens), 0, step.positions
        arrays = (
            (tokens, step.tokens), (positions, at), (rotary, rotary_of(step)), (adapters, step.adapters_of_tokens()),
            (rows, step.sampling["token"]),
        )  # fmt: skip
        for part, values in arrays:
            part[: len(values)], part[len(values) :] = values, 0
        (before[:n], behind[:n]), before[n:], behind[n:] = slots_of(step, states), -1, self.scratch_slot
        if len(tables):  # some layers have full attention
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
        """Fill a window's inputs; return the offset of each row's page 0. A row has the pages of one token's window."""
        (slots, first, tables), n, size, scratch = parts, len(at), self.page_tokens, self.windows[window]
        first[:n], first[n:] = first_page(at, window, size), 0
        each = window_pages(window, size, self.max_pages)
        own = first[:n, None] + np.arange(each)
        places = np.minimum((windows.page_starts[:-1] - windows.first)[:, None] + own, len(windows.pages) - 1)
        table = tables.reshape(self.size, each)
        table[:n], table[n:] = np.where(own <= (at // size)[:, None], windows.pages[places], scratch), scratch
        pages = table[np.arange(n), at // size - first[:n]]
        slots[:n], slots[n:] = pages * size + at % size, scratch * size
        begins: IntArray = (np.arange(self.size, dtype=np.int32) * each - first).astype(np.int32)
        return begins

    def _fill_work(self, positions: IntArray, begins: Mapping[int, IntArray], parts: Sequence[IntArray]) -> None:
        """Fill the programs. begins: offset of each row's page 0, by window. parts: items and merges, ..."""
        rows, ones = np.arange(self.size), np.ones(self.size, np.int32)
        for kind, items, merges in zip(self.kinds, parts[::2], parts[1::2], strict=False):
            group, kv_heads, window = kind
            sequences, rows_each = Sequences(rows, ones, positions, begins[window]), rows_for(group)
            most = room(rows_each, kv_heads, self.multiprocessors)
            result = split_attention(sequences, rows_each, group, self.page_tokens, most, window)
            for part, values in ((items, result.items.reshape(-1)), (merges, result.merges.reshape(-1))):
                part[: len(values)], part[len(values) :] = values, 0

    def inputs(self) -> dict[str, Tensor]:
        """Return the graph's inputs by name."""
        tokens, _, rotary, adapters, _, rows, *_ = self._parts
        ones = self._starts[1:2].expand(self.size)  # the second one is 1
        return {"tokens": tokens, "positions": rotary, "rows": rows, "lengths": ones, "adapters": adapters}

    def tables(self, kind: AttentionKind) -> StepTables:
        """Return a kind's tables. Graphs are captured with the most programs; `fill` determines which have work."""
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
            work = AttentionWork(items, merges, rows, min(rows, kind.group), parts, MAX_PARTS)
            self._tables[kind] = StepTables(
                positions, rotary, slots, self._starts, tables, table_starts, first, (work,)
            )  # fmt: skip
        return self._tables[kind]

    def slots(self) -> SequenceSlots:
        """State slots; each token is a sequence."""
        before, behind = self._parts[6:8]
        return SequenceSlots(self._starts[:-1], self._starts, before, behind)


class Graphs:
    """The captured graphs of one executor: on one stream, in one memory pool.

    Kernels run once on that stream before the capture: cuBLAS keeps a workspace for each stream that it is used on, 32
    MiB on Hopper, and PyTorch hands out up to 32 streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._memory, self._captured = torch.cuda.graph_pool_handle(), 0

    def captured(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a graph. raises RuntimeError on failure, after which others can still be captured"""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):  # a capture that fails at its end leaves its stream current
                compute()  # compiles kernels and initializes libraries
                with _CAPTURE:
                    return self._graph(compute)
        finally:  # pending work may still read inputs that are filled next
            before.wait_stream(self._stream)

    def _graph(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture; other threads, such as one that loads another model, may meanwhile do what a capture forbids."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
            ):  # fmt: skip
                output = compute()
        except RuntimeError as error:
            # A pool without graphs is useless, and so is one from which an unfinished capture still takes memory.
            if not self._captured or not isinstance(error, torch.OutOfMemoryError):
                self._memory = torch.cuda.graph_pool_handle()
            raise
        self._captured += 1

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def captured(compute: Callable[[], Tensor], graphs: Graphs | None) -> Callable[[], Tensor]:
    """Return a function that computes the same again, from inputs at the same addresses into the same output.

    On a GPU it replays a CUDA graph, and may overwrite what other graphs returned. graphs: None on a CPU
    """
    return compute if graphs is None else graphs.captured(compute)
