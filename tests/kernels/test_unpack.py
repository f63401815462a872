"""Panels read back: what was packed, bit for bit, in every format, at sizes that fill no panel, group or block."""

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import SUPER_BLOCK, QuantisedMatrix
from millrace.kernels.declare import Scaling, WeightFormat
from millrace.kernels.layout import PANEL, matrix_bytes, n_groups, up
from millrace.kernels.matmul import unpack
from millrace.kernels.matmul.pack import interleave_codes, interleave_halves, pack_codes, pack_matrix
from millrace.kernels.matmul.unpack import part_codes, part_halves, unpack_codes, unpack_floats

F32, BF16, W8, W4, FP8 = WeightFormat.F32, WeightFormat.BF16, WeightFormat.W8, WeightFormat.W4, WeightFormat.FP8
FLOATS = [(F32, np.dtype(np.float32)), (BF16, np.dtype(ml_dtypes.bfloat16))]
WHOLE_ROW = 2400  # a group that no row below fills
GROUPS = (12, 32, 64, 128, 256, WHOLE_ROW)  # of 12, each is padded
CODED = [
    (FP8, Scaling.PLAIN, 0),
    *((f, s, g) for f in (W8, W4) for s in (Scaling.PLAIN, Scaling.MINIMUMS) for g in GROUPS),
    *((f, s, g) for f in (W8, W4) for s in (Scaling.LEVELS, Scaling.LEVELS_MINIMUMS) for g in (16, 32)),
]  # fmt: skip
SIZES = [(1, 1), (31, 45), (33, 300), (64, 512), (70, 1029), (5, 2309)]  # the last three are more than a block


def finite(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Any bits that are numbers, zeros of both signs and subnormal ones among them."""
    bits = rng.integers(0, 1 << 8 * dtype.itemsize, shape, dtype=np.uint64).astype(f"u{dtype.itemsize}")
    bits[rng.random(shape) < 0.1] &= 1 << 8 * dtype.itemsize - 1
    infinite = np.array(np.inf, dtype).view(bits.dtype)
    bits[bits & infinite == infinite] ^= infinite  # NaN becomes next to nothing
    return bits.view(dtype)


def matrix(format: WeightFormat, scaling: Scaling, group: int, n: int, k: int, seed: int = 0) -> QuantisedMatrix:
    """Codes, scales and levels over their whole ranges."""
    rng, bits = np.random.default_rng([format, scaling, group, n, k, seed]), 4 if format == W4 else 8
    if format == FP8:
        codes = rng.choice(np.delete(np.arange(256, dtype=np.uint8), (0x7F, 0xFF)), (n, k))
        return QuantisedMatrix(codes.view(np.int8), finite(rng, (n, 1), np.dtype(np.float32)), 0, 8, e4m3=True)
    low, levels, groups = (
        0 if bits == 4 and scaling % 2 else -(1 << bits - 1),
        scaling >= Scaling.LEVELS,
        n_groups(k, group),
    )
    upper = (n, n_groups(k, SUPER_BLOCK) if levels else groups)
    halves: list[Any] = [finite(rng, upper, np.dtype(np.float16)) if kind <= scaling % 2 else None for kind in (0, 1)]
    lower: list[Any] = [
        rng.integers(-128, 128, (n, groups)).astype(np.int8) if levels and kind <= scaling % 2 else None
        for kind in (0, 1)
    ]
    codes = rng.integers(low, low + (1 << bits), (n, k)).astype(np.int8)
    return QuantisedMatrix(codes, halves[0], group, bits, halves[1], *lower)


def same(found: NDArray[Any], expected: NDArray[Any]) -> bool:
    bits = f"u{expected.itemsize}"
    return (
        found.dtype == expected.dtype
        and found.flags.c_contiguous
        and np.array_equal(found.view(bits), expected.view(bits))
    )


def assert_same(found: QuantisedMatrix, expected: QuantisedMatrix) -> None:
    assert found.format == expected.format
    for name in ("codes", "scales", "minimums", "scale_levels", "minimum_levels"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None and other is None) or same(one, other), name


@pytest.mark.parametrize(("format", "scaling", "group"), CODED)
def test_codes_come_back(format: WeightFormat, scaling: Scaling, group: int) -> None:
    for n, k in SIZES:
        q = matrix(format, scaling, group, n, k)
        data = pack_codes(q, format)
        found = unpack_codes(data, format, n, k, group, scaling)
        assert_same(found, q)
        assert same(pack_codes(found, format), data)


@pytest.mark.parametrize(("format", "dtype"), FLOATS)
def test_floats_come_back(format: WeightFormat, dtype: np.dtype[Any]) -> None:
    for n, k in SIZES:
        w = finite(np.random.default_rng([format, n, k]), (n, k), dtype)
        data = pack_matrix(w, format, 0)
        found = unpack_floats(data, format, n, k)
        assert same(found, w)
        assert same(pack_matrix(found, format, 0), data)


@pytest.mark.parametrize("n", [1, 16, 19, 47])
def test_gate_and_up_come_apart(n: int) -> None:
    rows, k = 2 * up(n, 16), 293
    for format, scaling, group in CODED:
        gate, up_ = (matrix(format, scaling, group, n, k, seed) for seed in (1, 2))
        data = pack_codes(interleave_codes(gate, up_), format)
        for found, q in zip(
            part_codes(unpack_codes(data, format, rows, k, group, scaling), n), (gate, up_), strict=True
        ):
            assert_same(found, q)
    for format, dtype in FLOATS:
        halves = [finite(np.random.default_rng([format, n, seed]), (n, k), dtype) for seed in (1, 2)]
        data = pack_matrix(halves[0], format, 0, up_=halves[1])
        for part, w in zip(part_halves(unpack_floats(data, format, rows, k), n), halves, strict=True):
            assert same(part, w)


def test_parts_of_anything_interleaved() -> None:
    halves = [np.arange(seed, seed + 50 * 3).reshape(50, 3) for seed in (0, 1000)]
    for found, expected in zip(part_halves(interleave_halves(*halves), 50), halves, strict=True):
        assert same(found, expected)
    with pytest.raises(AssertionError, match="50 of gate"):
        part_halves(np.zeros((100, 3)), 50)


@pytest.mark.parametrize(("format", "scaling", "group"), [c for c in CODED if c[2] not in (12, WHOLE_ROW)])
def test_any_bytes_stay_what_they_are(format: WeightFormat, scaling: Scaling, group: int) -> None:
    """Where nothing is padded each byte means something, NaN or not: none is lost, and none has two meanings."""
    n, k = 3 * PANEL, 1280
    size = matrix_bytes(format, n, k, group, scaling)
    data = np.random.default_rng([format, scaling, group]).integers(0, 256, size, dtype=np.uint8)
    assert same(pack_codes(unpack_codes(data, format, n, k, group, scaling), format), data)


@pytest.mark.parametrize("panels", [1, 2])  # of five
def test_slabs_change_nothing(panels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 150, 293
    for format, scaling, group in CODED:
        q = matrix(format, scaling, group, n, k)
        monkeypatch.setattr(unpack, "_SLAB", panels * PANEL * k)
        assert_same(unpack_codes(pack_codes(q, format), format, n, k, group, scaling), q)
    for format, dtype in FLOATS:
        w = finite(np.random.default_rng(format), (n, k), dtype)
        monkeypatch.setattr(unpack, "_SLAB", panels * PANEL * k * dtype.itemsize)
        assert same(unpack_floats(pack_matrix(w, format, 0), format, n, k), w)


def test_a_file_that_is_mapped_to_be_read(tmp_path: Path) -> None:
    """At no place in particular."""
    n, k = 40, 77
    for format, scaling, group in CODED:
        q = matrix(format, scaling, group, n, k)
        (tmp_path / "weights").write_bytes(b"x" + pack_codes(q, format).tobytes())
        data = np.memmap(tmp_path / "weights", np.uint8, "r", offset=1)
        found = unpack_codes(data, format, n, k, group, scaling)
        assert_same(found, q)
        for array in (found.codes, found.scales):
            assert type(array) is np.ndarray and array.flags.writeable


def test_another_size_is_a_mistake_of_ours() -> None:
    data = np.zeros(matrix_bytes(BF16, 33, 5, 0), np.uint8)
    for n, k in ((32, 5), (65, 5), (33, 4), (33, 7)):
        with pytest.raises(AssertionError, match="bytes of BF16"):
            unpack_floats(data, BF16, n, k)


@pytest.mark.parametrize(("format", "scaling", "group"), [c for c in CODED if c[2] in (0, 32)])
def test_memory_is_for_slabs_and_not_for_matrices(
    format: WeightFormat, scaling: Scaling, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k, slab = 1024, 512, 1 << 16
    monkeypatch.setattr(unpack, "_SLAB", slab)
    data = pack_codes(matrix(format, scaling, group, n, k), format)
    tracemalloc.start()
    try:
        found = unpack_codes(data, format, n, k, group, scaling)
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.codes.nbytes <= left and most - left < 3 * slab < found.codes.nbytes
