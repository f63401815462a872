"""2:4 sparsity: of four neighbouring inputs of an output two weights become zero, chosen by what goes into them.

Wanda (arXiv:2306.11695) drops the smallest |w| times the root mean square of its input, and changes nothing else.
SparseGPT (arXiv:2301.00774) drops by w^2 / U_ii^2, with H^-1 = U^T U, and later columns make up for what is lost, as
in GPTQ (gptq.py), whose H = R R^T it takes: R's diagonal is that of U inverted.

What comes out are floats with zeros among them: no kernel here skips a zero. N outputs, K inputs, a multiple of 4.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.compress.calibration.statistics import InputStatistics
from millrace.compress.measure.reconstruction_error import relative_error
from millrace.compress.methods.gptq import Gptq, Task, updated
from millrace.compress.methods.quantization_grid import Array, Floats

OF, NONZERO = 4, 2  # of four two are kept
DAMPING = 0.01  # of the mean of H's diagonal: the paper's, and llm-compressor's; Model Optimizer has 0.1
WANDA, SPARSEGPT = "wanda", "sparsegpt"
METHODS = (WANDA, SPARSEGPT)
_BLOCK = 128  # columns that share one product with the errors before them


@dataclass(frozen=True, slots=True)
class Sparse:
    """weights (N, K), half of them zeros; error: of the output's energy, the share that is lost"""

    weights: Floats
    error: float


def sparse(w: Array, x: InputStatistics, method: str) -> Sparse:
    """w (N, K) whose input is x; method: one of METHODS"""
    w = w.astype(np.float32, copy=False)
    result = wanda(w, x.gram) if method == WANDA else sparsegpt(w, x.gram)
    return Sparse(result, relative_error(w, result, x.gram))


def wanda(w: Array, gram: Array) -> Floats:
    """gram (K, K): the mean of x x^T of its inputs x."""
    scores = np.abs(w) * np.sqrt(np.maximum(gram.diagonal(), 0))
    N, K = w.shape
    mask = _largest(scores.reshape(N, K // OF, OF), axis=2).reshape(N, K)
    return np.where(mask, w, np.float32(0))


def prune_2_4_magnitude(w: Array) -> Floats:
    """By |w| alone, as if all inputs were alike: what both methods are better than."""
    return wanda(w.astype(np.float32, copy=False), np.eye(w.shape[1], dtype=np.float32))


def sparsegpt(w: Array, gram: Array, damping: float = DAMPING) -> Floats:
    """damping: doubled until the matrix has a factor"""
    K, task = w.shape[1], Task.of(w, gram, Gptq(damping, order=False))
    columns, feedback, diagonal = task.columns, task.feedback, task.diagonal  # columns become their errors
    result = np.empty_like(columns)
    for begin in range(0, K, _BLOCK):
        block = slice(begin, min(begin + _BLOCK, K))
        targets = task.targets(block)
        for first in range(0, len(targets), OF):
            group = slice(begin + first, begin + first + OF)
            before = slice(begin, begin + first)
            own = targets[first : first + OF] + feedback[before, group].T @ columns[before]
            result[group] = _group(own, columns[group], feedback[group, group], diagonal[group])
    return task.in_place(result)


def _group(targets: Floats, columns: Floats, feedback: Floats, diagonal: NDArray[np.float64]) -> Floats:
    """wanted, columns (4, N): four columns, as they should be for what was lost before them, and as they were given,
    which become their errors -> (4, N)"""
    scores = np.square(updated(targets, columns, feedback) * diagonal[:, None])
    mask = _largest(scores, axis=0)
    result = np.empty_like(targets)
    for i in range(OF):
        result[i] = np.where(mask[i], targets[i] + feedback[:i, i] @ columns[:i], 0)
        columns[i] -= result[i]
    return result


def _largest(scores: Array, axis: int) -> NDArray[np.bool_]:
    """Which two of the four along an axis are kept; of equal ones the first."""
    order = np.argsort(np.argsort(-scores, axis=axis, kind="stable"), axis=axis, kind="stable")
    mask: NDArray[np.bool_] = order < NONZERO
    return mask
