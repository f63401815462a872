"""One declaration per kernel: its operands, its parameters, the bytes it may touch.

From these lines come the Python encoder (encode.py) and the C++ decoder with its bounds checks (codegen.py), so the two
cannot drift. Standard library only: the native build runs codegen.py before anything is installed.

Sizes are written as expressions that mean the same in Python and in C++: the kernel's own parameters, `+`, `-`, `*`,
most(symbol), which is the bound of a dimension that only a run knows, and the functions of layout.py and
native/layout.hpp. Parameters that begin with `rows` number the program's symbols.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum


class Space(IntEnum):
    """Which buffer an operand's offset counts in."""

    NONE = 0  # an optional operand that is absent
    WEIGHTS = 1  # the engine's packed weights, read only
    ACTIVATIONS = 2  # the planned arena of one step


class RowFormat(IntEnum):
    """How one row of activations is stored. Matrix products read the format that their weights ask for."""

    F32 = 0  # n floats
    BF16 = 1  # groups of bfloat16, each group zero-padded to a multiple of 8
    Q8 = 2  # the same groups as int8, then one float scale and one int32 sum of codes per group


class WeightFormat(IntEnum):
    """How one matrix is packed: panels of 32 outputs, K in the order that the inner loop reads (see matmul/pack.py)."""

    F32 = 0
    BF16 = 1
    W8 = 2
    W4 = 3


@dataclass(frozen=True, slots=True)
class Operand:
    name: str
    access: str  # "in", "out", "inout", "weight", or with a "?" behind it where it may be absent
    size: str  # bytes, as an expression
    ctype: str = "float"


@dataclass(frozen=True, slots=True)
class Knob:
    """Something about how a kernel works that never changes its result; 0 leaves it to the kernel."""

    name: str
    high: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """`params` are "i32 name" or "f32 name"; `checks` are C++ and Python conditions that a legal step satisfies."""

    name: str
    purpose: str
    operands: tuple[Operand, ...]
    params: tuple[str, ...]
    checks: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()

    @property
    def fields(self) -> list[tuple[str, str, int]]:
        """(type, name, length) of each parameter; length 1 for a scalar."""
        return [_field(p) for p in self.params]


def _field(param: str) -> tuple[str, str, int]:
    kind, name = param.split()
    if "[" not in name:
        return kind, name, 1
    name, length = name.rstrip("]").split("[")
    return kind, name, int(length)


# An element-wise expression: up to 24 operations on 8 registers and up to 8 immediates (see kernels/expression.py).
MAX_OPERATIONS, MAX_REGISTERS, MAX_IMMEDIATES, MAX_INPUTS = 24, 8, 8, 4
EXPRESSION = (f"i32 code[{MAX_OPERATIONS}]", f"f32 imm[{MAX_IMMEDIATES}]")

MAX_KNOBS = 4  # of one kernel
MAX_SYMBOLS = 8  # of one program
MAX_CACHES = 8

MAX_HEAD = 512  # elements of a key or a value

ROWS = "most(rows)"
LEGAL_ROWS = "rows >= 0"

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "embed",
        "y[i] = table[ids[i]] * scale; NaN for an id beyond the table",
        (
            Operand("ids", "in", f"{ROWS} * 4", "int32_t"),
            Operand("table", "weight", "vocab * n * (4 + bf16 * -2)", "uint8_t"),
            Operand("y", "out", f"{ROWS} * n * 4"),
        ),
        ("i32 rows", "i32 n", "i32 vocab", "i32 bf16", "f32 scale"),
        (LEGAL_ROWS, "n > 0", "vocab > 0", "bf16 >= 0", "bf16 <= 1"),
    ),
    Kernel(
        "rms_norm",
        "y = x / sqrt(mean(x^2) + eps) * w over each run of n, stored as f32, bf16 or int8 groups",
        (
            Operand("x", "in", f"{ROWS} * x_stride * 4"),
            Operand("w", "weight", "n * 4"),
            Operand("y", "out", f"{ROWS} * y_stride", "uint8_t"),
        ),
        ("i32 rows", "i32 runs", "i32 n", "i32 x_stride", "i32 y_stride", "i32 format", "i32 group", "f32 eps"),
        (
            LEGAL_ROWS,
            "n > 0",
            "runs > 0",
            "x_stride >= runs * n",
            "format >= 0",
            f"format <= {max(RowFormat)}",
            "format == 0 or runs == 1",
            "group >= 0",
            "y_stride % 4 == 0",
            "format != 0 or y_stride >= runs * n * 4",
            "format == 0 or y_stride >= row_bytes(format, n, group)",
        ),
    ),
    Kernel(
        "layer_norm",
        "y = (x - mean(x)) / sqrt(variance(x) + eps) * w + b, stored as f32, bf16 or int8 groups",
        (
            Operand("x", "in", f"{ROWS} * x_stride * 4"),
            Operand("w", "weight", "n * 4"),
            Operand("b", "weight", "n * 4"),
            Operand("y", "out", f"{ROWS} * y_stride", "uint8_t"),
        ),
        ("i32 rows", "i32 n", "i32 x_stride", "i32 y_stride", "i32 format", "i32 group", "f32 eps"),
        (
            LEGAL_ROWS,
            "n > 0",
            "x_stride >= n",
            "format >= 0",
            f"format <= {max(RowFormat)}",
            "group >= 0",
            "y_stride % 4 == 0",
            "y_stride >= row_bytes(format, n, group)",
        ),
    ),
    Kernel(
        "normalise",
        "y = x / max(|x|, eps), row by row",
        (
            Operand("x", "in", f"{ROWS} * x_stride * 4"),
            Operand("y", "out", f"{ROWS} * n * 4"),
        ),
        ("i32 rows", "i32 n", "i32 x_stride", "f32 eps"),
        (LEGAL_ROWS, "n > 0", "x_stride >= n"),
    ),
    Kernel(
        "convert",
        "y = x as bf16 or int8 groups, one scale amax/127 per group",
        (
            Operand("x", "in", f"{ROWS} * x_stride * 4"),
            Operand("y", "out", f"{ROWS} * y_stride", "uint8_t"),
        ),
        ("i32 rows", "i32 n", "i32 x_stride", "i32 y_stride", "i32 format", "i32 group"),
        (
            LEGAL_ROWS,
            "n > 0",
            "x_stride >= n",
            "format >= 1",
            f"format <= {max(RowFormat)}",
            "group >= 0",
            "y_stride % 4 == 0",
            "y_stride >= row_bytes(format, n, group)",
        ),
    ),
    Kernel(
        "matmul",
        "y = epilogue(x @ w.T + bias) + residual; x and w in the formats of one numerics class",
        (
            Operand("x", "in", f"{ROWS} * x_stride", "uint8_t"),
            Operand("w", "weight", "matrix_bytes(weights, n, k, group)", "uint8_t"),
            Operand("bias", "weight?", "n * 4"),
            Operand("residual", "in?", f"{ROWS} * y_stride * 4"),
            Operand("y", "out", f"{ROWS} * y_stride * 4"),
        ),
        (
            "i32 rows",
            "i32 n",
            "i32 k",
            "i32 group",
            "i32 format",
            "i32 weights",
            "i32 x_stride",
            "i32 y_stride",
            "i32 gated",
            "i32 tiles",  # bfloat16 products are summed as tdpbf16ps does it, not as vdpbf16ps
            *EXPRESSION,
        ),
        (
            LEGAL_ROWS,
            "n > 0",
            "k > 0",
            "group >= 0",
            "format >= 0",
            f"format <= {max(RowFormat)}",
            "weights >= 0",
            f"weights <= {max(WeightFormat)}",
            "gated >= 0",
            "gated <= 1",
            "tiles >= 0",
            "tiles <= 1",
            "tiles == 0 or weights == 1",
            "gated == 0 or n % 32 == 0",
            "group % 4 == 0",
            "weights < 2 or group > 0",
            "weights < 2 or format >= 1",
            "weights != 0 or format == 0",
            "weights != 1 or format == 1",
            "weights > 1 or group == 0",
            "x_stride % 4 == 0",
            "x_stride >= row_bytes(format, k, group)",
            "gated == 1 or y_stride >= n",
            "gated == 0 or up(y_stride, 16) * 2 == n",
        ),
        (
            Knob("tile_rows", 64),  # rows of one tile at most
            Knob("task_panels", 1 << 20),  # panels of 32 outputs that a worker takes at a time
            Knob("ahead", 1 << 20),  # how many bytes ahead of their use weights are fetched
        ),
    ),
    Kernel(
        "rope",
        "rotate q and k (halves d and d + D/2) by their positions, in place; write k and v into the pages of a cache",
        (
            Operand("q", "inout?", f"{ROWS} * q_stride * 4"),
            Operand("k", "inout?", f"{ROWS} * k_stride * 4"),
            Operand("v", "in?", f"{ROWS} * v_stride * 4"),
            Operand("positions", "in?", f"{ROWS} * 4", "int32_t"),
            Operand("table", "weight?", "context * head_dim * 4"),
        ),
        (
            "i32 rows",
            "i32 heads",
            "i32 kv_heads",
            "i32 head_dim",
            "i32 value_dim",
            "i32 q_stride",
            "i32 k_stride",
            "i32 v_stride",
            "i32 context",
            "i32 cache",
            "i32 layer",
        ),
        (
            LEGAL_ROWS,
            "heads >= 0",
            "kv_heads >= 0",
            "head_dim > 0",
            "head_dim % 8 == 0",
            f"head_dim <= {MAX_HEAD}",
            "value_dim > 0 or layer < 0",
            f"value_dim <= {MAX_HEAD}",
            "context > 0",
            "cache >= 0",
            "layer >= 0 - 1",
            "q_stride >= heads * head_dim",
            "k_stride >= kv_heads * head_dim",
            "v_stride >= kv_heads * value_dim or layer < 0",
        ),
    ),
    Kernel(
        "attention",
        "y = softmax(q k^T * scale) v over a sequence's keys at positions up to its own, or all, from a cache's pages",
        (
            Operand("q", "in", f"{ROWS} * q_stride * 4"),
            Operand("y", "out", f"{ROWS} * heads * value_dim * 4"),
        ),
        (
            "i32 rows",
            "i32 heads",
            "i32 kv_heads",
            "i32 head_dim",
            "i32 value_dim",
            "i32 q_stride",
            "i32 cache",
            "i32 layer",
            "i32 causal",
            "f32 scale",
        ),
        (
            LEGAL_ROWS,
            "value_dim > 0",
            f"value_dim <= {MAX_HEAD}",
            "cache >= 0",
            "causal >= 0",
            "causal <= 1",
            "heads > 0",
            "kv_heads > 0",
            "heads % kv_heads == 0",
            "head_dim > 0",
            "head_dim % 8 == 0",
            "layer >= 0",
            "q_stride >= heads * head_dim",
            f"head_dim <= {MAX_HEAD}",
        ),
    ),
    Kernel(
        "elementwise",
        "y = expression(a, b, c, d), a small program over registers; an operand is a matrix or one row for all",
        (
            Operand("a", "in", f"(({ROWS} - 1) * a_stride + n) * 4"),
            Operand("b", "in?", f"(({ROWS} - 1) * b_stride + n) * 4"),
            Operand("c", "in?", f"(({ROWS} - 1) * c_stride + n) * 4"),
            Operand("d", "in?", f"(({ROWS} - 1) * d_stride + n) * 4"),
            Operand("y", "out", f"{ROWS} * n * 4"),
        ),
        ("i32 rows", "i32 n", "i32 a_stride", "i32 b_stride", "i32 c_stride", "i32 d_stride", *EXPRESSION),
        (
            LEGAL_ROWS,
            "n > 0",
            "a_stride == 0 or a_stride >= n",
            "b_stride == 0 or b_stride >= n",
            "c_stride == 0 or c_stride >= n",
            "d_stride == 0 or d_stride >= n",
        ),
    ),
    Kernel(
        "gather_rows",
        "y[r] = x[index[r]]; NaN for an index beyond x",
        (
            Operand("x", "in", "most(rows_from) * x_stride * 4"),
            Operand("index", "in", f"{ROWS} * 4", "int32_t"),
            Operand("y", "out", f"{ROWS} * n * 4"),
        ),
        ("i32 rows", "i32 rows_from", "i32 n", "i32 x_stride"),
        (LEGAL_ROWS, "rows_from >= 0", "n > 0", "x_stride >= n"),
    ),
    Kernel(
        "mean_rows",
        "y[s] = the mean of the lengths[s] rows of x that come behind those of the sequences before",
        (
            Operand("x", "in", "most(rows_from) * x_stride * 4"),
            Operand("lengths", "in", f"{ROWS} * 4", "int32_t"),
            Operand("y", "out", f"{ROWS} * n * 4"),
        ),
        ("i32 rows", "i32 rows_from", "i32 n", "i32 x_stride"),
        (LEGAL_ROWS, "rows_from >= 0", "n > 0", "x_stride >= n"),
    ),
    Kernel(
        "rescore",
        "the `count` largest logits of each sampled row again, from 8-bit weights",
        (
            Operand("x", "in", f"{ROWS} * x_stride", "uint8_t"),
            Operand("w", "weight", "n * byte_row_bytes(k, group)", "uint8_t"),
            Operand("y", "inout", f"{ROWS} * n * 4"),
        ),
        ("i32 rows", "i32 n", "i32 k", "i32 group", "i32 x_stride", "i32 count"),
        (
            LEGAL_ROWS,
            "n > 0",
            "k > 0",
            "group > 0",
            "group % 4 == 0",
            "count > 0",
            "x_stride % 4 == 0",
            "x_stride >= row_bytes(2, k, group)",
        ),
    ),
)


def declarations_digest() -> str:
    """Of all that a program's bytes mean: kernels, operands, parameters, sizes and checks, in their order."""
    said = [(k.name, [(o.name, o.access, o.size, o.ctype) for o in k.operands], k.params, k.checks) for k in KERNELS]
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()
