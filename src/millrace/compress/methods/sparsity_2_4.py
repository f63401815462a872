"""2:4 sparsity: of the weights of four adjacent inputs two become zero, chosen with statistics of the inputs.

Wanda (arXiv:2306.11695) drops the smallest |w| times the root mean square of its input, and changes nothing else.
SparseGPT (arXiv:2301.00774) drops by w^2 / U_ii^2, with H^-1 = U^T U, and compensates the error in later columns like
GPTQ (gptq.py), whose H = R R^T it uses: R's diagonal is the inverse of U's.

The result is a float matrix with zeros; no kernel here skips zeros. N outputs, K inputs, a multiple of 4.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.compress.calibration.statistics import InputStatistics
from millrace.compress.measure.reconstruction_error import relative_error
from millrace.compress.methods.gptq import Gptq, Task, updated
from millrace.compress.methods.quantization_grid import Array, Floats

GROUP_SIZE, NONZERO = 4, 2  # two of four are kept
DAMPING = 0.01  # relative to H's mean diagonal, as in the paper and llm-compressor; Model Optimizer uses 0.1
WANDA, SPARSEGPT = "wanda", "sparsegpt"
METHODS = (WANDA, SPARSEGPT)
_BLOCK = 128  # columns that share one matmul with the errors before them


@dataclass(frozen=True, slots=True)
class Sparse:
    """A sparse matrix. weights: (N, K), half of them zeros; error: share of the output's energy that is lost"""

    weights: Floats
    error: float


def sparse(w: Array, x: InputStatistics, method: str) -> Sparse:
    """Prune w (N, K) with input x to 2:4 sparsity. method: one of METHODS"""
    w = w.astype(np.float32, copy=False)
    result = wanda(w, x.gram) if method == WANDA else sparsegpt(w, x.gram)
    return Sparse(result, relative_error(w, result, x.gram))


def wanda(w: Array, gram: Array) -> Floats:
    """Prune with Wanda. gram: the mean of x x^T of the inputs x, (K, K)"""
    scores = np.abs(w) * np.sqrt(np.maximum(gram.diagonal(), 0))
    N, K = w.shape
    mask = _largest(scores.reshape(N, K // GROUP_SIZE, GROUP_SIZE), axis=2).reshape(N, K)
    return np.where(mask, w, np.float32(0))


def prune_2_4_magnitude(w: Array) -> Floats:
    """Prune by |w| only, as if all inputs were equal: the baseline of both methods."""
    return wanda(w.astype(np.float32, copy=False), np.eye(w.shape[1], dtype=np.float32))


def sparsegpt(w: Array, gram: Array, damping: float = DAMPING) -> Floats:
    """Prune with SparseGPT. damping: doubled until the matrix has a Cholesky factor"""
    K, task = w.shape[1], Task.from_weights(w, gram, Gptq(damping, order=False))
    columns, feedback, diagonal = task.columns, task.feedback, task.diagonal  # columns are overwritten by their errors
    result = np.empty_like(columns)
    for begin in range(0, K, _BLOCK):
        block = slice(begin, min(begin + _BLOCK, K))
        targets = task.targets(block)
        for first in range(0, len(targets), GROUP_SIZE):
            group = slice(begin + first, begin + first + GROUP_SIZE)
            before = slice(begin, begin + first)
            own = targets[first : first + GROUP_SIZE] + feedback[before, group].T @ columns[before]
            result[group] = _group(own, columns[group], feedback[group, group], diagonal[group])
    return task.in_place(result)


def _group(targets: Floats, columns: Floats, feedback: Floats, diagonal: NDArray[np.float64]) -> Floats:
    """Prune four columns -> (4, N).

    targets: the columns adjusted for earlier errors, (4, N); columns: the original ones, overwritten by their errors
    """
    scores = np.square(updated(targets, columns, feedback) * diagonal[:, None])
    mask = _largest(scores, axis=0)
    result = np.empty_like(targets)
    for i in range(GROUP_SIZE):
        result[i] = np.where(mask[i], targets[i] + feedback[:i, i] @ columns[:i], 0)
        columns[i] -= result[i]
    return result


def _largest(scores: Array, axis: int) -> NDArray[np.bool_]:
    """Return which two of the four along an axis are kept; of equal ones the first."""
    order = np.argsort(np.argsort(-scores, axis=axis, kind="stable"), axis=axis, kind="stable")
    mask: NDArray[np.bool_] = order < NONZERO
    return mask
