"""GPTQ (arXiv:2210.17323): columns are rounded one after the other, and what each loses is made up for by later ones.

The paper has the upper Cholesky factor U of the inverse, H^-1 = U^T U, and spreads the error of column i by row i of U
over U_ii. Here H = R R^T with R upper, of which U is the inverse: then column i takes up all errors before it by the
column R_:i / R_ii (LDLQ, arXiv:2307.13304, which proves them equal). Nothing is inverted, and whole blocks of columns
take up earlier errors in one product.

N outputs, K inputs. Weights lie transposed meanwhile, so that a column is contiguous.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.compress.grid import WHOLE_ROW, Array, Floats, Grid, Scales, Search, codes_of, fitted, matrix
from millrace.errors import ConfigError

_BLOCK = 128  # columns that share one product with the errors before them
_MOST_DAMPING = 1e6  # of the mean of the diagonal, which is then all there is: rounding to nearest


@dataclass(frozen=True, slots=True)
class Gptq:
    """damping: a share of the Gram matrix's mean diagonal that is added to its diagonal, doubled until it has a factor
    order: inputs of most energy first, scales fixed before (act-order "static"); else as they come, each group's scales
    from what its weights are by then
    """

    damping: float = 0.01
    order: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise ConfigError(f"damping of {self.damping}", "above 0, at most 1", "choose another, such as 0.01")


LLM_COMPRESSOR = Gptq(0.01)
GPTQMODEL = Gptq(0.05, order=False)


@dataclass(frozen=True, slots=True)
class Rounded:
    """damping: that was needed"""

    matrix: QuantisedMatrix
    damping: float


def gptq(
    w: Array, gram: Array, grid: Grid, settings: Gptq = LLM_COMPRESSOR, search: Search | None = None,
    scales: Scales | None = None,
) -> Rounded:  # fmt: skip
    """w (N, K), gram (K, K): the mean of x x^T of its inputs x.

    search: of ranges; scales: fixed ones, instead of any of its own choice
    raises as grid.fitted
    """
    N, K = w.shape
    energy = gram.diagonal().astype(np.float64)
    dead = energy <= 0
    weights = np.where(dead, np.float32(0), w.astype(np.float32, copy=False))
    if scales is None and (settings.order or grid.group == WHOLE_ROW):
        scales = fitted(weights, grid, search, energy)
    order = np.argsort(-energy, kind="stable") if settings.order else np.arange(K)
    feedback, _, damping = feedback_of(gram, dead, order, settings.damping)
    columns = np.ascontiguousarray(weights.T[order])
    if scales is None:
        codes, scales = _by_groups(columns, feedback, grid, search, energy)
    else:
        codes = _by_blocks(columns, feedback, grid, scales, order // grid.group_of(K))
    found = np.empty((K, N), np.int8)
    found[order] = codes
    return Rounded(matrix(np.ascontiguousarray(found.T), scales, grid), damping)


def feedback_of(
    gram: Array, dead: NDArray[np.bool_], order: NDArray[np.intp], damping: float
) -> tuple[Floats, NDArray[np.float64], float]:
    """(K, K), strictly upper: column i says how it takes up the errors of the columns before it; R's diagonal (K,); and
    the damping that was needed."""
    H = gram[np.ix_(order, order)].astype(np.float64)
    at = np.arange(len(H))
    H[at, at] += dead[order]
    mean, diagonal = float(H[at, at].mean()), H[at, at].copy()
    while True:
        H[at, at] = diagonal + damping * mean
        try:
            flipped = np.linalg.cholesky(H[::-1, ::-1])  # lower; turned around again it is upper
            break
        except np.linalg.LinAlgError:
            assert damping < _MOST_DAMPING, "a finite matrix with so much on its diagonal has a factor"
            damping *= 2
    R = flipped[::-1, ::-1]
    feedback = (R / R.diagonal()).astype(np.float32)
    feedback[at, at] = 0
    return feedback, np.asarray(R.diagonal(), np.float64), damping


def _by_blocks(
    columns: Floats, feedback: Floats, grid: Grid, scales: Scales, groups: NDArray[np.intp]
) -> NDArray[np.int8]:
    """columns (K, N), which become their errors -> codes (K, N). groups (K,): of each column, in scales"""
    codes = np.empty(columns.shape, np.int8)
    steps, zeros = (np.ascontiguousarray(values.T) for values in scales.wide())
    for begin in range(0, len(columns), _BLOCK):
        block = slice(begin, min(begin + _BLOCK, len(columns)))
        own = groups[block]
        wanted = _wanted(columns, feedback, block)
        codes[block] = _block(wanted, columns[block], feedback[block, block], (steps[own], zeros[own]), grid)
    return codes


def _by_groups(
    columns: Floats, feedback: Floats, grid: Grid, search: Search | None, energy: Array
) -> tuple[NDArray[np.int8], Scales]:
    """The same, with the scales of each group found when its turn comes."""
    codes, found = np.empty(columns.shape, np.int8), list[Scales]()
    for begin in range(0, len(columns), grid.group):
        block = slice(begin, min(begin + grid.group, len(columns)))
        wanted = _wanted(columns, feedback, block)
        by_then = updated(wanted, columns[block], feedback[block, block])
        found.append(fitted(by_then.T, replace(grid, group=WHOLE_ROW), search, energy[block]))
        steps, zeros = (np.repeat(values.T, len(wanted), axis=0) for values in found[-1].wide())
        codes[block] = _block(wanted, columns[block], feedback[block, block], (steps, zeros), grid)
    minimums = [part.minimums for part in found if part.minimums is not None]
    scales = np.concatenate([part.scales for part in found], axis=1)
    return codes, Scales(scales, np.concatenate(minimums, axis=1) if minimums else None)


def _wanted(columns: Floats, feedback: Floats, block: slice) -> Floats:
    """What the block's columns should be, for all that was lost before it."""
    wanted: Floats = columns[block] + feedback[: block.start, block].T @ columns[: block.start]
    return wanted


def updated(wanted: Floats, columns: Floats, feedback: Floats) -> Floats:
    """A block's columns as they would make up for all before it, if nothing were lost in it: what the paper has there.

    Column k is w_k + p_k + e A_:k, for what comes from before the block and from errors e of its own; without loss
    e = w - (w + p + e A), so e (1 + A) = -p
    """
    own = np.linalg.solve((np.eye(len(feedback), dtype=np.float32) + feedback).T, columns - wanted)
    updated: Floats = columns - own
    return updated


def _block(
    wanted: Floats, columns: Floats, feedback: Floats, scaling: tuple[Floats, Floats], grid: Grid
) -> NDArray[np.int8]:
    """wanted, columns (n, N), of which columns become their errors; scaling: steps and zeros (n, N) -> codes (n, N)"""
    codes = np.empty(wanted.shape, np.int8)
    for i, (step, zero) in enumerate(zip(*scaling, strict=True)):
        code = codes_of(wanted[i] + feedback[:i, i] @ columns[:i], step, zero, grid)
        columns[i] -= (code - zero) * step
        codes[i] = code
    return codes
