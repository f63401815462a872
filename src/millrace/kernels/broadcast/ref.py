"""Reference of type conversions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.graph.types import NUMPY, DType


def as_type(x: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Convert x, of floats or integers, as kernels store it: f32 and f16 become float64, others arrays of their type.

    Integers wrap; floats are truncated towards 0 and clamped to the type's range, NaN becomes 0.
    """
    kind: np.dtype[Any] = NUMPY[dtype]
    if dtype.is_float:
        with np.errstate(over="ignore"):
            return x.astype(kind).astype(np.float64)
    if dtype == DType.BOOL:
        flags: NDArray[np.bool_] = np.not_equal(x, 0)
        return flags
    if x.dtype.kind != "f":
        return x.astype(kind)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    inside = np.where(np.isfinite(x) & (x >= low) & (x < float(high)), x, 0).astype(kind)
    return np.where(x >= float(high), high, np.where(x < low, low, inside)).astype(kind)
