"""What a device was seen to reach: reading its memory, and products of large matrices."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from millrace.kernels.matmul.coded import E4M3

REPEATS = 7


@dataclass(frozen=True, slots=True)
class Rates:
    """read: bytes a second; bf16, fp8: operations a second, with float32 sums, fp8's with fast accumulation"""

    read: float
    copied: float
    bf16: float
    fp8: float

    def told(self) -> dict[str, float]:
        return asdict(self)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The median of some runs, after one that warms up."""
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


def measured(device: torch.device) -> Rates:
    n_bytes, n = (4 << 30, 8192) if device.type == "cuda" else (1 << 20, 64)
    source = torch.ones(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    x, w = a.bfloat16(), b.bfloat16()
    codes, weights = a.to(E4M3), b.to(E4M3).t()
    ones = torch.ones(n if device.type == "cuda" else 1, 1, device=device)  # a CPU's has one scale before 2.13

    def scaled() -> object:
        return torch._scaled_mm(
            codes, weights, scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    operations = 2.0 * n**3
    fp8 = operations / seconds(scaled, device) if has_fp8(device) else 0.0
    return Rates(
        n_bytes / seconds(source.sum, device), 2 * n_bytes / seconds(lambda: target.copy_(source), device),
        operations / seconds(lambda: x @ w, device), fp8,
    )  # fmt: skip


def has_fp8(device: torch.device) -> bool:
    return bool(device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9))
