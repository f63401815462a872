"""Decode steps in buckets: of so many sequences, at fixed places, that a device replays what it captured once.

A step of S sequences, one token each, goes into the least bucket that has room. Rows that only fill it hold token 0 at
position 0 of a page that no sequence has: they write and read there, and nobody reads what they give.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.cuda.memory import FEW_ROWS, MANY_ROWS
from millrace.engine.cuda.sampling import FIELDS, Rows, as_lines
from millrace.engine.cuda.step import blocks, splits
from millrace.engine.cuda.transfer import pinned
from millrace.engine.executor import IntArray, StepInputs
from millrace.kernels.attention.paged import StepTables

Tables = Callable[[int, int], StepTables]  # of query heads for each KV head, and of KV heads


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
    """

    size: int
    scratch: int
    most_pages: int
    page_tokens: int
    device: torch.device
    multiprocessors: int
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
        n = 5 * self.size + 1 + self.size * self.most_pages
        self._host = np.zeros(n, np.int32)
        self._host_parts = np.split(self._host, np.cumsum(self._sizes())[:-1])
        self._held = torch.zeros(n, dtype=torch.int32, device=self.device)
        self._starts = torch.arange(self.size + 1, dtype=torch.int32, device=self.device)

    def fill(self, step: StepInputs) -> None:
        """step: for which `bucket_of` gives this size."""
        tokens, positions, slots, rows, table_starts, tables = self._host_parts
        n, used, at = len(step.tokens), len(step.pages), step.positions
        for part, values in ((tokens, step.tokens), (positions, at), (rows, step.sampling["token"])):
            part[: len(values)], part[len(values) :] = values, 0
        pages = step.pages[step.page_starts[:-1] + at // self.page_tokens]
        slots[:n], slots[n:] = pages * self.page_tokens + at % self.page_tokens, self.scratch * self.page_tokens
        padding = self.size - n
        table_starts[: n + 1], table_starts[n + 1 :] = step.page_starts, used + 1 + np.arange(padding)
        tables[:used], tables[used : used + padding] = step.pages, self.scratch
        end = len(self._host) - len(tables) + used + padding
        lines = self._host_lines
        as_lines(step.sampling, lines[:, : len(step.sampling)])
        lines[:, len(step.sampling) :] = 0
        self._lines.copy_(pinned(torch.from_numpy(lines), self.device), non_blocking=True)
        self._held[:end].copy_(pinned(torch.from_numpy(self._host[:end]), self.device), non_blocking=True)

    def inputs(self) -> dict[str, Tensor]:
        """By the names of the graph's."""
        tokens, positions, _, rows, _, _ = self._held.split(self._sizes())
        ones = self._starts[1:2].expand(self.size)  # the second one is 1
        return {"tokens": tokens, "positions": positions, "rows": rows, "lengths": ones}

    def tables(self, group: int, kv_heads: int) -> StepTables:
        """Its splits are those of its longest contexts: what a graph captured cannot choose again."""
        if (group, kv_heads) not in self._tables:
            _, positions, slots, _, table_starts, tables = self._held.split(self._sizes())
            rows = FEW_ROWS if group <= FEW_ROWS else MANY_ROWS
            programs = blocks(np.full(self.size, group, np.int32), rows)
            n_splits = splits(len(programs) * kv_heads, self.most_pages, self.multiprocessors)
            self._tables[group, kv_heads] = StepTables(
                positions, slots, self._starts, tables, table_starts, torch.from_numpy(programs).to(self.device), rows,
                n_splits,
            )  # fmt: skip
        return self._tables[group, kv_heads]

    def _sizes(self) -> list[int]:
        """Of tokens, positions, slots, rows, table starts and tables, as they lie one after the other."""
        return [*[self.size] * 4, self.size + 1, self.size * self.most_pages]


def captured(compute: Callable[[], Tensor], device: torch.device, pool: Any) -> Callable[[], Tensor]:
    """What computes it again, from inputs where they were and into the same output: a CUDA graph, on a GPU.

    There it runs once before, so that kernels are compiled and libraries ready; on a CPU it is called as it is
    pool: memory (`torch.cuda.graph_pool_handle`) that it shares with other captures: each may write over their outputs
    """
    if device.type == "cpu":
        return compute
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        compute()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = compute()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
