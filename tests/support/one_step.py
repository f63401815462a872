"""Runs one kernel through a one-step program, as the engine would: no second binding to test."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, StepInputs
from millrace.engine.native import KvFormat, KvShape, NativeExecutor, NativeProgram
from millrace.kernels.declare import Space
from millrace.kernels.encode import BY_NAME, Limits, Param, Ref, encode, operand_bytes
from millrace.kernels.layout import up

GUARD = 0xA5  # bytes between operands: nothing may be written there
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Machine:
    isa: str
    threads: int = 2


def as_bytes(array: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def i32(values: object) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def step_inputs(T: int, S: int = 1, rows: int = 0) -> StepInputs:
    """T tokens 0, split evenly over S sequences, positions from 0; `rows` of them sampled greedily."""
    starts = np.linspace(0, T, S + 1).astype(np.int32)
    pages = [up(int(n), 64) // 64 for n in np.diff(starts)]
    sampling = np.zeros(rows, SAMPLING)
    sampling["sequence"], sampling["top_p"], sampling["repetition_penalty"], sampling["n_top"] = (
        np.arange(rows),
        1,
        1,
        -1,
    )
    return StepInputs(
        tokens=np.zeros(T, np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in np.diff(starts)]),
        starts=starts,
        pages=np.arange(sum(pages), dtype=np.int32),
        page_starts=np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
        sampling=sampling,
        history=i32([]),
        bias_ids=i32([]),
        bias_values=np.zeros(0, np.float32),
    )


def run_kernel(
    kernel: str,
    operands: Mapping[str, NDArray[np.generic] | None],
    params: Mapping[str, Param],
    step: StepInputs,
    machine: Machine,
) -> dict[str, Bytes]:
    """Runs one step of one kernel; gives each output operand's bytes. An output's array only says how large it is.

    Asserts that nothing outside the outputs was written. Weights go where weights go, the rest into the arena.
    """
    limits = Limits(T=len(step.tokens), S=max(len(step.starts) - 1, len(step.sampling)))
    sizes = operand_bytes(kernel, {**dict.fromkeys((n for _, n, _ in BY_NAME[kernel][1].fields), 0), **params}, limits)
    arenas: dict[Space, list[Bytes]] = {Space.WEIGHTS: [], Space.ACTIVATIONS: []}
    refs: dict[str, Ref] = {}
    for o in BY_NAME[kernel][1].operands:
        array = operands.get(o.name)
        if array is None:
            continue
        space = Space.WEIGHTS if o.access.startswith("weight") else Space.ACTIVATIONS
        data = as_bytes(array)
        assert data.size >= sizes[o.name], f"{o.name}: {data.size} bytes given, {sizes[o.name]} declared"
        refs[o.name] = Ref(space, sum(a.size for a in arenas[space]))
        arenas[space] += [data, np.full(up(data.size, 64) - data.size + 64, GUARD, np.uint8)]
    weights, before = (np.concatenate([*arenas[s], np.zeros(64, np.uint8)]) for s in (Space.WEIGHTS, Space.ACTIVATIONS))
    program = NativeProgram(
        steps=encode(kernel, refs, params, limits), n_steps=1, weights=weights, weights_bytes=weights.size,
        activation_bytes=before.size, logits_offset=-1, max_step_tokens=limits.T, max_sequences=limits.S,
        max_context=64, vocab_size=1 + int(step.tokens.max(initial=0)),
        kv=KvShape(layers=0, heads=1, head_dim=16, format=KvFormat.F32),
    )  # fmt: skip
    executor = NativeExecutor(program, n_pages=0, threads=machine.threads, isa=machine.isa)
    try:
        memory = executor.activations()
        memory[:] = before
        executor.run(_no_pages(step))
        after = memory.copy()
    finally:
        executor.close()
    return _collect(kernel, operands, refs, before, after)


def _no_pages(step: StepInputs) -> StepInputs:
    empty = i32([])
    return StepInputs(
        step.tokens, step.positions, step.starts, empty, np.zeros_like(step.page_starts), step.sampling, empty, empty,
        step.bias_values,
    )  # fmt: skip


def _collect(
    kernel: str,
    operands: Mapping[str, NDArray[np.generic] | None],
    refs: Mapping[str, Ref],
    before: Bytes,
    after: Bytes,
) -> dict[str, Bytes]:
    untouched = np.ones(before.size, bool)
    outputs: dict[str, Bytes] = {}
    for o in BY_NAME[kernel][1].operands:
        array = operands.get(o.name)
        if array is None or o.access.rstrip("?") not in ("out", "inout"):
            continue
        part = slice(refs[o.name].offset, refs[o.name].offset + as_bytes(array).size)
        outputs[o.name] = after[part]
        untouched[part] = False
    assert (before[untouched] == after[untouched]).all(), f"{kernel} wrote outside of its outputs"
    return outputs
