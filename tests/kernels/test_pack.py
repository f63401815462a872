"""Packing in slabs: the same bytes whoever packs which slab, and memory for a few of them beside the result."""

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.compile import build
from millrace.compile.build import pack_weights
from millrace.errors import CheckpointError
from millrace.kernels.arrays import Array
from millrace.kernels.declare import WeightFormat
from millrace.kernels.layout import PANEL
from millrace.kernels.matmul import pack
from millrace.kernels.matmul.pack import SlabTask, interleave_halves, pack_codes, pack_matrix, rounded_codes
from millrace.kernels.operand_places import PackedPlace

F32, BF16, W8, W4 = WeightFormat.F32, WeightFormat.BF16, WeightFormat.W8, WeightFormat.W4
CLASSES = [(F32, 0, 0), (BF16, 0, 0), *((f, 32, hadamard_group) for f in (W8, W4) for hadamard_group in (0, 8, 32))]
K = 200  # six groups of 32, and one of 8


def weights(N: int, k: int = K, seed: int = 0) -> Array:
    w = np.random.default_rng(seed).standard_normal((N, k)).astype(np.float32)
    return w.astype(ml_dtypes.bfloat16)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_SLAB", PANEL * K)  # of one panel each


@pytest.mark.parametrize("N", [1, 32, 33, 100, 128])
@pytest.mark.parametrize(("format", "group", "hadamard_group"), CLASSES)
def test_slabs_change_no_byte(
    format: WeightFormat, group: int, hadamard_group: int, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weights(N)
    whole = pack_matrix(w, format, group, hadamard_group)
    codes = rounded_codes(w, 8, 32, hadamard_group)
    kept = pack_codes(codes, W8)
    monkeypatch.setattr(pack, "_SLAB", PANEL * K)
    with ThreadPoolExecutor(3) as pool:
        assert np.array_equal(pack_matrix(w, format, group, hadamard_group, run=pool.map), whole)
        if group:
            again = rounded_codes(w, 8, 32, hadamard_group)
            assert np.array_equal(again.codes, codes.codes) and np.array_equal(again.scales, codes.scales)
            assert np.array_equal(pack_codes(codes, W8, pool.map), kept)


@pytest.mark.parametrize("N", [1, 16, 19, 64, 75])
@pytest.mark.parametrize(("format", "group", "hadamard_group"), CLASSES)
@pytest.mark.usefixtures("small_slabs")
def test_gate_and_up_are_interleaved_slab_by_slab(
    format: WeightFormat, group: int, hadamard_group: int, N: int
) -> None:
    gate, up = weights(N, seed=1), weights(N, seed=2).astype(np.float16)  # of which there is no common type
    both = interleave_halves(gate.astype(np.float32), up.astype(np.float32))
    whole = pack_matrix(both, format, group, hadamard_group)
    assert np.array_equal(pack_matrix(gate, format, group, hadamard_group, up_=up), whole)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.usefixtures("small_slabs")
def test_codes_are_what_the_docstring_says(bits: int) -> None:
    """Beside the formula, group by group, in float64 where that cannot matter."""
    w = weights(70)
    w[3, 32:64], w[65] = 0, -w[64]
    found = rounded_codes(w, bits, 32)
    for row, (codes, scales) in enumerate(zip(found.codes, found.scales, strict=True)):
        for g in range(7):
            part = w[row, 32 * g : 32 * g + 32].astype(np.float64)
            largest = part[np.abs(part).argmax()]
            scale = np.float16(np.float32(largest) / np.float32(-(2 ** (bits - 1))))
            assert scales[g] == scale
            step = np.float32(1) / np.float32(scale) if scale else np.float32(0)
            rounded = np.rint(part.astype(np.float32) * step).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            assert np.array_equal(codes[32 * g : 32 * g + 32], rounded)


def peak(work: Callable[[], NDArray[np.uint8]]) -> int:
    """Bytes that it takes at most beside what it gives."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        nbytes = work().nbytes
        return tracemalloc.get_traced_memory()[1] - before - nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("format", "group", "hadamard_group"), CLASSES)
def test_memory_is_for_slabs_and_not_for_matrices(
    format: WeightFormat, group: int, hadamard_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = 1 << 14
    monkeypatch.setattr(pack, "_SLAB", slab)
    gate, up = weights(1024, 512), weights(1024, 512)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        most = peak(lambda: pack_matrix(gate, format, group, hadamard_group, up_=up, run=pool.map))
    assert most < 2 * 7 * 4 * slab < gate.nbytes  # seven float32 for each weight of a slab, by two threads


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("hadamard_group", [0, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_scales_do_not_hold_is_judged_by_the_matrix(bits: int, hadamard_group: int) -> None:
    """Not by the slab: rows next to nothing beside the others may come together."""
    w, format = weights(128), W8 if bits == 8 else W4
    tiny = (w.astype(np.float32) * np.float32(1e-7)).astype(w.dtype)
    w[32:64] = tiny[32:64]
    pack_matrix(w, format, 32, hadamard_group)
    pack_matrix(w, format, 32, hadamard_group, up_=tiny)
    rounded_codes(w, bits, 32, hadamard_group)
    with pytest.raises(CheckpointError, match="too small for the scales"):
        pack_matrix(tiny, format, 32, hadamard_group)
    with pytest.raises(CheckpointError, match="too small for the scales"):
        rounded_codes(tiny, bits, 32, hadamard_group)


def test_slabs_of_one_matrix_are_packed_by_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 3)
    together, put = Barrier(3, timeout=30), dict[int, int]()  # which nobody passes alone

    def packed(run: SlabTask) -> NDArray[np.uint8]:
        assert sum(1 for _ in run(lambda _: together.wait(), range(6))) == 6
        return np.zeros(8, np.uint8)

    one = PackedPlace("w", ("w",), (8,), "u8", 8, packed)
    program = SimpleNamespace(weights=[one], weights_offsets=[64], weights_bytes=72)
    pack_weights(program, lambda data, offset: put.update({offset: data.nbytes}), lambda *_: None)  # type: ignore[arg-type]
    assert put == {64: 8}
