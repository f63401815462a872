"""How far a fast path may be from the truth: derived from what the plain path loses, never guessed."""

import numpy as np
from numpy.typing import NDArray


def assert_no_worse(
    got: NDArray[np.floating], plain: NDArray[np.floating], exact: NDArray[np.float64], factor: float = 2.0, ulps: float = 4.0
) -> None:
    """`got` may lose `factor` times what `plain` (the same arithmetic, in order, in NumPy) loses, and some ulps of output."""
    assert got.shape == exact.shape == plain.shape, f"{got.shape}, {plain.shape}, {exact.shape}"
    assert np.isfinite(got).all()
    floor = ulps * np.finfo(np.float32).eps * np.abs(exact).max()
    ours, theirs = np.abs(got - exact).max(), np.abs(plain - exact).max()
    assert ours <= factor * theirs + floor, f"error {ours:.2e}, plain {theirs:.2e}, floor {floor:.2e}"
