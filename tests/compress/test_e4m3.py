"""FP8 weights against all 256 codes, and what bfloat16 makes of them."""

import ml_dtypes
import numpy as np
import pytest

from millrace.compress.methods.e4m3 import rounded_e4m3
from millrace.errors import CheckpointError

CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
CODES = np.unique(CODES[np.isfinite(CODES)])


@pytest.mark.parametrize("seed", range(3))
def test_each_weight_is_the_nearest_of_all_codes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((9, 33)) * 10.0 ** rng.integers(-4, 3, (9, 1))).astype(np.float32)
    made = rounded_e4m3(w)
    values, scales = made.dequantise(), made.scales.astype(np.float64)
    nearest = np.abs(w[:, :, None] / scales[:, :, None] - CODES).min(axis=2) * scales
    np.testing.assert_allclose(np.abs(values - w), nearest, rtol=1e-6, atol=1e-12)
    assert (np.abs(values - w) <= np.abs(w) / 16 + scales * 2.0**-10).all()
    exact = np.abs(w).max(axis=1, keepdims=True) / 448
    assert (scales >= exact * (1 - 1e-7)).all() and (scales <= exact * 9 / 8).all(), "nothing is clipped"


@pytest.mark.parametrize("rows", [1, 9])
def test_one_scale_is_that_of_the_largest_of_all(rows: int) -> None:
    """By all 256 codes; what is tiny beside the largest is lost, and nothing is clipped. By row it would not be."""
    rng = np.random.default_rng(5)
    w = (rng.standard_normal((rows, 33)) * 10.0 ** -np.arange(rows)[:, None]).astype(np.float32)
    made = rounded_e4m3(w, one_scale=True)
    scales = made.scales.astype(np.float64)
    assert len(np.unique(scales)) == 1 and 1 - 1e-7 <= scales[0, 0] / (np.abs(w).max() / 448) <= 9 / 8
    nearest = np.abs(w[:, :, None] / scales[:, :, None] - CODES).min(axis=2) * scales
    np.testing.assert_allclose(np.abs(made.dequantise() - w), nearest, rtol=1e-6, atol=1e-12)
    assert rows == 1 or (not made.dequantise()[-1].any() and rounded_e4m3(w).dequantise()[-1].any())


def test_bfloat16_holds_them_exactly() -> None:
    w = np.random.default_rng(4).standard_normal((64, 128)).astype(np.float32)
    values = rounded_e4m3(w).dequantise()
    np.testing.assert_array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float64), values)


def test_edges() -> None:
    w = np.zeros((3, 8), np.float32)
    w[1, 2], w[2] = 448, np.float32(1e-38)
    made = rounded_e4m3(w)
    assert not made.dequantise()[0].any() and made.dequantise()[1, 2] == 448
    assert np.isfinite(made.dequantise()).all()
    w[0, 0] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        rounded_e4m3(w)
