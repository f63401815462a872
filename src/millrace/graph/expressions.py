"""Element-wise expressions as trees, independent of kernels.

A tree is an int (which input), a float (a number), or (operation, operand, ...). It is computed in floats, or in 64-bit
integers if nothing in it is a fraction (graph/expression_types.py).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import nearest

Tree = int | float | tuple[object, ...]
Floats = NDArray[Any]  # float or int64

UNARY = ("neg", "exp", "sigmoid", "tanh", "erf", "sqrt", "abs")
BINARY = ("add", "sub", "mul", "div", "max", "min")
COMPARISONS = ("less", "less_equal", "equal", "not_equal")
WHERE = "where"  # (condition, value if true, value if false)
_DEEPEST = 32  # levels: more than a kernel's operations
_LONGEST = 200  # characters of a formula's parts: shared parts are written once per use
_INFIX = {"add": ("+", 1), "sub": ("-", 1), "mul": ("*", 2), "div": ("/", 2)}
_POWER, _ATOM = 3, 4


def _erf(x: Floats) -> Floats:
    return np.array([math.erf(e) for e in x.reshape(-1).tolist()], x.dtype).reshape(x.shape)


def _quotient(x: Floats, y: Floats) -> Floats:
    """Divide; integers are truncated towards 0, as in C, and division by 0 gives 0."""
    if x.dtype.kind == "f":
        return np.divide(x, y)
    value: Floats = np.where(y == 0, 0, np.sign(x) * np.sign(y) * (np.abs(x) // np.maximum(np.abs(y), 1)))
    return value


def _where(condition: Floats, x: Floats, y: Floats) -> Floats:
    return np.where(condition != 0, x, y)


def _comparison(compare: Callable[..., Any]) -> Callable[..., Floats]:
    return lambda x, y: compare(x, y).astype(x.dtype)


_NUMPY: dict[str, Callable[..., Floats]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _quotient, "max": np.maximum, "min": np.minimum,
    "neg": np.negative, "exp": np.exp, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "erf": _erf,
    "sqrt": np.sqrt, "abs": np.abs, "less": _comparison(np.less), "less_equal": _comparison(np.less_equal),
    "equal": _comparison(np.equal), "not_equal": _comparison(np.not_equal),
    WHERE: _where,
}  # fmt: skip


def evaluate(tree: Tree, inputs: Sequence[Floats]) -> Floats:
    """Return the tree's value in the precision of its inputs: the definition of its meaning."""
    if isinstance(tree, int):
        return inputs[tree]
    if isinstance(tree, float):
        return np.asarray(tree, inputs[0].dtype)
    return _NUMPY[str(tree[0])](*(evaluate(as_tree(t), inputs) for t in tree[1:]))


def n_operands(operation: object) -> int:
    """Return the number of operands; 0 for an unknown operation."""
    return 1 if operation in UNARY else 2 if operation in BINARY + COMPARISONS else 3 if operation == WHERE else 0


def substitute(tree: Tree, inputs: Sequence[Tree]) -> Tree:
    """Return the tree with each input replaced by a tree."""
    if isinstance(tree, int):
        return inputs[tree]
    if isinstance(tree, float):
        return tree
    return (tree[0], *(substitute(as_tree(t), inputs) for t in tree[1:]))


def formula(tree: Tree, names: Sequence[str]) -> str:
    """Format a tree with inputs by name: "0.5 * x * (1 + erf(0.7071 * x))"; very long parts become "..."."""
    return _infix(tree, names, {})[0]


def _infix(tree: Tree, names: Sequence[str], cache: dict[int, tuple[str, int]]) -> tuple[str, int]:
    """Return text and binding strength. cache: parts formatted before, by id"""
    if isinstance(tree, int):
        return names[tree], _ATOM
    if isinstance(tree, float):
        return f"{tree:.4g}", _ATOM if tree >= 0 else 0
    if id(tree) not in cache:
        operands = [_infix(as_tree(t), names, cache) for t in tree[1:]]
        text, binds = _operation("square" if tree[0] == "mul" and tree[1] is tree[2] else str(tree[0]), operands)
        cache[id(tree)] = (text, binds) if len(text) <= _LONGEST else ("...", _ATOM)
    return cache[id(tree)]


def _operation(name: str, operands: Sequence[tuple[str, int]]) -> tuple[str, int]:
    def within(operand: tuple[str, int], binds: int) -> str:
        return operand[0] if operand[1] >= binds else f"({operand[0]})"

    if name == "neg":
        return f"-{within(operands[0], _POWER)}", 0
    if name == "square":
        return f"{within(operands[0], _ATOM)}^2", _POWER
    if name in _INFIX:
        sign, binds = _INFIX[name]
        right = binds if name in ("add", "mul") else binds + 1
        return f"{within(operands[0], binds)} {sign} {within(operands[1], right)}", binds
    return f"{name}({', '.join(text for text, _ in operands)})", _ATOM


def tuples(value: object, levels: int = _DEEPEST) -> object:
    """Turn JSON's lists into tuples, down to a tree's deepest level; deeper lists stay, and so are no trees."""
    return tuple(tuples(f, levels - 1) for f in value) if isinstance(value, list) and levels else value


def as_tree(value: object) -> Tree:
    """Narrow the type of a verified tree, part of a tree, or attribute."""
    assert isinstance(value, int | float | tuple)
    return value


def faults(tree: object, n_inputs: int) -> Iterable[tuple[str, str]]:
    """Yield (what is wrong, what was expected) for anything that should be a tree."""
    level = [tree]
    for _ in range(_DEEPEST):
        below: list[object] = []
        for value in level:
            wrong = _fault(value, n_inputs)
            if wrong:
                yield wrong
                return
            below += value[1:] if isinstance(value, tuple) else ()
        level = list({id(t): t for t in below}.values())  # shared parts are checked once
    if level:
        yield f"a tree of more than {_DEEPEST} levels", "what a kernel can hold"


def _fault(tree: object, n_inputs: int) -> tuple[str, str] | None:
    """Check the root of a tree."""
    if isinstance(tree, float):
        return None
    if isinstance(tree, int) and not isinstance(tree, bool):
        return None if 0 <= tree < n_inputs else (f"its tree has an input {tree}", f"0 to {n_inputs - 1}")
    if not isinstance(tree, tuple) or not tree:
        return f"its tree has {tree!r:.80}", "an input, a number, or (operation, operand, ...)"
    name = tree[0]
    if not (arity := n_operands(name)):
        return f"its tree has the operation {name!r:.80}", nearest(
            str(name)[:80], (*UNARY, *BINARY, *COMPARISONS, WHERE)
        )
    if len(tree) != arity + 1:
        return f"its tree has {name} of {len(tree) - 1} operands", str(arity)
    return None
