"""Declarations of kernels: operands, parameters, and the bytes that a call may access.

Each kernel's folder has its own (kernels/*/declare.py; catalogue.py finds them). They determine the Python encoder
(encode.py) and the C++ decoder with its bounds checks (codegen.py), so the two cannot drift. Standard library only,
because the native build runs codegen.py before anything is installed.

Sizes are expressions with the same meaning in Python and C++: the kernel's own parameters, `+`, `-`, `*`, most(size),
which is the bound of a size of the program, and the functions of layout.py and native/layout.hpp. The sizes of a
program are its symbols, followed by derived dimensions and numbers; parameters that begin with `rows`, and those of the
type `size`, are numbers of sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Space(IntEnum):
    """The buffer that an operand's offset refers to."""

    NONE = 0  # an absent optional operand
    WEIGHTS = 1  # the engine's packed weights, read only
    ACTIVATIONS = 2  # the planned arena of one step


class RowFormat(IntEnum):
    """How one row of activations is stored. The format of a matmul's weights determines that of its rows."""

    F32 = 0  # n floats
    BF16 = 1  # groups of bfloat16, each group zero-padded to a multiple of 8
    Q8 = 2  # the same groups as int8, then one float scale and one int32 sum of codes per group
    HADAMARD_Q8 = 3  # like Q8; each group is multiplied by a Hadamard matrix first (see matmul/pack.py)


class WeightFormat(IntEnum):
    """How one matrix is packed: panels of 32 outputs, K in the order of the inner loop (see matmul/pack.py)."""

    F32 = 0
    BF16 = 1
    W8 = 2
    W4 = 3
    FP8 = 4  # E4M3 bytes, and a float scale per output


class Scaling(IntEnum):
    """How codes of W8 and W4 are scaled: + 1 with minimums, + 2 in two levels (see matmul/pack.py)."""

    PLAIN = 0  # codes are signed, each group has a float16 scale
    MINIMUMS = 1  # codes count from 0, each group also has a float16 minimum
    LEVELS = 2  # signed; a group's scale is an int8 times a float16 shared by 256 inputs
    LEVELS_MINIMUMS = 3  # from 0; scales and minimums are such products


@dataclass(frozen=True, slots=True)
class Operand:
    name: str
    access: str  # "in", "out", "inout", "weight"; followed by "?" if it is optional
    size: str  # bytes, as an expression
    ctype: str = "float"


Param = int | float | Sequence[int] | Sequence[float]  # the value of a parameter in a call


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of a kernel that never changes its result; 0: the kernel's default rule."""

    name: str
    high: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """`params` are "i32 name", "f32 name" or "size name"; `checks` are C++ and Python conditions on a call.

    scratch: floats of scratch memory per worker, a C++ expression of the parameters
    scratch_type: a structure in its native.hpp that a worker keeps there instead
    """

    name: str
    purpose: str
    operands: tuple[Operand, ...]
    params: tuple[str, ...]
    checks: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()
    scratch: str = ""
    scratch_type: str = ""

    @property
    def fields(self) -> list[tuple[str, str, int]]:
        """Return (type, name, length) of each parameter; the length of a scalar is 1."""
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
MAX_SIZES = 1 << 16  # derived sizes of one program
MAX_RANK = 8  # of values that kernels index by extents
MAX_CACHES = 8

MAX_EXPERTS = 1024  # of a layer
MAX_HEAD = 512  # elements of a key or a value
MAX_PARAM = 1 << 24  # largest value of an integer parameter: kMaxParam of native/program_reader.hpp

ROWS = "most(rows)"
LEGAL_ROWS = "rows >= 0"

MAX_HADAMARD = 4096  # most elements of a transformed group: a kernel holds one beside its row
ZERO_GROUP_THRESHOLD = (
    2e-34  # a group whose largest magnitude is not above it becomes zeros: the inverse scale would be infinite
)
HADAMARD_BLOCK = 128  # most elements that are mixed: a larger number did not lower the KL (docs/log.md)
LEGAL_HADAMARD = (
    f"format != {RowFormat.HADAMARD_Q8} or group > 0",
    f"format != {RowFormat.HADAMARD_Q8} or group <= {MAX_HADAMARD}",
)
