"""Reference of how values become values of another type."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.graph.types import NUMPY, DType


def as_type(x: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """x, floating or of integers, as kernels store it: float64 of what f32 and f16 hold, else an array of the type.

    Whole numbers wrap; fractions are cut towards 0, what is beyond the type becomes its end, and NaN 0.
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
