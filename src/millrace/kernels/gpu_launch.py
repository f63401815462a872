"""Launches of GPU kernels: from Hopper on, a kernel may start before the previous ones end (programmatic dependent
launch).

A small kernel takes some 2 us, and the gap before it another, in which the device's memory is idle. A kernel launched
with `launch_pdl` starts as soon as all programs of the previous kernel have allowed it (or ended): it computes
addresses, prefetches weights, and waits.

The rule that keeps results correct, which tests check in the sources and in compiled code: every kernel launched so
waits, in each of its programs, before it first reads what another kernel writes, and before it first writes (another
kernel may still read the old data). Only data that no step writes may be accessed before: weights and their scales,
constant tables. After the wait, the previous kernel has ended, with everything that it waited for, and its writes are
visible. A kernel without `launch_pdl`, such as PyTorch's, starts when all previous kernels have ended, as usual.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FROM = (9, 0)  # the first compute capability that supports it
OVERLAP = True  # False: no overlap, to measure the gain

PIECE = tl.constexpr(256)  # bytes
_ASKS = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0; }"
)


@triton.jit
def after_those_before(PDL: tl.constexpr):
    """Wait: afterwards, results of earlier kernels can be read, and their inputs overwritten."""
    if PDL:
        gdc_wait()


@triton.jit
def lets_next_begin(PDL: tl.constexpr):
    """Allow the next kernel to start on free multiprocessors; it waits for this one itself. Best called early."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def asks_for(w, first, rows, row_bytes, ROWS: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr):
    """Prefetch constants before the wait: the first BYTES of ROWS rows go from memory to the device-wide cache.

    w (rows, row_bytes) and its rows are aligned to 16 bytes; from row `first` on, in whole pieces.
    Nothing is loaded into registers; data that other kernels write must not be prefetched.
    """
    if PDL and BYTES >= PIECE:
        pieces: tl.constexpr = BYTES // PIECE
        i = tl.arange(0, ROWS * pieces)
        row, at = first + i // pieces, i % pieces * PIECE
        requested = ((row < rows) & (at + PIECE <= row_bytes)).to(tl.int32)
        addresses = w.to(tl.int64) + row.to(tl.int64) * row_bytes + at
        tl.inline_asm_elementwise(_ASKS, "=r,l,r", [addresses, requested], dtype=tl.int32, is_pure=False, pack=1)


def cdiv(n: int, divisor: int) -> int:
    """Divide and round up. Triton's own function takes some 3 us on the host, and a step has hundreds of launches."""
    return -(-n // divisor)


def overlapping(device: torch.device) -> dict[str, bool]:
    """Return the launch options, also for a kernel's PDL argument, so that kernel and launch agree."""
    overlaps = OVERLAP and _may_overlap(device)
    return {"PDL": overlaps, "launch_pdl": overlaps}


@cache
def _may_overlap(device: torch.device) -> bool:
    """Return whether the device supports it; False in the interpreter, which runs on CPU tensors."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return bool(torch.cuda.get_device_capability(device) >= FROM)
