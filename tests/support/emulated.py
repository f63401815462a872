"""Few rows by INT4 and INT8, as Triton compiles them for an H200, emulated in a process that interprets no kernel.

python -m tests.support.emulated CASES   # JSON, a list of what `furthest` is given; written are its answers
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.kernels.matmul import cuda, cuda_few
from millrace.kernels.matmul.coded import weights
from millrace.kernels.matmul.gpu_tiles import EIGHT_OF_WORDS, takes
from tests.support.fake_cuda import OPTIONS, RUN, FakeDriver, Pointer
from tests.support.ptx import Program

_BETWEEN = b"\xff" * 16  # what lies between tensors is NaN, or the largest number


def launch(kernel: Any, *args: Any, grid: Sequence[int], warmup: bool, **given: Any) -> None:
    """In place of a launch, with tensors of a CPU: compiled for what it is given, program after program."""
    driver.set_active(FakeDriver())
    pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
    compiled = RUN(kernel, *pointers, grid=grid, warmup=True, **given)
    bound, specialised, _ = kernel.device_caches[0][-1](*pointers, **OPTIONS, **given)
    memory, places = bytearray(_BETWEEN), dict[int, int]()
    for pointer, x in zip(pointers, args, strict=True):
        if isinstance(x, Tensor):
            memory += b"\xff" * (-len(memory) % 16)
            places[id(pointer)] = len(memory)
            memory += _bytes(x).tobytes() + _BETWEEN
    there = np.frombuffer(memory, np.uint8)
    program = Program(compiled.asm["ptx"], 32 * compiled.metadata.num_warps, there)
    arguments = [places.get(id(value), value) for value, (kind, *_) in zip(bound.values(), specialised, strict=True)
                 if kind != "constexpr"]  # fmt: skip
    for i in range(grid[0]):
        program.run([*arguments, 0, 0, 0], i)  # and Triton's own, which nothing here needs
    for pointer, x in zip(pointers, args, strict=True):
        if isinstance(x, Tensor):
            kept = _bytes(x)
            kept[:] = there[places[id(pointer)] :][: len(kept)]


def _bytes(x: Tensor) -> Any:
    """Its own memory."""
    return x.view(torch.uint8).numpy().reshape(-1)


def furthest(
    bits: int, rows: int, columns: int, inputs: int, group: int, minimums: bool, dtype: str, tile: int
) -> float:
    """Of products from float64's, as shares of the sums of their terms' magnitudes. group 0: a row is one

    dtype: of the rows, and of the products: these are rounded, and float64's are too
    """
    rng = np.random.default_rng(columns + inputs)
    shape = columns, -(-inputs // (group or inputs))
    least = rng.normal(size=shape).astype(np.float16) if minimums else None
    codes = rng.integers(-(1 << bits - 1), 1 << bits - 1, (columns, inputs)).astype(np.int8)
    if minimums and bits == 4:
        codes += np.int8(8)
    scales = rng.uniform(0.5, 1.5, shape).astype(np.float16)
    of = QuantisedMatrix(codes, scales, group or inputs, bits, least)
    x, w = torch.from_numpy(rng.normal(size=(rows, inputs))).to(getattr(torch, dtype)), weights(of)
    assert takes(EIGHT_OF_WORDS[tile], x, w)
    y = cuda.by_kernel(x, w, x.dtype, EIGHT_OF_WORDS[tile]).double().numpy()
    exact, dense = x.double().numpy(), of.dequantise().astype(np.float64)
    want, bound = exact @ dense.T, np.abs(exact) @ np.abs(dense).T
    rounding = np.abs(want) * float(torch.finfo(x.dtype).eps) / 2
    return float(((np.abs(y - want) - rounding) / bound).max())


def main(cases: list[Any]) -> list[float]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JITFunction, "run", launch)
        patched.setattr(cuda_few, "overlapping", lambda device: {"PDL": True, "launch_pdl": True})
        return [furthest(*case) for case in cases]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
