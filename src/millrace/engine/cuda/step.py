"""A step of the runtime as a device takes it: one copy of all its tables."""

import numpy as np
import torch

from millrace.engine.cuda.transfer import on_device
from millrace.engine.cuda.work import FEW_ROWS, ITEM, MERGE, MOST_PARTS, Kind, Processors, Sequences, cut, joined, room
from millrace.engine.executor import StepInputs
from millrace.kernels.attention.paged import StepTables, Work


def step_tables(
    step: StepInputs, page_tokens: int, device: torch.device, kind: Kind, processors: Processors
) -> StepTables:
    """Sequences of few rows go in programs of few: a decode row costs as much beside a prompt as it does alone."""
    group, kv_heads = kind
    of = Sequences.of(step)
    owner = np.repeat(np.arange(len(of.lengths)), of.lengths)
    pages = step.pages[step.page_starts[owner] + step.positions // page_tokens]
    is_few = of.lengths * group <= FEW_ROWS
    cuts = [
        (rows, most, cut(of.some(which), rows, group, page_tokens, room(rows, kv_heads, processors.number)))
        for rows, which in ((processors.many_rows, np.flatnonzero(~is_few)), (FEW_ROWS, np.flatnonzero(is_few)))
        if len(which) and (most := min(rows, int(of.lengths[which].max()) * group))
    ]
    slots = pages * page_tokens + step.positions % page_tokens
    parts = [step.positions, slots, step.starts, step.page_starts, step.pages]
    parts += [part for _, _, found in cuts for part in (found.items, found.merges)]
    whole, places = joined(parts)
    held = on_device(whole, device)
    positions, slots_, starts, table_starts, tables, *more = (held[place] for place in places)
    work = tuple(
        Work(items.view(-1, ITEM), merges.view(-1, MERGE), rows, most, found.parts, MOST_PARTS)
        for (rows, most, found), items, merges in zip(cuts, more[::2], more[1::2], strict=True)
    )
    return StepTables(positions, slots_, starts, tables, table_starts, work)
