"""A step of the runtime as a device takes it: one copy of all its tables."""

import numpy as np
import torch

from millrace.engine.cuda.memory import FEW_ROWS, MANY_ROWS, MOST_SPLITS, PROGRAMS
from millrace.engine.cuda.transfer import on_device
from millrace.engine.executor import IntArray, StepInputs
from millrace.kernels.attention.paged import StepTables


def step_tables(
    step: StepInputs, page_tokens: int, device: torch.device, *, group: int, kv_heads: int, multiprocessors: int
) -> StepTables:
    """group: query heads of a KV head; multiprocessors: of the device"""
    lengths = np.diff(step.starts)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    pages = step.pages[step.page_starts[owner] + step.positions // page_tokens]
    rows = FEW_ROWS if lengths.max(initial=1) * group <= FEW_ROWS else MANY_ROWS
    programs = blocks(lengths * group, rows)
    longest = int(step.positions.max(initial=0)) // page_tokens + 1
    parts = (
        step.positions, pages * page_tokens + step.positions % page_tokens, step.starts, step.page_starts, step.pages,
        programs.reshape(-1),
    )  # fmt: skip
    whole = on_device(np.concatenate(parts).astype(np.int32), device)
    positions, slots, starts, table_starts, tables, flat = whole.split([len(p) for p in parts])
    return StepTables(positions, slots, starts, tables, table_starts, flat.view(-1, 2), rows,
                      splits(len(programs) * kv_heads, longest, multiprocessors))  # fmt: skip


def splits(programs: int, pages: int, multiprocessors: int) -> int:
    """Into how many parts each program's pages go, a power of two: few sequences have work for all of a GPU, too."""
    wanted = min(-(-PROGRAMS * multiprocessors // max(programs, 1)), pages, MOST_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def blocks(rows: IntArray, of: int) -> IntArray:
    """rows (S,) -> (n, 2): each sequence's rows in blocks of so many."""
    counts = -(-rows // of)
    sequence = np.repeat(np.arange(len(rows)), counts)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * of
    return np.stack([sequence, first], 1).astype(np.int32)
