"""The layout of packed rows and matrices in bytes. native/layout.hpp says the same in C++; a test compares them.

K (inputs of a matmul) is divided into groups; each group is zero-padded to a multiple of 8, so that 4-bit weights
always come in pairs of 4. `group` 0 means one group of all K, padded to 2 for bfloat16 pairs.
"""

from millrace.checkpoint.weights.quantized_matrix import SUPER_BLOCK
from millrace.graph.types import DType
from millrace.kernels.declare import RowFormat, Scaling, WeightFormat

PANEL = 32  # outputs per weight panel: two 16-lane vectors
LINE = 64  # bytes of a cache line
TYPES = (DType.F32, DType.I32, DType.F16, DType.I8, DType.I64, DType.BOOL)  # numbered in this order in kernels
SLAB = 1 << 24  # codes that become floats at a time, on a GPU: for a large head, all at once would take gigabytes


def up(x: int, multiple: int) -> int:
    return (x + multiple - 1) // multiple * multiple


def type_bytes(type: int) -> int:
    """Return the bytes of an element, by the number of its type in TYPES."""
    return (4, 4, 2, 1, 8, 1)[type]


def n_groups(k: int, group: int) -> int:
    return 1 if group == 0 else (k + group - 1) // group


def padded_k(k: int, group: int) -> int:
    """Return K with every group padded: element j of group g is at g * up(group, 8) + j."""
    if group == 0:
        return up(k, 2)
    n_full = (k - 1) // group
    return n_full * up(group, 8) + up(k - n_full * group, 8)


def row_bytes(format: int, k: int, group: int) -> int:
    """Return the bytes of one activation row of this RowFormat; Q8 has codes, then a float and an int32 per group.

    Packed rows are an odd number of cache lines apart, so that the rows of a tile never share one L1 set.
    """
    if format == RowFormat.F32:
        return k * 4
    kp = padded_k(k, group)
    raw = kp * 2 if format == RowFormat.BF16 else up(kp, 4) + 8 * n_groups(k, group)
    return (raw + LINE - 1) // LINE // 2 * 2 * LINE + LINE


def scaling_bytes(k: int, group: int, scaling: int) -> int:
    """Return the bytes of one panel's scales and minimums.

    Each are 32 float16 per group or, in two levels, 32 int8 per group, and 32 float16 before those of each super-block,
    which is always complete.
    """
    kinds = 1 + scaling % 2
    if scaling < Scaling.LEVELS:
        return n_groups(k, group) * LINE * kinds
    return up(k, SUPER_BLOCK) // SUPER_BLOCK * (LINE + SUPER_BLOCK // group * PANEL) * kinds


def panel_bytes(weights: int, k: int, group: int, scaling: int = Scaling.PLAIN) -> int:
    """Return the bytes of one panel of 32 outputs in this WeightFormat."""
    kp = padded_k(k, group)
    if weights == WeightFormat.F32:
        return k * PANEL * 4
    if weights == WeightFormat.BF16:
        return kp * PANEL * 2
    if weights == WeightFormat.FP8:
        return kp * PANEL + PANEL * 4
    return (kp * PANEL if weights == WeightFormat.W8 else kp * PANEL // 2) + scaling_bytes(k, group, scaling)


def matrix_bytes(weights: int, n: int, k: int, group: int, scaling: int = Scaling.PLAIN) -> int:
    return up(n, PANEL) // PANEL * panel_bytes(weights, k, group, scaling)


def byte_row_bytes(k: int, group: int) -> int:
    """Return the bytes of one output of an 8-bit matrix that is read by outputs: its codes, then its float16 scales."""
    return up(padded_k(k, group) + 2 * n_groups(k, group), LINE)
