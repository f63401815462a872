"""Products of 8-bit activations by AMX's tiles: the bits of those in lanes, whatever the rows, groups and scales."""

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.engine.native.executor import NativeProgram, StatelessExecutor
from millrace.graph.expressions import Tree
from millrace.graph.types import Symbol
from millrace.kernels.convert.ref import pack_rows
from millrace.kernels.declare import MAX_KNOBS, Param, RowFormat, Space, WeightFormat
from millrace.kernels.encode import Ref, encode
from millrace.kernels.expression import compile_tree
from millrace.kernels.layout import n_groups, row_bytes, up
from millrace.kernels.library import usable_isas
from millrace.kernels.matmul.pack import pack_codes, scaling
from tests.support.emulated_amx import TILED_ISAS
from tests.support.one_step import Machine, run_kernel

LANED = next(isa for isa in usable_isas() if isa not in TILED_ISAS)  # where the knob asks in vain
LANES, TILES = 14, 32  # the knob tile_rows
Operands = dict[str, NDArray[np.generic] | None]
SHAPES = [  # rows, N, K, group: beside blocks of 16 and 32 rows, passes of 64, panels of 32, tiles of 64 inputs
    (1, 1, 1, 4), (3, 33, 45, 12), (15, 31, 129, 128), (16, 64, 64, 16), (17, 96, 300, 64), (31, 40, 100, 20),
    (32, 32, 256, 32), (33, 65, 257, 128), (48, 7, 36, 4), (64, 34, 520, 256), (65, 130, 613, 32), (96, 33, 72, 72),
    (100, 32, 200, 88), (129, 64, 1037, 136), (130, 32, 640, 8),
]  # fmt: skip
FINER = [(24, 32, 100, 64, 32), (33, 65, 613, 128, 32), (64, 34, 520, 256, 64), (65, 33, 200, 4096, 8)]
KINDS = {
    "w8a8": QuantisedFormat(8, 0),
    "w4a8": QuantisedFormat(4, 0),
    "w8a8 with minimums": QuantisedFormat(8, 0, minimums=True),
    "w4a8 with minimums": QuantisedFormat(4, 0, minimums=True),
    "w8a8 in levels": QuantisedFormat(8, 16, two_levels=True),
    "w8a8 in levels with minimums": QuantisedFormat(8, 32, minimums=True, two_levels=True),
    "w4a8 in levels with minimums": QuantisedFormat(4, 32, minimums=True, two_levels=True),
}


def matrix(format: QuantisedFormat, N: int, K: int, group: int) -> QuantisedMatrix:
    """Codes and scales over their whole range."""
    rng = np.random.default_rng([5, N, K, group])
    unsigned = format.bits == 4 and format.minimums
    low, high = (0, 16) if unsigned else (-(1 << format.bits - 1), 1 << format.bits - 1)
    groups = n_groups(K, group)

    def halves() -> NDArray[np.float16]:
        return rng.standard_normal((N, n_groups(K, 256) if format.two_levels else groups)).astype(np.float16)

    def levels() -> NDArray[np.int8] | None:
        return rng.integers(-128, 128, (N, groups)).astype(np.int8) if format.two_levels else None

    return QuantisedMatrix(
        rng.integers(low, high, (N, K)).astype(np.int8), halves(), group, format.bits,
        halves() if format.minimums else None, levels(), levels() if format.minimums else None,
    )  # fmt: skip


def product(
    rows: int, w: QuantisedMatrix, machine: Machine, x_group: int = 0, gated: bool = False, packed: bool = False,
    more: bool = False,
) -> NDArray[np.uint8]:  # fmt: skip
    """y's bytes of random rows, some of zeros. x_group: 0: as the weights; more: bias and residual"""
    N, K = w.codes.shape
    rng = np.random.default_rng([6, rows, K])
    x = rng.standard_normal((rows, K), np.float32)
    x[rows // 2] = 0
    tree: Tree = ("mul", ("mul", 0, ("sigmoid", 0)), 1)
    code, numbers = compile_tree(tree, 2) if gated else ([], [])
    width = N // 2 if gated else N
    stride = up(width, 32) if packed else width
    weights = WeightFormat.W8 if w.bits == 8 else WeightFormat.W4
    params: dict[str, Param] = {
        "rows": 0, "n": N, "k": K, "group": w.group, "x_group": x_group or w.group, "format": RowFormat.Q8,
        "weights": weights, "scaling": scaling(w.format), "x_stride": row_bytes(RowFormat.Q8, K, x_group or w.group),
        "y_stride": stride,
        "gated": int(gated), "packed": int(packed), "code": code, "imm": numbers,
    }  # fmt: skip
    operands: Operands = {
        "x": pack_rows(x, RowFormat.Q8, x_group or w.group), "w": pack_codes(w, weights),
        "bias": rng.standard_normal((N,), np.float32) if more else None,
        "residual": rng.standard_normal((rows, stride), np.float32) if more else None,
        "y": np.zeros((rows, stride * (2 if packed else 4)), np.uint8),
    }  # fmt: skip
    return run_kernel("matmul", operands, params, [rows], machine)["y"]


@pytest.fixture(params=TILED_ISAS)
def tiled(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "N", "K", "group"), SHAPES)
def test_bits_are_those_of_lanes(kind: str, rows: int, N: int, K: int, group: int, tiled: str) -> None:
    format = KINDS[kind]
    w = matrix(format, N, K, format.group or group)
    tiles = product(rows, w, Machine(tiled, 1 + rows % 3, TILES))
    assert (tiles == product(rows, w, Machine(tiled, 1, LANES))).all()
    assert (tiles == product(rows, w, Machine(LANED, 1))).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "N", "K", "group", "x_group"), FINER)
def test_so_they_are_with_smaller_groups_of_rows(
    kind: str, rows: int, N: int, K: int, group: int, x_group: int, tiled: str
) -> None:
    format = KINDS[kind]
    w = matrix(format, N, K, format.group or group)
    own = x_group if w.group > x_group else 8
    tiles = product(rows, w, Machine(tiled, 1 + rows % 3, TILES), own)
    assert (tiles == product(rows, w, Machine(tiled, 1, LANES), own)).all()
    assert (tiles == product(rows, w, Machine(LANED, 1), own)).all()
    assert (tiles != product(rows, w, Machine(tiled, 1, LANES))).any()


@pytest.mark.parametrize("kind", ["w8a8", "w4a8 with minimums"])
@pytest.mark.parametrize("rows", [5, 32, 81])
@pytest.mark.parametrize("way", [{"gated": True}, {"packed": True}, {"gated": True, "packed": True}, {"more": True}])
def test_the_epilogue_is_the_same(kind: str, rows: int, way: dict[str, bool], tiled: str) -> None:
    w = matrix(KINDS[kind], 192, 160, 32)
    lanes, tiles = (product(rows, w, Machine(tiled, 2, knob), **way) for knob in (LANES, TILES))
    assert (tiles == lanes).all() and tiles.any()


def test_a_row_beyond_numbers_is_seen(tiled: str) -> None:
    """Its scale is NaN; zeros behind a group's end do not hide it, and other rows do not feel it."""
    w = matrix(KINDS["w8a8"], 40, 100, 32)
    x = np.random.default_rng(7).standard_normal((40, 100), np.float32)
    rows = pack_rows(x, RowFormat.Q8, 32)
    rows[33, 104:108] = np.array([np.nan], np.float32).view(np.uint8)  # of its first group
    params: dict[str, Param] = {
        "rows": 0, "n": 40, "k": 100, "group": 32, "x_group": 32, "format": RowFormat.Q8, "weights": WeightFormat.W8,
        "x_stride": rows.shape[1], "y_stride": 40,
    }  # fmt: skip
    operands: Operands = {"x": rows, "w": pack_codes(w, WeightFormat.W8), "y": np.zeros((40, 40), np.float32)}
    y = run_kernel("matmul", operands, params, [40], Machine(tiled, 1, TILES))["y"].view(np.float32).reshape(40, 40)
    assert np.isnan(y[33]).all() and np.isfinite(np.delete(y, 33, axis=0)).all()


def test_nothing_is_left_of_another_product(tiled: str) -> None:
    """A worker's scratch still holds the codes of a larger one, where this one's last group ends in zeros."""
    calls, weights, memory = b"", b"", b""
    rng = np.random.default_rng(8)
    for K, group in ((1024, 128), (330, 64)):
        w = matrix(KINDS["w8a8"], 32, K, group)
        x = pack_rows(rng.standard_normal((32, K), np.float32), RowFormat.Q8, group)
        params: dict[str, Param] = {
            "rows": 0, "n": 32, "k": K, "group": group, "x_group": group, "format": RowFormat.Q8,
            "weights": WeightFormat.W8,
            "x_stride": x.shape[1], "y_stride": 32,
        }  # fmt: skip
        operands = {
            "x": Ref(Space.ACTIVATIONS, len(memory)), "w": Ref(Space.WEIGHTS, len(weights)),
            "y": Ref(Space.ACTIVATIONS, len(memory) + x.size),
        }  # fmt: skip
        calls += encode("matmul", operands, params)
        weights += pack_codes(w, WeightFormat.W8).tobytes()
        memory += x.tobytes() + bytes(32 * 32 * 4)
    program = NativeProgram(
        calls=calls, n_calls=2, weights=np.frombuffer(weights, np.uint8), weights_bytes=len(weights),
        activation_bytes=len(memory), symbols={Symbol("rows"): 32},
    )  # fmt: skip
    network = StatelessExecutor(program, threads=1, isa=tiled)
    network.set_tactics([(i, 1, (TILES,) + (0,) * (MAX_KNOBS - 1)) for i in range(2)])
    network.activations()[:] = np.frombuffer(memory, np.uint8)
    network.compute([32])
    y = network.activations()[-32 * 32 * 4 :].copy()
    network.close()
    arrays: Operands = {"x": x, "w": pack_codes(w, WeightFormat.W8), "y": np.zeros((32, 32), np.float32)}
    assert (y == run_kernel("matmul", arrays, params, [32], Machine(LANED))["y"]).all()
