"""When a kernel on a GPU may begin: from Hopper on while those before it still run (programmatic dependent launch).

A small kernel takes some 2 us and the pause before it another, with a device's memory idle. A kernel that is launched
with `launch_pdl` begins as soon as all programs of the one before have said that it may (or ended): it computes its
addresses, asks for weights, and waits.

The rule that keeps answers right, held by tests over the sources and over what they compile to: every kernel that is
launched so waits, in each of its programs, before the first element that it reads of what another kernel writes, and
before the first that it writes (another may still read what was there). Only what nobody writes while steps run may be
touched before: weights and their scales, tables of constants. What has been waited for has ended, all that it waited
for has too, and what they wrote can be seen. A kernel without `launch_pdl`, such as PyTorch's, begins when those before
it have ended, as ever.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FROM = (9, 0)  # the first capability that has it
OVERLAP = True  # False: nothing overlaps, to measure what this brings

PIECE = tl.constexpr(256)  # bytes
_ASKS = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0; }"
)


@triton.jit
def after_those_before(PDL: tl.constexpr):
    """From here on what earlier kernels wrote can be read, and what they read can be written."""
    if PDL:
        gdc_wait()


@triton.jit
def lets_next_begin(PDL: tl.constexpr):
    """The next kernel may take what room is left: it waits for this one's end where it must. Best said first."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def asks_for(w, first, rows, row_bytes, ROWS: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr):
    """Before the wait: of ROWS rows of constants the first BYTES go from memory into the cache of all multiprocessors.

    w (rows, row_bytes) begins at a multiple of 16, as do its rows; from row `first` on; whole pieces are asked for.
    Nothing is read here: what others write would only be asked for too early to be of use.
    """
    if PDL and BYTES >= PIECE:
        pieces: tl.constexpr = BYTES // PIECE
        i = tl.arange(0, ROWS * pieces)
        row, at = first + i // pieces, i % pieces * PIECE
        requested = ((row < rows) & (at + PIECE <= row_bytes)).to(tl.int32)
        addresses = w.to(tl.int64) + row.to(tl.int64) * row_bytes + at
        tl.inline_asm_elementwise(_ASKS, "=r,l,r", [addresses, requested], dtype=tl.int32, is_pure=False, pack=1)


def cdiv(n: int, each: int) -> int:
    """For launches, of which a step has hundreds: Triton's own takes some 3 us on the host."""
    return -(-n // each)


def overlapping(device: torch.device) -> dict[str, bool]:
    """Of a launch there, to be handed to a kernel that has a PDL: the same answer for it and for the launch."""
    overlaps = OVERLAP and _may_overlap(device)
    return {"PDL": overlaps, "launch_pdl": overlaps}


@cache
def _may_overlap(device: torch.device) -> bool:
    """On a real device that has it; never in the interpreter, which takes tensors of a CPU."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return bool(torch.cuda.get_device_capability(device) >= FROM)
