"""The measured roofline of a GPU: reading and copying its memory, and large matmuls by the libraries that engines use.

Inputs are random: with zeros a GPU draws less power, and so runs faster.
"""

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from millrace.engine.cuda.device_lookup import Gpu, first_line
from millrace.engine.cuda.host_device_copy import on_device_context
from millrace.errors import MachineError, mib
from millrace.kernels.matmul.coded import E4M3

REPEATS = 7
BYTES, SIDE = 4 << 30, 8192  # bytes to read; side of a matrix: both far larger than caches, and some milliseconds long
MIN_BYTES = 256 << 20  # with less, a cache would be measured
_TESTED = 1 << 20, 64  # of a CPU's tensors, in tests


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """read, copied: bytes per second, a copy's in both directions; products: operations per second, by precision"""

    read: float
    copied: float
    products: Mapping[str, float]


def measured(gpu: Gpu, precisions: Collection[str]) -> DeviceRates:
    """Measure a GPU. precisions: of "fp16", "bf16", "int8", "fp8", the names of machine/devices.py; float32 is always
    measured

    Takes a few seconds. raises MachineError if the device fails, or has too little free memory
    """
    device = torch.device(gpu.device)
    n_bytes, side = (min(BYTES, gpu.free_bytes // 4), SIDE) if device.type == "cuda" else _TESTED
    if device.type == "cuda" and n_bytes < MIN_BYTES:
        raise MachineError(f"{gpu.name} has {mib(gpu.free_bytes)} free", f"{mib(4 * MIN_BYTES)}, to measure it",
                           "see in nvidia-smi who else uses it")  # fmt: skip
    try:
        with torch.inference_mode(), on_device_context(device):
            return _rates(device, n_bytes, side, precisions)
    except RuntimeError as error:  # raised by PyTorch for a device
        raise MachineError(f"{gpu.name} failed while it was measured: {first_line(error)}", "a GPU that works",
                           "see what nvidia-smi says") from error  # fmt: skip


def _rates(device: torch.device, n_bytes: int, side: int, precisions: Collection[str]) -> DeviceRates:
    read, copied = _memory(device, n_bytes)
    products = {}
    for precision in ("fp32", *precisions):
        if precision in _PRODUCTS:
            a, b = (torch.randn((side, side), device=device) for _ in range(2))
            products[precision] = 2.0 * side**3 / seconds(_PRODUCTS[precision](a, b), device)
    return DeviceRates(read, copied, products)


def _memory(device: torch.device, n_bytes: int) -> tuple[float, float]:
    source = torch.randn(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    return n_bytes / seconds(source.sum, device), 2 * n_bytes / seconds(lambda: target.copy_(source), device)


def _matmul(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Callable[[], object]]:
    def product(a: Tensor, b: Tensor) -> Callable[[], object]:
        x, w = a.to(dtype), b.to(dtype)
        return lambda: functional.linear(x, w)

    return product


def _int8(a: Tensor, b: Tensor) -> Callable[[], object]:
    x, w = ((m * 32).round().clamp(-127, 127).to(torch.int8) for m in (a, b))
    return lambda: torch._int_mm(x, w.t())


def _fp8(a: Tensor, b: Tensor) -> Callable[[], object]:
    """Return an FP8 matmul as an engine's: a scale per row and column, sums with fast accumulation."""
    n = len(a) if a.device.type == "cuda" else 1  # PyTorch on a CPU takes row scales from 2.13 on
    x, w, ones = a.to(E4M3), b.to(E4M3).t(), torch.ones(n, 1, device=a.device)
    return lambda: torch._scaled_mm(x, w, scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


_PRODUCTS: Mapping[str, Callable[[Tensor, Tensor], Callable[[], object]]] = {
    "fp32": _matmul(torch.float32), "fp16": _matmul(torch.float16), "bf16": _matmul(torch.bfloat16),
    "int8": _int8, "fp8": _fp8,
}  # fmt: skip


def seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median of some runs, after a warm-up run."""
    samples = []
    for _ in range(repeats + 1):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
