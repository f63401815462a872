"""Result types of element-wise expressions: PyTorch's promotion rules, except that integer division truncates.

Types are ordered bool, i8, i32, i64, f16, f32; an operation returns the later one of its operands. A number with a
fraction converts integer operands to f32, others do not. Comparisons return bool. A tree is computed in int64, which
wraps, if all inputs are integers, and in float32 otherwise; it is rounded to its type once, at its end.
"""

from collections.abc import Sequence

from millrace.errors import GraphError
from millrace.graph.expressions import COMPARISONS, WHERE, Tree, as_tree
from millrace.graph.types import DType

_ORDER = (DType.BOOL, DType.I8, DType.I32, DType.I64, DType.F16, DType.F32)
_FRACTIONS = ("exp", "sigmoid", "tanh", "erf", "sqrt")  # operations whose results are not integers
_OF_BOOLS = ("max", "min")  # or, and
_EXACT = 1 << 24  # integers up to here are exact in float32, in which kernels hold them
_FIX = "convert with ops.cast"


def type_of(tree: Tree, types: Sequence[DType]) -> DType:
    """Return the type of a verified tree of such inputs. raises GraphError for operands of unsupported types"""
    result = _type(tree, types, {})
    return DType.F32 if result is None else result


def is_integer(tree: Tree, types: Sequence[DType]) -> bool:
    """Return whether it is computed in int64. raises GraphError for numbers that its kernel cannot hold"""
    parts = list(_parts(tree))
    numbers = [part for part in parts if isinstance(part, float)]
    if any(t.is_float for t in types) or any(isinstance(p, tuple) and p[0] in _FRACTIONS for p in parts):
        return False
    if not all(n.is_integer() for n in numbers):
        return False
    if any(abs(n) > _EXACT for n in numbers):
        raise GraphError(
            f"{max(numbers, key=abs):.0f} among whole numbers", f"numbers from {-_EXACT} to {_EXACT}",
            "make it a Table of i64",
        )  # fmt: skip
    return True


def _parts(tree: Tree) -> list[Tree]:
    """Return all of its parts, each once even if shared."""
    visited, level = dict[int, Tree](), {id(tree): tree}
    while level:
        visited |= level
        below = (as_tree(t) for part in level.values() if isinstance(part, tuple) for t in part[1:])
        level = {id(part): part for part in below if id(part) not in visited}
    return list(visited.values())


def _type(tree: Tree, types: Sequence[DType], cache: dict[int, DType | None]) -> DType | None:
    """Return the type; None for numbers only. cache: of parts seen before, by id"""
    if isinstance(tree, int):
        return types[tree]
    if isinstance(tree, float):
        return None
    if id(tree) not in cache:
        name, operands = str(tree[0]), [as_tree(t) for t in tree[1:]]
        cache[id(tree)] = _operation(name, operands, [_type(t, types, cache) for t in operands])
    return cache[id(tree)]


def _operation(name: str, operands: Sequence[Tree], types: Sequence[DType | None]) -> DType | None:
    if name in COMPARISONS:
        return DType.BOOL
    if name == WHERE:
        if types[0] != DType.BOOL:
            raise GraphError(f"where: its condition is {types[0] or 'a number'}", "bool", "compare it with something")
        return _joined(operands[1:], types[1:])
    if name in _FRACTIONS:
        return DType.F32 if types[0] is None or not types[0].is_float else types[0]
    joined = _joined(operands, types)
    if joined == DType.BOOL and name not in _OF_BOOLS:
        raise GraphError(f"{name} of bool", "numbers; bools have max (or), min (and) and comparisons", _FIX)
    return joined


def _joined(operands: Sequence[Tree], types: Sequence[DType | None]) -> DType | None:
    operand_types = [t for t in types if t is not None]
    if not operand_types:
        return None
    latest = max(operand_types, key=_ORDER.index)
    numbers = [x for x, t in zip(operands, types, strict=True) if t is None]
    fraction = any(not isinstance(x, float) or not x.is_integer() for x in numbers)
    if numbers and not latest.is_float and (fraction or latest == DType.BOOL):
        return DType.F32
    return latest
