"""Runs one kernel through a program of one call, as the engine would: no second binding to test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.engine.native.executor import NativeProgram, StatelessExecutor
from millrace.graph.types import Symbol
from millrace.kernels.catalogue import numbered
from millrace.kernels.declare import MAX_KNOBS, Param, Space
from millrace.kernels.encode import SIZE_FUNCTIONS, Ref, encode
from millrace.kernels.layout import up

GUARD = 0xA5  # bytes between operands: nothing may be written there
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Machine:
    isa: str
    threads: int = 2
    tile_rows: int = 0  # the knob of matmul; 0: its own rule


def packed(*allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Token masks (M, ceil(V / 32)) of rows (V,); bits behind the vocabulary are set: nobody may look at them."""
    rows = np.stack(allowed)
    whole = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)), constant_values=True)
    return np.packbits(whole, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def as_bytes(array: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def i32(values: object) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def run_kernel(
    kernel: str,
    operands: Mapping[str, NDArray[np.generic] | None],
    params: Mapping[str, Param],
    sizes: Sequence[int],
    machine: Machine,
) -> dict[str, Bytes]:
    """Runs a program of one call; gives each output operand's bytes. An output's array only says how large it is.

    sizes: of the program's symbols, each at its bound
    Asserts that nothing outside the outputs was written. Weights go where weights go, the rest into the arena.
    """
    known = dict.fromkeys((n for _, n, _ in numbered()[kernel][1].fields), 0)
    declared = operand_bytes(kernel, {**known, **params}, sizes)
    arenas: dict[Space, list[Bytes]] = {Space.WEIGHTS: [], Space.ACTIVATIONS: []}
    refs: dict[str, Ref] = {}
    for o in numbered()[kernel][1].operands:
        array = operands.get(o.name)
        if array is None:
            continue
        space = Space.WEIGHTS if o.access.startswith("weight") else Space.ACTIVATIONS
        data = as_bytes(array)
        assert data.size >= declared[o.name], f"{o.name}: {data.size} bytes given, {declared[o.name]} declared"
        refs[o.name] = Ref(space, sum(a.size for a in arenas[space]))
        arenas[space] += [data, np.full(up(data.size, 64) - data.size + 64, GUARD, np.uint8)]
    weights, before = (np.concatenate([*arenas[s], np.zeros(64, np.uint8)]) for s in (Space.WEIGHTS, Space.ACTIVATIONS))
    program = NativeProgram(
        calls=encode(kernel, refs, params), n_calls=1, weights=weights, weights_bytes=weights.size,
        activation_bytes=before.size, symbols={Symbol(f"s{i}"): size for i, size in enumerate(sizes)},
    )  # fmt: skip
    network = StatelessExecutor(program, threads=machine.threads, isa=machine.isa)
    try:
        memory = network.activations()
        memory[:] = before
        if machine.tile_rows:
            network.set_tactics([(0, 1, (machine.tile_rows,) + (0,) * (MAX_KNOBS - 1))])
        network.compute(sizes)
        after = memory.copy()
    finally:
        network.close()
    return _collect(kernel, operands, refs, before, after)


def operand_bytes(name: str, params: Mapping[str, Param], sizes: Sequence[int]) -> dict[str, int]:
    """Return the bytes that each operand of a call may access."""
    _, kernel = numbered()[name]
    scope = {**SIZE_FUNCTIONS, **params, "most": sizes.__getitem__}
    return {o.name: int(eval(o.size, {"__builtins__": {}}, scope)) for o in kernel.operands}


def _collect(
    kernel: str,
    operands: Mapping[str, NDArray[np.generic] | None],
    refs: Mapping[str, Ref],
    before: Bytes,
    after: Bytes,
) -> dict[str, Bytes]:
    untouched = np.ones(before.size, bool)
    outputs: dict[str, Bytes] = {}
    for o in numbered()[kernel][1].operands:
        array = operands.get(o.name)
        if array is None or o.access.rstrip("?") not in ("out", "inout"):
            continue
        part = slice(refs[o.name].offset, refs[o.name].offset + as_bytes(array).size)
        outputs[o.name] = after[part]
        untouched[part] = False
    assert (before[untouched] == after[untouched]).all(), f"{kernel} wrote outside of its outputs"
    return outputs
