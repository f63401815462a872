"""Probes for the measured roofline: native loops that read or multiply, and our own matmul kernels.

Each probe returns one figure per round, from which `machine.roofline` chooses.
"""

import ctypes
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from millrace.engine.native.executor import NativeProgram, StatelessExecutor
from millrace.errors import MachineError
from millrace.graph.types import Symbol
from millrace.kernels.declare import Param, RowFormat, Space, WeightFormat
from millrace.kernels.encode import Ref, encode
from millrace.kernels.layout import LINE, matrix_bytes, row_bytes, up
from millrace.kernels.library import library
from millrace.kernels.precision import BF16_BY_TILES
from millrace.machine.cpu import caches, memory
from millrace.machine.roofline import Roofline, measure_roofline

ROUNDS, ROUND_S = 8, 0.02
ROWS, N, K, GROUP = 128, 1024, 1024, 128  # compute-bound, but fast to measure
# our kernels -> entry of _INSTRUCTIONS
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", BF16_BY_TILES: "tiles", "w8a8": "int8", "w4a8": "int8"}
_INSTRUCTIONS = ("fp32", "bf16", "int8", "tiles")
_FORMATS = {
    "fp32": (RowFormat.F32, WeightFormat.F32, 0),
    "bf16": (RowFormat.BF16, WeightFormat.BF16, 0),
    BF16_BY_TILES: (RowFormat.BF16, WeightFormat.BF16, 0),
    "w8a8": (RowFormat.Q8, WeightFormat.W8, GROUP),
    "w4a8": (RowFormat.Q8, WeightFormat.W4, GROUP),
}
_ERROR_BYTES = 512
_FILL = 0x3F  # a number near 1 as float32, bfloat16 or float16; 63 as int8


def roofline_here(isa: str, threads: int) -> Roofline:
    """Measure this machine's roofline with the code of one instruction set; takes a few seconds."""
    return measure_roofline(
        caches(), threads, memory().available_bytes, partial(read_rates, isa), partial(matmul_rates, isa),
        partial(peak_rates, isa), {p: below for p, below in PRECISIONS.items() if below != "tiles" or isa == "amx"},
    )  # fmt: skip


def read_rates(isa: str, threads: int, bytes_per_thread: int) -> list[float]:
    """Return bytes per second over all threads, each reading its own huge-page buffer (a multiple of 1024) repeatedly.

    raises MachineError if this CPU lacks the instruction set
    """
    rates = np.zeros(ROUNDS)
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    failed = library().mr_probe_read(
        isa.encode(), threads, bytes_per_thread, ROUND_S, ROUNDS, rates.ctypes.data, error, _ERROR_BYTES
    )
    return _checked(rates, bool(failed), error.value)


def peak_rates(isa: str, precision: str, threads: int) -> list[float]:
    """Return operations per second of one of `_INSTRUCTIONS` on registers; 0 if this CPU lacks it."""
    rates = np.zeros(ROUNDS)
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    failed = library().mr_probe_rate(
        isa.encode(), threads, _INSTRUCTIONS.index(precision), ROUND_S, ROUNDS, rates.ctypes.data, error, _ERROR_BYTES
    )
    return _checked(rates, bool(failed), error.value)


def matmul_rates(isa: str, precision: str, threads: int) -> list[float]:
    """Return operations per second of our kernel on (ROWS, K) x (N, K)."""
    return [2.0 * ROWS * N * K / seconds for seconds in product_seconds(isa, precision, threads, ROWS, N, K)]


def product_bytes(precision: str, n: int, k: int) -> int:
    """Return the bytes of packed weights (n, k)."""
    _, weights, group = _FORMATS[precision]
    return matrix_bytes(weights, n, k, group)


def product_seconds(
    isa: str, precision: str, threads: int, rows: int, n: int, k: int, *, repeats: int = 1
) -> list[float]:
    """Return seconds per (rows, k) x (n, k) by our kernel, one figure per round. repeats: matmuls per program

    raises MachineError if this CPU lacks the instruction set, EngineError for sizes that no kernel takes
    """
    format, weights, group = _FORMATS[precision]
    product = ProbedMatmul(n, k, format, weights, group, precision == BF16_BY_TILES)
    return seconds_of(product, isa, threads, rows, repeats=repeats)


@dataclass(frozen=True, slots=True)
class ProbedMatmul:
    """Rows of `format`, (rows, k), times weights (n, k), both quantized in groups of `group` inputs; 0: no groups."""

    n: int
    k: int
    format: RowFormat
    weights: WeightFormat
    group: int
    tiles: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return matrix_bytes(self.weights, self.n, self.k, self.group)


def seconds_of(
    product: ProbedMatmul, isa: str, threads: int, rows: int, *, repeats: int = 1, matrices: int = 1
) -> list[float]:
    """Return seconds per matmul, one figure per round. A program has `repeats` of them, cycling through `matrices`.

    raises as `product_seconds`
    """
    n, k, group = product.n, product.k, product.group
    x_stride, w_bytes = row_bytes(product.format, k, group), up(product.nbytes, LINE)
    params: dict[str, Param] = {
        "rows": 0, "n": n, "k": k, "group": group, "x_group": group, "format": int(product.format),
        "weights": int(product.weights), "x_stride": x_stride, "y_stride": n, "tiles": int(product.tiles),
    }  # fmt: skip
    x, y = Ref(Space.ACTIVATIONS, 0), Ref(Space.ACTIVATIONS, rows * x_stride)
    calls = [encode("matmul", {"x": x, "w": Ref(Space.WEIGHTS, i * w_bytes), "y": y}, params) for i in range(matrices)]
    program = NativeProgram(
        calls=b"".join(calls[i % matrices] for i in range(repeats)), n_calls=repeats,
        weights=np.full(matrices * w_bytes, _FILL, np.uint8), weights_bytes=matrices * w_bytes,
        activation_bytes=rows * (x_stride + 4 * n), symbols={Symbol("rows"): rows},
    )  # fmt: skip
    network = StatelessExecutor(program, threads=threads, isa=isa)
    try:
        network.activations()[:] = _FILL
        return [seconds / repeats for seconds in _timed(network, rows)]
    finally:
        network.close()


def _timed(network: StatelessExecutor, rows: int) -> list[float]:
    """Return seconds of one run, averaged over each round."""
    start = time.perf_counter()
    network.compute([rows])
    once = time.perf_counter() - start
    repeats = max(1, int(ROUND_S / once))
    rounds = []
    for _ in range(max(2, min(ROUNDS, int(ROUNDS * ROUND_S / once)))):  # fewer if one run is long
        start = time.perf_counter()
        for _ in range(repeats):
            network.compute([rows])
        rounds.append((time.perf_counter() - start) / repeats)
    return rounds


def _checked(rates: "np.ndarray[tuple[int], np.dtype[np.float64]]", failed: bool, message: bytes) -> list[float]:
    if failed:
        raise MachineError(f"the probe failed: {message.decode()}", "a machine to measure", "free memory, or report it")
    result: list[float] = rates.tolist()
    return result
