"""convert, the norms, embed, gather_rows, mean_rows and rope: rows in, rows out."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.kernels.convert.ref import pack_rows, to_bf16, to_q8
from millrace.kernels.declare import RowFormat
from millrace.kernels.embed.ref import embed
from millrace.kernels.layer_norm.ref import layer_norm
from millrace.kernels.layout import padded_k, row_bytes, up
from millrace.kernels.mean_rows.ref import mean_rows
from millrace.kernels.normalise.ref import normalise
from millrace.kernels.rms_norm.ref import rms_norm
from millrace.kernels.rope.ref import rope
from millrace.model.layers import rotary_angles
from tests.support.one_step import Machine, run_kernel
from tests.support.tolerance import assert_no_worse

WIDTHS = [1, 2, 15, 16, 17, 31, 64, 100, 129, 320]


def normal(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize(
    "format, group",
    [(f, g) for f in (RowFormat.BF16, RowFormat.Q8) for g in (0, 4, 12, 32, 128)]
    + [(RowFormat.HADAMARD_Q8, g) for g in (4, 12, 32, 128, 200)],
)
def test_convert_stores_the_reference_bytes(n: int, group: int, format: RowFormat, machine: Machine) -> None:
    x = normal(7, n, seed=1) * np.float32(3)
    x[2] = 0  # a scale of 0
    x[3, 0] = 1e-30
    x[4] = 1e-37  # whose factor to integers would be infinite
    x[4, 1::3] = 0
    stride = row_bytes(format, n, group)
    params = {"rows": 0, "n": n, "x_stride": n, "y_stride": stride, "format": format, "group": group}
    got = run_kernel("convert", {"x": x, "y": np.zeros((7, stride), np.uint8)}, params, [7], machine)["y"]
    assert (got.reshape(7, stride) == pack_rows(x, format, group)).all()


def test_every_kind_of_nan_stays_one_in_bfloat16(machine: Machine) -> None:
    """Also those of erased memory, all ones, which rounding as an integer would wrap to a zero."""
    low = np.array([1, 0x7FFF, 0x8000, 0x400000, 0x7F8000, 0x7FE000, 0x7FFFFF], np.uint32)
    bits = np.concatenate(
        [0x7F800000 | low, 0xFF800000 | low, np.array([0x7F800000, 0x7F7FFFFF, 0xFF800000], np.uint32)]
    )
    x, n = bits.view(np.float32)[None, :], len(bits)
    stride = row_bytes(RowFormat.BF16, n, 0)
    params = {"rows": 0, "n": n, "x_stride": n, "y_stride": stride, "format": RowFormat.BF16, "group": 0}
    got = run_kernel("convert", {"x": x, "y": np.zeros((1, stride), np.uint8)}, params, [1], machine)["y"]
    rounded = (got[: 2 * n].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(rounded[:-3]).all() and (np.signbit(rounded) == np.signbit(x[0])).all()
    assert rounded[-3:].tolist() == [np.inf, np.inf, -np.inf]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 40, 99])
def test_what_is_not_finite_is_not_lost(bad: float, at: int, machine: Machine) -> None:
    """A group of int8 codes with one such element has the scale NaN; its neighbours are as ever."""
    x = normal(3, 100, seed=1)
    x[1, at] = bad
    stride = row_bytes(RowFormat.Q8, 100, 32)
    params = {"rows": 0, "n": 100, "x_stride": 100, "y_stride": stride, "format": RowFormat.Q8, "group": 32}
    got = run_kernel("convert", {"x": x, "y": np.zeros((3, stride), np.uint8)}, params, [3], machine)["y"]
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
    y = run_kernel("rms_norm", {"x": x, "w": w, "y": np.zeros((5, runs * n), np.float32)}, params, [5], machine)["y"]
    cut = x[:, : runs * n].reshape(5, runs, n)
    got = y.view(np.float32).reshape(5, runs, n)
    assert_no_worse(
        got, rms_norm(cut, w, 1e-5).astype(np.float32), rms_norm(cut.astype(np.float64), w.astype(np.float64), 1e-5)
    )


@pytest.mark.parametrize(
    "format, group", [(RowFormat.BF16, 0), (RowFormat.Q8, 32), (RowFormat.BF16, 12), (RowFormat.HADAMARD_Q8, 64)]
)
def test_rms_norm_packs_as_convert_does(format: RowFormat, group: int, machine: Machine) -> None:
    """The fused norm gives the bytes of the norm and the conversion one after the other."""
    n = 100
    x, w, stride = normal(6, n, seed=5), normal(n, seed=6), row_bytes(format, n, group)
    norm = {"rows": 0, "runs": 1, "n": n, "x_stride": n, "y_stride": n * 4, "format": 0, "group": 0, "eps": 1e-6}
    plain = run_kernel("rms_norm", {"x": x, "w": w, "y": np.zeros((6, n), np.float32)}, norm, [6], machine)["y"]
    convert = {"rows": 0, "n": n, "x_stride": n, "y_stride": stride, "format": format, "group": group}
    two = run_kernel("convert", {"x": plain, "y": np.zeros((6, stride), np.uint8)}, convert, [6], machine)["y"]
    fused = {**norm, "y_stride": stride, "format": format, "group": group}
    one = run_kernel("rms_norm", {"x": x, "w": w, "y": np.zeros((6, stride), np.uint8)}, fused, [6], machine)["y"]
    assert (one == two).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [1, 16, 37])
def test_embed(dtype: type, n: int, machine: Machine) -> None:
    """Every row of the table, the last among them, in an order of its own, some twice."""
    vocab, T = 23, 40
    table: NDArray[Any] = normal(vocab, n, seed=7).astype(dtype)
    tokens = np.random.default_rng(7).permutation(np.arange(T) % vocab).astype(np.int32)
    params = {"rows": 0, "n": n, "vocab": vocab, "bf16": int(dtype is not np.float32), "scale": 1.5}
    operands = {"ids": tokens, "table": table, "y": np.zeros((T, n), np.float32)}
    y = run_kernel("embed", operands, params, [T], machine)["y"]
    expected = embed(tokens, table.astype(np.float32), 1.5)
    assert {0, vocab - 1} < {*tokens.tolist()}
    assert (y.view(np.float32).reshape(T, n) == expected).all()


def test_an_id_beyond_the_table_gives_nan(machine: Machine) -> None:
    """Whatever the ids are, nothing outside of the table is read, and nobody can miss it."""
    table, ids = normal(5, 20, seed=7), np.array([4, 5, -1, 2**31 - 1, 0], np.int32)
    operands = {"ids": ids, "table": table, "y": np.zeros((5, 20), np.float32)}
    params = {"rows": 0, "n": 20, "vocab": 5, "bf16": 0, "scale": 1.0}
    y = run_kernel("embed", operands, params, [5], machine)["y"].view(np.float32).reshape(5, 20)
    assert (y[[0, 4]] == table[[4, 0]]).all() and np.isnan(y[1:4]).all()


def test_gather_rows(machine: Machine) -> None:
    """Of a wider matrix; an index beyond it gives NaN."""
    x, index = normal(10, 24, seed=8), np.array([9, 0, 4, 10, -1], np.int32)
    operands = {"x": x, "index": index, "y": np.zeros((5, 19), np.float32)}
    params = {"rows": 1, "rows_from": 0, "n": 19, "x_stride": 24}
    y = run_kernel("gather_rows", operands, params, [10, 5], machine)["y"].view(np.float32).reshape(5, 19)
    assert (y[:3] == x[[9, 0, 4], :19]).all() and np.isnan(y[3:]).all()


@pytest.mark.parametrize("n", [1, 16, 37, 384])
def test_mean_rows(n: int, machine: Machine) -> None:
    """Each with the bits that it has alone."""
    lengths = np.array([1, 7, 300, 2], np.int32)
    x = normal(int(lengths.sum()), n, seed=10)
    params = {"rows": 1, "rows_from": 0, "n": n, "x_stride": n}

    def means(x: NDArray[np.float32], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        operands = {"x": x, "lengths": lengths, "y": np.zeros((len(lengths), n), np.float32)}
        got = run_kernel("mean_rows", operands, params, [len(x), len(lengths)], machine)["y"]
        return got.view(np.float32).reshape(len(lengths), n)

    together = means(x, lengths)
    assert_no_worse(together, mean_rows(x, lengths), mean_rows(x.astype(np.float64), lengths), factor=16)
    assert (means(x[8:308].copy(), lengths[2:3]) == together[2]).all()


@pytest.mark.parametrize("lengths", [[-5, 3], [4, 2**31 - 1], [2**31 - 1, 2**31 - 1], [0, 6]])
def test_any_lengths_stay_inside(lengths: list[int], machine: Machine) -> None:
    x = normal(6, 20, seed=11)
    operands = {"x": x, "lengths": np.array(lengths, np.int32), "y": np.zeros((2, 20), np.float32)}
    run_kernel("mean_rows", operands, {"rows": 1, "rows_from": 0, "n": 20, "x_stride": 20}, [6, 2], machine)


@pytest.mark.parametrize("n", [1, 2, 16, 31, 384, 1000])
@pytest.mark.parametrize("shift", [0, 1000])
def test_layer_norm(n: int, shift: float, machine: Machine) -> None:
    """Also of rows whose mean is far from 0, where a variance by squares would lose everything."""
    x, w, b = normal(5, n + 3, seed=12) + np.float32(shift), normal(n, seed=13), normal(n, seed=14)
    params = {"rows": 0, "n": n, "x_stride": n + 3, "y_stride": n * 4, "format": 0, "group": 0, "eps": 1e-12}
    operands = {"x": x, "w": w, "b": b, "y": np.zeros((5, n), np.float32)}
    y = run_kernel("layer_norm", operands, params, [5], machine)["y"].view(np.float32).reshape(5, n)
    cut = x[:, :n]
    exact = layer_norm(cut.astype(np.float64), w.astype(np.float64), b.astype(np.float64), 1e-12)
    assert_no_worse(y, layer_norm(cut, w, b, 1e-12), exact)


@pytest.mark.parametrize("format, group", [(RowFormat.BF16, 0), (RowFormat.Q8, 32), (RowFormat.HADAMARD_Q8, 64)])
def test_layer_norm_packs_as_convert_does(format: RowFormat, group: int, machine: Machine) -> None:
    n = 100
    x, w, b, stride = normal(6, n, seed=5), normal(n, seed=6), normal(n, seed=7), row_bytes(format, n, group)
    norm = {"rows": 0, "n": n, "x_stride": n, "y_stride": n * 4, "format": 0, "group": 0, "eps": 1e-6}
    inputs = {"x": x, "w": w, "b": b}
    plain = run_kernel("layer_norm", {**inputs, "y": np.zeros((6, n), np.float32)}, norm, [6], machine)["y"]
    convert = {"rows": 0, "n": n, "x_stride": n, "y_stride": stride, "format": format, "group": group}
    two = run_kernel("convert", {"x": plain, "y": np.zeros((6, stride), np.uint8)}, convert, [6], machine)["y"]
    fused = {**norm, "y_stride": stride, "format": format, "group": group}
    one = run_kernel("layer_norm", {**inputs, "y": np.zeros((6, stride), np.uint8)}, fused, [6], machine)["y"]
    assert (one == two).all()


@pytest.mark.parametrize("n", [1, 16, 37, 384])
def test_normalise(n: int, machine: Machine) -> None:
    """A row of zeros stays what it is."""
    x = normal(5, n + 2, seed=15)
    x[3] = 0
    operands = {"x": x, "y": np.zeros((5, n), np.float32)}
    params = {"rows": 0, "n": n, "x_stride": n + 2, "eps": 1e-12}
    y = run_kernel("normalise", operands, params, [5], machine)["y"].view(np.float32).reshape(5, n)
    cut = x[:, :n]
    assert (y[3] == 0).all()
    assert_no_worse(y, normalise(cut, 1e-12), normalise(cut.astype(np.float64), 1e-12))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("size", "width"),
    [(size, size) for size in (8, 16, 40, 64, 128, 136, 256, 328, 512)] + [(64, 16), (80, 32), (128, 126), (16, 2)],
)
def test_rope(size: int, width: int, interleaved: bool, machine: Machine) -> None:
    heads, T = 3, 9
    table = rotary_angles(RopeConfig(theta=10000.0), width, 64)
    x = normal(T, heads * size, seed=9)
    params = {
        "rows": 0, "heads": heads, "kv_heads": 0, "head_dim": size, "value_dim": 0, "q_stride": heads * size,
        "k_stride": 0, "v_stride": 0, "context": 64, "cache": 0, "layer": -1, "rotary_dim": width,
        "interleaved": int(interleaved),
    }  # fmt: skip
    positions = np.array([0, 1, 2, 3, 63, 5, 40, -1, 64], np.int32)  # the last two are none of the table's
    y = run_kernel("rope", {"q": x, "positions": positions, "table": table}, params, [T], machine)["q"]
    got, cut = y.view(np.float32).reshape(T, heads, size), x.reshape(T, heads, size)
    assert np.isnan(got[7:]).all()
    truth = rope(cut[:7].astype(np.float64), positions[:7], table.astype(np.float64), interleaved=interleaved)
    assert_no_worse(got[:7], rope(cut[:7], positions[:7], table, interleaved=interleaved), truth)
    assert (got[:7, :, width:] == cut[:7, :, width:]).all()


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38], np.float32)
    assert to_bf16(x).tolist() == [1.0, 1 + 2**-6, -1.0, float(np.float32(3e38).astype(ml_dtypes.bfloat16))]
