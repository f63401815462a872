"""The tables of a step for a device, copied at once."""

import numpy as np
import torch

from millrace.engine.cuda.attention_partition import (
    FEW_ROWS,
    ITEM,
    MAX_PARTS,
    MERGE,
    AttentionKind,
    Sequences,
    SmGeometry,
    pack_arrays,
    room,
    split_attention,
)
from millrace.engine.cuda.host_device_copy import on_device
from millrace.engine.executor import ExecutionError, ExecutorLimits, IntArray, StateSlots, StepInputs, WindowPages
from millrace.kernels.attention.paged import AttentionWork, StepTables
from millrace.kernels.short_conv.slots import SequenceSlots


def step_tables(
    step: StepInputs, page_tokens: int, device: torch.device, kind: AttentionKind, processors: SmGeometry,
    view: WindowPages | None = None,
) -> StepTables:  # fmt: skip
    """Make the attention tables of a step. Sequences with few rows have their own small programs, so that a decode row
    costs the same with and without prompts in the step.

    view: the pages of the kind's window; None: the step's own
    """
    group, kv_heads, window = kind
    if view is None:
        view = WindowPages(step.pages, step.page_starts, np.zeros(len(step.starts) - 1, np.int32))
    sequences = Sequences.from_step(step, view.page_starts[:-1] - view.first)
    owner = np.repeat(np.arange(len(sequences.lengths)), sequences.lengths)
    pages = view.pages[sequences.tables[owner] + step.positions // page_tokens]
    is_few = sequences.lengths * group <= FEW_ROWS
    cuts = [
        (
            rows,
            most,
            split_attention(
                sequences.select(which), rows, group, page_tokens, room(rows, kv_heads, processors.number), window
            ),
        )
        for rows, which in ((processors.many_rows, np.flatnonzero(~is_few)), (FEW_ROWS, np.flatnonzero(is_few)))
        if len(which) and (most := min(rows, int(sequences.lengths[which].max()) * group))
    ]
    slots = pages * page_tokens + step.positions % page_tokens
    parts = [step.positions, rotary_of(step), slots, step.starts, view.page_starts, view.first, view.pages]
    parts += [part for _, _, result in cuts for part in (result.items, result.merges)]
    packed, places = pack_arrays(parts)
    uploaded = on_device(packed, device)
    positions, rotary, slots_, starts, table_starts, first, tables, *more = (uploaded[place] for place in places)
    work = tuple(
        AttentionWork(items.view(-1, ITEM), merges.view(-1, MERGE), rows, most, plan.parts, MAX_PARTS)
        for (rows, most, plan), items, merges in zip(cuts, more[::2], more[1::2], strict=True)
    )
    return StepTables(positions, rotary, slots_, starts, tables, table_starts, first, work)


def slots_of(step: StepInputs, states: StateSlots | None) -> tuple[IntArray, IntArray]:
    """Return each sequence's state slots before and after the step; -1 before it for a new one. None: no states"""
    if states is None:
        none = np.zeros(len(step.starts) - 1, np.int32)
        return none, none
    return np.where(step.positions[step.starts[:-1]] == 0, np.int32(-1), states.read), states.write


def step_slots(step: StepInputs, states: StateSlots | None, device: torch.device) -> SequenceSlots:
    """Copy the state slots to the device at once."""
    owner = np.repeat(np.arange(len(step.starts) - 1, dtype=np.int32), np.diff(step.starts))
    packed, places = pack_arrays([owner, step.starts, *slots_of(step, states)])
    uploaded = on_device(packed, device)
    return SequenceSlots(*(uploaded[place] for place in places))


def rotary_of(step: StepInputs) -> IntArray:
    """Return the rotary positions (T,)."""
    return step.positions if step.rotary_positions is None else step.rotary_positions


def check_given(step: StepInputs, limits: ExecutorLimits) -> None:
    """Check embedding rows, rotary positions and adapters of a step, because a kernel would read out of bounds.

    raises ExecutionError
    """
    rows, rotary = step.embeddings, step.rotary_positions
    if rows is not None and (rows.dtype != np.float32 or rows.shape[1:] != (limits.embedding_width,)):
        expected = f"rows of {limits.embedding_width} float32"
        raise ExecutionError(f"an illegal step: embeddings are {rows.dtype}{list(rows.shape)}, not {expected}")
    n_rows = 0 if rows is None else len(rows)
    if (least := step.tokens.min(initial=0)) < -n_rows:
        raise ExecutionError(f"an illegal step: token {least}, and {n_rows} embedding rows")
    if step.adapters is not None:
        if (n := len(step.adapters)) != len(step.starts) - 1:
            raise ExecutionError(f"an illegal step: {n} adapters of {len(step.starts) - 1} sequences")
        if step.adapters.min(initial=0) < 0 or step.adapters.max(initial=0) > limits.n_adapters:
            raise ExecutionError("an illegal step: an adapter that does not exist")
    if rotary is not None:
        if rotary.shape != step.positions.shape:
            raise ExecutionError(f"an illegal step: {len(rotary)} rotary positions of {len(step.tokens)} tokens")
        if rotary.min() < 0 or rotary.max() >= limits.max_context:
            raise ExecutionError("an illegal step: a rotary position beyond the context")
