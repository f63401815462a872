"""Register code of element-wise expressions (graph/expressions.py), which the kernels run.

It is a list of op | dst << 8 | left << 16 | right << 24 over 8 registers; inputs start as registers 0, 1, ...; op 0
ends it and its `left` is the register of the result (kernels/elementwise/native.hpp reads it). A choice has the
register of its condition three bits above dst. Operations in BROADCAST_ONLY are supported by the kernel broadcast only.
"""

from collections import Counter
from collections.abc import Sequence

from millrace.graph.expressions import COMPARISONS, WHERE, Tree, as_tree, n_operands
from millrace.kernels.declare import MAX_IMMEDIATES, MAX_OPERATIONS, MAX_REGISTERS

# In the order of enum Op in elementwise/native.hpp.
OPERATIONS = (
    "end",
    "add",
    "sub",
    "mul",
    "div",
    "max",
    "min",
    "neg",
    "exp",
    "sigmoid",
    "tanh",
    "sqrt",
    "abs",
    "immediate",
    "erf",
)
BROADCAST_ONLY = (*COMPARISONS, WHERE)  # in the order of enum More in broadcast/native.hpp
_NAMES = OPERATIONS + BROADCAST_ONLY
_CODES = {name: i for i, name in enumerate(_NAMES)}


class TooComplexError(Exception):
    """The expression needs more registers, operations or numbers than a kernel has: it must be split."""


def compile_tree(tree: Tree, n_inputs: int) -> tuple[list[int], list[float]]:
    """Return (code, immediates) for the kernels. raises TooComplexError if the expression does not fit"""
    return _Allocator(tree, n_inputs).result


def tree_of(code: Sequence[int], numbers: Sequence[float], n_inputs: int) -> Tree:
    """Return the tree from which `compile_tree` made this code; shared registers become shared subtrees."""
    registers: list[Tree] = [*range(n_inputs), *[0] * (MAX_REGISTERS - n_inputs)]
    for word in code:
        name, to, left, right = _NAMES[word & 255], word >> 8 & 7, word >> 16 & 255, word >> 24 & 255
        if name == "end":
            return registers[left]
        if name == "immediate":
            registers[to] = float(numbers[left])
        else:
            chosen = [registers[word >> 11 & 7]] if name == WHERE else []
            registers[to] = (name, *chosen, registers[left], *([registers[right]] if n_operands(name) > 1 else []))
    raise AssertionError("an expression without an end")


def needs_broadcast(code: Sequence[int]) -> bool:
    """Return whether the code has operations that only the kernel broadcast supports."""
    return any(word & 255 >= len(OPERATIONS) for word in code)


def _key(tree: Tree) -> Tree:
    """Return a key for a tree: input 1 and the number 1.0 are equal in Python, but not here."""
    if isinstance(tree, float):
        return ("number", tree)
    return tree if isinstance(tree, int) else (tree[0], *(_key(as_tree(t)) for t in tree[1:]))


class _Allocator:
    """Emits each distinct subtree once, after its operands; a register is reused after its last reader."""

    def __init__(self, tree: Tree, n_inputs: int) -> None:
        self._readers: Counter[Tree] = Counter()
        tree = _key(tree)
        self._count(tree)
        self._place: dict[Tree, int] = {i: i for i in range(n_inputs)}
        self._free = [r for r in range(MAX_REGISTERS) if r >= n_inputs or not self._readers[r]]
        self._code: list[int] = []
        self._numbers: list[float] = []
        last = self._emit(tree)
        self._code.append(last << 16)
        if len(self._code) > MAX_OPERATIONS or len(self._numbers) > MAX_IMMEDIATES:
            raise TooComplexError
        self.result = (self._code, self._numbers)

    def _count(self, tree: Tree) -> None:
        self._readers[tree] += 1
        if isinstance(tree, tuple) and tree[0] != "number" and self._readers[tree] == 1:
            for operand in tree[1:]:
                self._count(as_tree(operand))

    def _emit(self, tree: Tree) -> int:
        if tree in self._place:
            return self._place[tree]
        assert isinstance(tree, tuple), tree
        if tree[0] == "number":
            self._numbers.append(float(str(tree[1])))
            register = self._take()
            self._code.append(_CODES["immediate"] | register << 8 | len(self._numbers) - 1 << 16)
        else:
            operands = [as_tree(t) for t in tree[1:]]
            sources = [self._emit(t) for t in operands]
            for t in operands:
                self._release(t)
            register = self._take()
            condition, left = (sources[0], sources[1]) if tree[0] == WHERE else (0, sources[0])
            self._code.append(_CODES[str(tree[0])] | register << 8 | condition << 11 | left << 16 | sources[-1] << 24)
        self._place[tree] = register
        return register

    def _take(self) -> int:
        if not self._free:
            raise TooComplexError
        return self._free.pop()

    def _release(self, tree: Tree) -> None:
        self._readers[tree] -= 1
        if self._readers[tree] == 0:
            self._free.append(self._place[tree])
