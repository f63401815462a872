"""In which words a kernel declares itself: its operands, its parameters, the bytes it may touch.

Each kernel's folder holds its own (kernels/*/declare.py; catalogue.py finds them). From these lines come the Python
encoder (encode.py) and the C++ decoder with its bounds checks (codegen.py), so the two cannot drift. Standard library
only, here and there: the native build runs codegen.py before anything is installed.

Sizes are written as expressions that mean the same in Python and in C++: the kernel's own parameters, `+`, `-`, `*`,
most(size), which is the bound of a size of the program, and the functions of layout.py and native/layout.hpp.
The sizes of a program are its symbols, and behind them the dimensions that are made of these or are numbers; parameters
that begin with `rows`, and those of the type `size`, number them.
"""

from collections.abc import Sequence
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
    HADAMARD_Q8 = 3  # as Q8, each group times a Hadamard matrix before it is rounded (see matmul/pack.py)


class WeightFormat(IntEnum):
    """How one matrix is packed: panels of 32 outputs, K in the order that the inner loop reads (see matmul/pack.py)."""

    F32 = 0
    BF16 = 1
    W8 = 2
    W4 = 3
    FP8 = 4  # bytes of E4M3, and a float scale for each output


class Scaling(IntEnum):
    """What makes weights of the codes of W8 and W4: + 1 with minimums, + 2 in two levels (see matmul/pack.py)."""

    PLAIN = 0  # codes are signed, each group has a float16 scale
    MINIMUMS = 1  # codes count from 0, each group has a float16 minimum besides
    LEVELS = 2  # signed; the scale of a group is an int8 times a float16 of 256 inputs
    LEVELS_MINIMUMS = 3  # from 0; scales and minimums are such products


@dataclass(frozen=True, slots=True)
class Operand:
    name: str
    access: str  # "in", "out", "inout", "weight", or with a "?" behind it where it may be absent
    size: str  # bytes, as an expression
    ctype: str = "float"


Param = int | float | Sequence[int] | Sequence[float]  # what a call gives for a parameter


@dataclass(frozen=True, slots=True)
class Knob:
    """Something about how a kernel works that never changes its result; 0 leaves it to the kernel."""

    name: str
    high: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """`params` are "i32 name", "f32 name" or "size name"; `checks` are C++ and Python conditions that a step satisfies.

    scratch: floats that each worker needs for itself, in C++, of the parameters
    scratch_type: of its native.hpp, the structure that a worker keeps there instead
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
MAX_SIZES = 1 << 16  # that are made of them
MAX_RANK = 8  # of values that kernels walk extent by extent
MAX_CACHES = 8

MAX_HEAD = 512  # elements of a key or a value
MAX_PARAM = 1 << 24  # of a kernel's parameter: kMaxParam of native/program_reader.hpp

ROWS = "most(rows)"
LEGAL_ROWS = "rows >= 0"

MOST_HADAMARD = 4096  # elements of a group that is transformed: a kernel holds one beside its row
NOTHING = 2e-34  # a group that reaches no further is all zeros as integers: the factor to these would be infinite
HADAMARD_BLOCK = 128  # that are mixed with each other at most: of more, KL was no smaller (docs/log.md)
LEGAL_HADAMARD = (
    f"format != {RowFormat.HADAMARD_Q8} or group > 0",
    f"format != {RowFormat.HADAMARD_Q8} or group <= {MOST_HADAMARD}",
)
