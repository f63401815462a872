"""Weights as integers with a float16 scale per output and group of inputs: rounded to nearest, nothing cleverer yet."""

from collections.abc import Sequence

import numpy as np

from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.errors import CheckpointError
from millrace.graph.types import Constant
from millrace.kernels.arrays import Array
from millrace.kernels.layout import up


def stored_codes(constants: Sequence[Constant], bits: int, group: int) -> list[QuantisedMatrix] | None:
    """Weights (N, K) in the checkpoint's own codes, those that it does not hold so rounded; None: it holds none so."""
    held = [c.stored(bits, group) if c.stored else None for c in constants]
    if not all(np.isfinite(h.scales).all() for h in held if h):
        raise _not_finite()
    if not any(held):
        return None
    return [
        stored or quantise_matrix(c.load().astype(np.float32), bits, group)
        for stored, c in zip(held, constants, strict=True)
    ]


def _not_finite() -> CheckpointError:
    return CheckpointError("weights that are not finite", "numbers", "download the checkpoint again, or choose another")


def quantise_matrix(w: Array, bits: int, group: int) -> QuantisedMatrix:
    """w (N, K) -> codes of `bits` (4 or 8) with one scale per `group` inputs.

    The scale maps the group's element of largest magnitude to -2^(bits-1), so that the whole range of codes is used.
    raises CheckpointError for what is not finite
    error: |w - dequantise| <= scale/2, one scale where the opposite extreme is clipped, plus the scale's own rounding
    """
    N, K = w.shape
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    padded = np.zeros((N, up(K, group)), np.float32)
    padded[:, :K] = w
    grouped = padded.reshape(N, -1, group)
    top, bottom = grouped.max(axis=2), grouped.min(axis=2)
    if not (np.isfinite(top).all() and np.isfinite(bottom).all()):
        raise _not_finite()
    scales = (np.where(-bottom >= top, bottom, top) / np.float32(low)).astype(np.float16)
    divisor = scales.astype(np.float32)
    inverse = np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor != 0)
    codes = np.clip(np.rint(grouped * inverse[:, :, None]), low, high).astype(np.int8)
    return QuantisedMatrix(codes.reshape(N, -1)[:, :K], scales, group, bits)
