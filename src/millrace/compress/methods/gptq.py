"""GPTQ (arXiv:2210.17323): rounds columns one after the other, and compensates each error in later columns.

The paper has the upper Cholesky factor U of the inverse, H^-1 = U^T U, and spreads the error of column i by row i of U
over U_ii. Here H = R R^T with R upper, of which U is the inverse: then column i takes up all errors before it by the
column R_:i / R_ii (LDLQ, arXiv:2307.13304, which proves them equal). Nothing is inverted, and whole blocks of columns
absorb earlier errors in one matmul.

N outputs, K inputs. Weights are transposed meanwhile, so that a column is contiguous.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.compress.methods.e4m3 import BF16, E4M3, Fp8Matrix, rounded_to, scales_for
from millrace.compress.methods.quantization_grid import (
    WHOLE_ROW,
    Array,
    Floats,
    Grid,
    Scales,
    ScaleSearch,
    codes_of,
    fitted,
    matrix,
)
from millrace.errors import ConfigError

_BLOCK = 128  # columns that share one matmul with the errors before them
_MAX_DAMPING = 1e6  # relative to the mean diagonal; at this value it is rounding to nearest


@dataclass(frozen=True, slots=True)
class Gptq:
    """damping: share of the Gram matrix's mean diagonal to add to its diagonal, doubled until it has a Cholesky factor
    order: columns with the most input energy first, with scales fixed before (act-order "static"); otherwise in storage
        order, with each group's scales from its weights at that point
    """

    damping: float = 0.01
    order: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise ConfigError(f"damping of {self.damping}", "above 0, at most 1", "choose another, such as 0.01")


LLM_COMPRESSOR = Gptq(0.01)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded matrix. damping: the value that was needed"""

    matrix: QuantisedMatrix
    damping: float


Rounding = Callable[[int, Floats], tuple[Array, Floats]]  # (position, column) -> codes, their values


def gptq(
    w: Array, gram: Array, grid: Grid, settings: Gptq = LLM_COMPRESSOR, search: ScaleSearch | None = None,
    scales: Scales | None = None,
) -> Rounded:  # fmt: skip
    """Round w (N, K) with GPTQ. gram: the mean of x x^T of its inputs x, (K, K)

    search: of ranges; scales: fixed scales to use instead of its own
    raises as `fitted`
    """
    task = Task.from_weights(w, gram, settings)
    if scales is None and (settings.order or grid.group == WHOLE_ROW):
        scales = fitted(task.weights, grid, search, task.energy)
    if scales is None:
        codes, scales = _by_groups(task.columns, task.feedback, grid, search, task.energy)
    else:
        codes = np.empty(task.columns.shape, np.int8)
        _by_blocks(task.columns, task.feedback, codes, _on(grid, scales, task.order // grid.group_of(w.shape[1])))
    return Rounded(matrix(task.in_place(codes), scales, grid), task.damping)


def gptq_e4m3(w: Array, gram: Array, settings: Gptq = LLM_COMPRESSOR) -> tuple[Fp8Matrix, float]:
    """Round to FP8, columns with the most energy first, with the scales of `scales_for`. Also returns the damping."""
    task = Task.from_weights(w, gram, settings)
    scales = scales_for(task.weights, task.energy)
    codes, row = np.empty(task.columns.shape, E4M3), scales[:, 0]
    _by_blocks(task.columns, task.feedback, codes, lambda _, column: rounded_to(column, row))
    return Fp8Matrix(task.in_place(codes), scales.astype(BF16)), task.damping


@dataclass(frozen=True, slots=True)
class Task:
    """A matrix prepared for processing its columns in order.

    weights: (N, K), zero for inputs that are always zero; energy: mean squares of inputs, (K,); order: of columns, (K,)
    columns: weights in that order, (K, N); feedback, diagonal, damping: from `_feedback_of`
    """

    weights: Floats
    energy: NDArray[np.float64]
    order: NDArray[np.intp]
    columns: Floats
    feedback: Floats
    diagonal: NDArray[np.float64]
    damping: float

    @classmethod
    def from_weights(cls, w: Array, gram: Array, settings: Gptq) -> "Task":
        energy = gram.diagonal().astype(np.float64)
        dead = energy <= 0
        weights = np.where(dead, np.float32(0), w.astype(np.float32, copy=False))
        order = np.argsort(-energy, kind="stable") if settings.order else np.arange(len(energy))
        columns = np.ascontiguousarray(weights.T[order])
        return cls(weights, energy, order, columns, *_feedback_of(gram, dead, order, settings.damping))

    def targets(self, block: slice) -> Floats:
        """Return a block's columns, adjusted for all errors before it."""
        return _targets(self.columns, self.feedback, block)

    def in_place(self, permuted: Array) -> Array:
        """Convert columns in processing order (K, N) to the matrix (N, K)."""
        back = np.empty_like(permuted)
        back[self.order] = permuted
        return np.ascontiguousarray(back.T)


def _feedback_of(
    gram: Array, dead: NDArray[np.bool_], order: NDArray[np.intp], damping: float
) -> tuple[Floats, NDArray[np.float64], float]:
    """Return the feedback matrix, R's diagonal (K,), and the damping that was needed.

    feedback: (K, K), strictly upper; column i has the weights with which it absorbs the errors of earlier columns
    """
    H = gram[np.ix_(order, order)].astype(np.float64)
    at = np.arange(len(H))
    H[at, at] += dead[order]
    mean, diagonal = float(H[at, at].mean()), H[at, at].copy()
    while True:
        H[at, at] = diagonal + damping * mean
        try:
            flipped = np.linalg.cholesky(H[::-1, ::-1])  # lower; flipped again it is upper
            break
        except np.linalg.LinAlgError:
            if damping >= _MAX_DAMPING:  # a finite matrix of mean squares has a factor long before
                raise ConfigError(
                    "a Gram matrix has no factor, whatever is added to its diagonal", "means of products of inputs",
                    "the statistics are damaged: collect them again, into another folder",
                ) from None  # fmt: skip
            damping *= 2
    R = flipped[::-1, ::-1]
    feedback = (R / R.diagonal()).astype(np.float32)
    feedback[at, at] = 0
    return feedback, np.asarray(R.diagonal(), np.float64), damping


def _on(grid: Grid, scales: Scales, groups: NDArray[np.intp]) -> Rounding:
    """Return the rounding of columns with given scales. groups: each column's group, in processing order, (K,)"""
    steps, zeros = (np.ascontiguousarray(values.T) for values in scales.wide())

    def rounded(turn: int, column: Floats) -> tuple[Array, Floats]:
        step, zero = steps[groups[turn]], zeros[groups[turn]]
        code = codes_of(column, step, zero, grid)
        return code, (code - zero) * step

    return rounded


def _by_blocks(columns: Floats, feedback: Floats, codes: Array, rounded: Rounding) -> None:
    """Round block by block. columns: (K, N), overwritten by their errors; codes: (K, N), output"""
    for begin in range(0, len(columns), _BLOCK):
        block = slice(begin, min(begin + _BLOCK, len(columns)))
        _block(_targets(columns, feedback, block), columns, feedback, codes, (block, rounded))


def _by_groups(
    columns: Floats, feedback: Floats, grid: Grid, search: ScaleSearch | None, energy: Array
) -> tuple[NDArray[np.int8], Scales]:
    """Round block by block, with each group's scales determined when it is reached."""
    codes, permuted = np.empty(columns.shape, np.int8), list[Scales]()
    for begin in range(0, len(columns), grid.group):
        block = slice(begin, min(begin + grid.group, len(columns)))
        targets = _targets(columns, feedback, block)
        by_then = updated(targets, columns[block], feedback[block, block])
        permuted.append(fitted(by_then.T, replace(grid, group=WHOLE_ROW), search, energy[block]))
        rounded = _on(grid, permuted[-1], np.zeros(len(columns), np.intp))
        _block(targets, columns, feedback, codes, (block, rounded))
    minimums = [part.minimums for part in permuted if part.minimums is not None]
    scales = np.concatenate([part.scales for part in permuted], axis=1)
    return codes, Scales(scales, np.concatenate(minimums, axis=1) if minimums else None)


def _targets(columns: Floats, feedback: Floats, block: slice) -> Floats:
    """Return the block's columns, adjusted for all errors before it."""
    targets: Floats = columns[block] + feedback[: block.start, block].T @ columns[: block.start]
    return targets


def updated(targets: Floats, columns: Floats, feedback: Floats) -> Floats:
    """Return a block's columns adjusted for all earlier errors, assuming no error within it, as in the paper.

    Column k is w_k + p_k + e A_:k, with p from before the block and e the errors within it; if nothing is lost,
    e = w - (w + p + e A), so e (1 + A) = -p.
    """
    own = np.linalg.solve((np.eye(len(feedback), dtype=np.float32) + feedback).T, columns - targets)
    updated: Floats = columns - own
    return updated


def _block(targets: Floats, columns: Floats, feedback: Floats, codes: Array, at: tuple[slice, Rounding]) -> None:
    """Round a block. targets: its columns adjusted for earlier errors, (n, N); at: its position, and the rounding"""
    block, rounded = at
    errors, own, permuted = columns[block], feedback[block, block], codes[block]
    for i in range(len(targets)):
        permuted[i], value = rounded(block.start + i, targets[i] + own[:i, i] @ errors[:i])
        errors[i] -= value
