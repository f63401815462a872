"""How far a fast path may be from the truth: derived from what the plain path loses, never guessed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def assert_no_worse(
    got: Floats,
    plain: Floats,
    exact: Floats,
    factor: float = 2.0,
    ulps: float = 4.0,
) -> None:
    """`got` may lose `factor` times what `plain` (the same in NumPy, or another library) loses, and some ulps."""
    assert got.shape == exact.shape == plain.shape, f"{got.shape}, {plain.shape}, {exact.shape}"
    assert np.isfinite(got).all()
    floor = ulps * np.finfo(np.float32).eps * np.abs(exact).max()
    ours, theirs = np.abs(got - exact).max(), np.abs(plain - exact).max()
    assert ours <= factor * theirs + floor, f"error {ours:.2e}, plain {theirs:.2e}, floor {floor:.2e}"
