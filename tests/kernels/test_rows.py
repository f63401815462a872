"""convert, rms_norm, embed, gather_rows and rope: rows in, rows out."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.config import RopeConfig
from millrace.kernels.convert.ref import pack_rows, to_bf16, to_q8
from millrace.kernels.declare import RowFormat
from millrace.kernels.embed.ref import embed
from millrace.kernels.layout import padded_k, row_bytes, up
from millrace.kernels.rms_norm.ref import rms_norm
from millrace.kernels.rope.ref import rope
from millrace.model.layers import rotary_angles
from tests.support.one_step import Machine, run_kernel, step_inputs
from tests.support.tolerance import assert_no_worse

WIDTHS = [1, 2, 15, 16, 17, 31, 64, 100, 129, 320]


def normal(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("group", [0, 4, 12, 32, 128])
@pytest.mark.parametrize("format", [RowFormat.BF16, RowFormat.Q8])
def test_convert_stores_the_reference_bytes(n: int, group: int, format: RowFormat, machine: Machine) -> None:
    x = normal(7, n, seed=1) * np.float32(3)
    x[2] = 0  # a scale of 0
    x[3, 0] = 1e-30
    stride = row_bytes(format, n, group)
    params = {"rows": 0, "n": n, "x_stride": n, "y_stride": stride, "format": format, "group": group}
    got = run_kernel("convert", {"x": x, "y": np.zeros((7, stride), np.uint8)}, params, step_inputs(7), machine)["y"]
    expected = pack_rows(x, format, group)
    size = expected.shape[1] if group == 0 or format == RowFormat.BF16 else stride
    assert (got.reshape(7, stride)[:, :size][expected != 0] == expected[expected != 0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 40, 99])
def test_what_is_not_finite_is_not_lost(bad: float, at: int, machine: Machine) -> None:
    """A group of int8 codes with one such element has the scale NaN; its neighbours are as ever."""
    x = normal(3, 100, seed=1)
    x[1, at] = bad
    stride = row_bytes(RowFormat.Q8, 100, 32)
    params = {"rows": 0, "n": 100, "x_stride": 100, "y_stride": stride, "format": RowFormat.Q8, "group": 32}
    got = run_kernel("convert", {"x": x, "y": np.zeros((3, stride), np.uint8)}, params, step_inputs(3), machine)["y"]
    begin = up(padded_k(100, 32), 4)
    scales = got.reshape(3, stride)[:, begin : begin + 16].copy().view(np.float32)
    x[1, at] = 0
    expected = to_q8(x, 32).scales
    expected[1, at // 32] = np.nan
    np.testing.assert_array_equal(scales, expected)


@pytest.mark.parametrize("group", [0, 32])
def test_quantising_loses_at_most_half_a_step(group: int) -> None:
    x = normal(5, 100, seed=2)
    q = to_q8(x, group)
    steps = np.repeat(q.scales, group or 100, axis=1)[:, :100]
    assert (np.abs(q.dequantise() - x) <= steps * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("runs", [1, 3])
def test_rms_norm(n: int, runs: int, machine: Machine) -> None:
    x, w = normal(5, runs * n + 3, seed=3), normal(n, seed=4)
    params = {
        "rows": 0, "runs": runs, "n": n, "x_stride": runs * n + 3, "y_stride": runs * n * 4, "format": 0, "group": 0,
        "eps": 1e-5,
    }  # fmt: skip
    y = run_kernel(
        "rms_norm", {"x": x, "w": w, "y": np.zeros((5, runs * n), np.float32)}, params, step_inputs(5), machine
    )["y"]
    cut = x[:, : runs * n].reshape(5, runs, n)
    got = y.view(np.float32).reshape(5, runs, n)
    assert_no_worse(
        got, rms_norm(cut, w, 1e-5).astype(np.float32), rms_norm(cut.astype(np.float64), w.astype(np.float64), 1e-5)
    )


@pytest.mark.parametrize("format, group", [(RowFormat.BF16, 0), (RowFormat.Q8, 32), (RowFormat.BF16, 12)])
def test_rms_norm_packs_as_convert_does(format: RowFormat, group: int, machine: Machine) -> None:
    """The fused norm gives the bytes of the norm and the conversion one after the other."""
    n = 100
    x, w, stride = normal(6, n, seed=5), normal(n, seed=6), row_bytes(format, n, group)
    norm = {"rows": 0, "runs": 1, "n": n, "x_stride": n, "y_stride": n * 4, "format": 0, "group": 0, "eps": 1e-6}
    step = step_inputs(6)
    plain = run_kernel("rms_norm", {"x": x, "w": w, "y": np.zeros((6, n), np.float32)}, norm, step, machine)["y"]
    convert = {"rows": 0, "n": n, "x_stride": n, "y_stride": stride, "format": format, "group": group}
    two = run_kernel("convert", {"x": plain, "y": np.zeros((6, stride), np.uint8)}, convert, step, machine)["y"]
    fused = {**norm, "y_stride": stride, "format": format, "group": group}
    one = run_kernel("rms_norm", {"x": x, "w": w, "y": np.zeros((6, stride), np.uint8)}, fused, step, machine)["y"]
    assert (one == two).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [1, 16, 37])
def test_embed(dtype: type, n: int, machine: Machine) -> None:
    """Every row of the table, the last among them, in an order of its own, some twice."""
    vocab, T = 23, 40
    table: NDArray[Any] = normal(vocab, n, seed=7).astype(dtype)
    tokens = np.random.default_rng(7).permutation(np.arange(T) % vocab).astype(np.int32)
    params = {"n": n, "vocab": vocab, "bf16": int(dtype is not np.float32), "scale": 1.5}
    operands = {"table": table, "y": np.zeros((T, n), np.float32)}
    y = run_kernel("embed", operands, params, replace(step_inputs(T), tokens=tokens), machine)["y"]
    expected = embed(tokens, table.astype(np.float32), 1.5)
    assert {0, vocab - 1} < {*tokens.tolist()}
    assert (y.view(np.float32).reshape(T, n) == expected).all()


def test_gather_rows(machine: Machine) -> None:
    x = normal(10, 19, seed=8)
    step = step_inputs(10, S=3, rows=3)
    y = run_kernel("gather_rows", {"x": x, "y": np.zeros((3, 19), np.float32)}, {"n": 19}, step, machine)["y"]
    assert (y.view(np.float32).reshape(3, 19) == x[step.starts[1:] - 1]).all()


@pytest.mark.parametrize("size", [8, 16, 40, 64, 128, 136, 256, 328, 512])
def test_rope(size: int, machine: Machine) -> None:
    heads, T = 3, 9
    table = rotary_angles(RopeConfig(theta=10000.0), size, 64)
    x = normal(T, heads * size, seed=9)
    params = {
        "heads": heads, "kv_heads": 0, "head_dim": size, "q_stride": heads * size, "k_stride": 0, "v_stride": 0,
        "context": 64, "layer": -1,
    }  # fmt: skip
    y = run_kernel("rope", {"q": x, "table": table}, params, step_inputs(T), machine)["q"].view(np.float32)
    cut, positions = x.reshape(T, heads, size), np.arange(T)
    truth = rope(cut.astype(np.float64), positions, table.astype(np.float64))
    assert_no_worse(y.reshape(T, heads, size), rope(cut, positions, table), truth)


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38], np.float32)
    assert to_bf16(x).tolist() == [1.0, 1 + 2**-6, -1.0, float(np.float32(3e38).astype(ml_dtypes.bfloat16))]
