"""The emulated tile instructions of AMX against exact arithmetic, and beside the hardware's where there is AMX."""

import ctypes
import math
import threading
from collections.abc import Callable
from fractions import Fraction
from itertools import product as pairs_of
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.errors import MachineError
from millrace.kernels.library import library, usable_isas
from tests.support.emulated_amx import EMULATED, ROOT, TILED_ISAS, emulated_library, emulation, fault

Array = NDArray[Any]
FULL = [(16, 64)] * 8
BF16, BYTES = 0, {"SS": 1, "SU": 2, "US": 3, "UU": 4}  # the kinds of a product
SHAPES = [(16, 16, 16), (1, 16, 16), (16, 1, 16), (16, 16, 1), (3, 5, 7), (1, 1, 1)]  # rows, columns, and steps between


@pytest.fixture(autouse=True)
def no_tiles_are_left() -> None:
    emulated_library().emulated_release()
    assert fault() == ""


def configuration(tiles: list[tuple[int, int]], palette: int = 1, start_row: int = 0) -> bytearray:
    """tiles: (rows, bytes a row) of each; the rest has none"""
    wide = [*tiles, *[(0, 0)] * (16 - len(tiles))]
    widths = b"".join(row_bytes.to_bytes(2, "little") for _, row_bytes in wide)
    return bytearray([palette, start_row, *bytes(14), *widths, *(rows for rows, _ in wide)])


def configure(tiles: list[tuple[int, int]], **more: int) -> None:
    emulated_library().emulated_loadconfig(bytes(configuration(tiles, **more)))


def load(tile: int, rows: Array) -> None:
    emulated_library().emulated_loadd(tile, rows.ctypes.data, rows.strides[0])


def stored(tile: int, like: Array) -> Array:
    """The tile over a copy of these rows."""
    rows = like.copy()
    emulated_library().emulated_stored(tile, rows.ctypes.data, rows.strides[0])
    return rows


def products(kind: int, sums: Array, a: Array, b: Array) -> dict[str, Array]:
    """sums + a b by each instruction set that has tiles. Rows of 64 bytes at most; nothing is written behind them"""
    tiles = [(len(x), x.shape[1] * x.itemsize) for x in (sums, a, b)]
    found = {}
    for isa in TILED_ISAS:
        room = [np.full((16, 64), 0xA5, np.uint8) for _ in range(3)]
        for rows, x in zip(room, (sums, a, b), strict=True):
            rows[: len(x), : x.shape[1] * x.itemsize] = np.ascontiguousarray(x).view(np.uint8)
        if isa == EMULATED:
            configure(tiles)
            for tile in range(3):
                load(tile, room[tile])
            emulated_library().emulated_product(kind, 0, 1, 2)
            room[0] = stored(0, room[0])
        else:
            place = [rows.ctypes.data for rows in room]
            assert emulated_library().hardware_product(kind, bytes(configuration(tiles)), *place) == 1
        written = np.zeros((16, 64), np.bool_)
        written[: tiles[0][0], : tiles[0][1]] = True
        assert (room[0][~written] == 0xA5).all()
        found[isa] = np.ascontiguousarray(room[0][: tiles[0][0], : tiles[0][1]]).view(sums.dtype)
    assert fault() == ""
    return found


def nearest(x: Fraction, zero: float) -> float:
    """The float32 nearest to x, ties to even; a subnormal one is 0 of its sign, and 0 is `zero`."""
    if x == 0:
        return zero
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    value = round(size / unit) * unit
    magnitude = math.inf if value >= 2**128 else float(value) if value >= Fraction(1, 2**126) else 0.0
    return math.copysign(magnitude, x)


def fused(x: float, y: float, z: float) -> float:
    """x y + z, rounded once; subnormal operands are zeros of their sign."""
    x, y, z = (math.copysign(0.0, v) if abs(v) < 2.0**-126 else v for v in (x, y, z))
    if not all(map(math.isfinite, (x, y, z))):
        return x * y + z
    negative = math.copysign(1, x) * math.copysign(1, y) < 0 and math.copysign(1, z) < 0
    return nearest(Fraction(x) * Fraction(y) + Fraction(z), -0.0 if negative else 0.0)


def exact(sums: Array, a: Array, b: Array) -> Array:
    """Return sums + a b as Intel's manual adds: a chain of even and one of odd products from 0, both, then the tile."""
    y = np.empty_like(sums)
    for m, n in np.ndindex(y.shape):
        chains = [0.0, 0.0]
        for k, odd in pairs_of(range(len(b)), (0, 1)):
            chains[odd] = fused(float(a[m, 2 * k + odd]), float(b[k, 2 * n + odd]), chains[odd])
        y[m, n] = fused(float(sums[m, n]), 1.0, fused(chains[0], 1.0, chains[1]))
    return y


def bf16(x: Array) -> tuple[Array, Array]:
    """The bits of bfloat16, cut off, and what they say."""
    bits = x.astype(np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16), (bits << 16).view(np.float32)


def check_bf16(sums: Array, a: Array, b: Array) -> None:
    (a, wide_a), (b, wide_b) = bf16(a), bf16(b)
    with np.errstate(all="ignore"):
        expected = exact(sums, wide_a, wide_b)
    for isa, got in products(BF16, sums, a, b).items():
        number = ~np.isnan(expected)
        assert (np.isnan(got) == ~number).all(), isa
        assert (got.view(np.uint32)[number] == expected.view(np.uint32)[number]).all(), isa


@pytest.mark.parametrize(("rows", "columns", "steps"), SHAPES)
def test_bf16_products_are_rounded_as_the_manual_says(rows: int, columns: int, steps: int) -> None:
    rng = np.random.default_rng([1, rows, columns, steps])
    a, b = rng.standard_normal((rows, 2 * steps)), rng.standard_normal((steps, 2 * columns))
    check_bf16(rng.standard_normal((rows, columns)).astype(np.float32), a, b)


@pytest.mark.parametrize("low, high", [(-130, 20), (-66, -60), (-80, 80), (50, 66), (0, 3)])
def test_so_they_are_at_the_ends_of_the_range(low: int, high: int) -> None:
    """Products around the smallest normal number, subnormal inputs and sums, overflow; cancellation, ties and zeros."""
    rng = np.random.default_rng([2, low + 200, high + 200])

    def drawn(*shape: int, of: float = 1.0) -> Array:
        x = (
            np.exp2(rng.integers(low, high, shape) * of)
            * rng.integers(1, 256, shape)
            / 128
            * rng.choice([-1, 1], shape)
        )
        return np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0], shape), x)

    with np.errstate(over="ignore"):
        sums = drawn(6, 8, of=2 if high < 60 else 1).astype(np.float32)
    check_bf16(sums, drawn(6, 10), drawn(5, 16))


@pytest.mark.parametrize("below", [1.0, 1.5, 2.0])
def test_a_sum_is_subnormal_by_what_it_is_rounded_to(below: float) -> None:
    """2^-126 less 2^-151 is 2^-126 with 24 bits of precision, ties to even; less half as much again it is 0."""
    a, b = np.array([[2.0**-63, 0, 2.0**-75, 0]]), np.array([[2.0**-63, 0], [-below * 2.0**-76, 0]])
    check_bf16(np.zeros((1, 1), np.float32), a, b)
    (got,) = (
        v for isa, v in products(BF16, np.zeros((1, 1), np.float32), bf16(a)[0], bf16(b)[0]).items() if isa == EMULATED
    )
    assert got[0, 0] == (2.0**-126 if below == 1 else 0)


def test_what_is_not_finite() -> None:
    a = np.array([[np.inf, 1], [np.nan, 1], [np.inf, -np.inf], [2.0**127, 2.0**127], [-np.inf, 0]])
    b = np.array([[1, 1, 0, 1, 2.0**127, 2.0**127]])
    check_bf16(np.zeros((5, 3), np.float32), a, b)


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize(("rows", "columns", "steps"), SHAPES)
def test_byte_products_are_exact(kind: str, rows: int, columns: int, steps: int) -> None:
    rng = np.random.default_rng([3, rows, columns, steps])
    a, b = (rng.integers(0, 256, shape).astype(np.uint8) for shape in ((rows, 4 * steps), (steps, 4 * columns)))
    sums = rng.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)
    x, w = (v.view(np.int8 if sign == "S" else np.uint8).astype(np.int64) for v, sign in zip((a, b), kind, strict=True))
    truth = sums + np.einsum("mki,kni->mn", x.reshape(rows, steps, 4), w.reshape(steps, columns, 4))
    for isa, got in products(BYTES[kind], sums, a, b).items():
        assert (got == truth.astype(np.int32)).all(), isa  # which wraps


def test_sums_of_bytes_wrap() -> None:
    a, b = np.full((1, 4), 255, np.uint8), np.full((1, 4), 255, np.uint8)
    for isa, got in products(BYTES["UU"], np.array([[2**31 - 1]], np.int32), a, b).items():
        assert got[0, 0] == -(2**31) + 4 * 255 * 255 - 1, isa


def test_a_tile_has_the_rows_and_bytes_of_its_configuration() -> None:
    memory = np.arange(16 * 80, dtype=np.uint32).view(np.uint8).reshape(16, 320)
    untouched = np.full((16, 64), 7, np.uint8)
    configure([(5, 20), (16, 64), (1, 4)])
    for tile, (rows, row_bytes) in enumerate([(5, 20), (16, 64), (1, 4)]):
        load(tile, memory)
        got = stored(tile, untouched)
        assert (got[:rows, :row_bytes] == memory[:rows, :row_bytes]).all()
        got[:rows, :row_bytes] = 7
        assert (got == untouched).all()
        emulated_library().emulated_zero(tile)
        assert not stored(tile, untouched)[:rows, :row_bytes].any()
    assert fault() == ""


def test_another_configuration_leaves_nothing_in_a_tile() -> None:
    memory = np.full((16, 64), 1, np.uint8)
    configure(FULL)
    load(3, memory)
    configure(FULL)
    assert not stored(3, memory).any() and fault() == ""


def test_a_move_begins_at_the_row_where_another_was_interrupted() -> None:
    memory = np.full((16, 64), 1, np.uint8)
    configure(FULL, start_row=9)
    load(0, memory)
    got = stored(0, memory)
    assert not got[:9].any() and (got[9:] == 1).all() and fault() == ""


def test_threads_have_tiles_of_their_own() -> None:

    configure(FULL)
    thread = threading.Thread(target=lambda: emulated_library().emulated_zero(0))
    thread.start()
    thread.join()
    assert fault() == "TILEZERO: #UD: tiles are not configured"
    emulated_library().emulated_zero(0)
    assert fault() == ""


def changed(at: int, value: int) -> bytes:
    found = configuration(FULL)
    found[at] = value
    return bytes(found)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (changed(0, 2), "palette 2"),
        (changed(2, 1), "the reserved byte 2 is 1"),
        (changed(32, 1), "the reserved byte 32 is 1"),
        (changed(63, 16), "the reserved byte 63 is 16"),
        (bytes(configuration([(17, 64)])), "tmm0 has 17 rows of 64 bytes"),
        (bytes(configuration([(16, 64), (16, 65)])), "tmm1 has 16 rows of 65 bytes"),
        (bytes(configuration([(16, 64), (0, 64)])), "tmm1 has 0 rows of 64 bytes"),
        (bytes(configuration([(16, 0)])), "tmm0 has 16 rows of 0 bytes"),
    ],
)
def test_a_bad_configuration_is_a_fault_and_changes_nothing(of: bytes, why: str) -> None:
    configure(FULL)
    emulated_library().emulated_loadconfig(of)
    assert fault() == f"LDTILECFG: #GP: {why}"
    emulated_library().emulated_zero(7)
    assert fault() == "", "the tiles are as they were"


ONES = np.ones((16, 64), np.uint8)
MIXED = [(16, 64), (16, 64), (16, 64), (3, 64), (16, 60), (15, 64), (4, 6)]


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda lib: lib.emulated_zero(7), "TILEZERO: #UD: tmm7 has no rows in the configuration"),
        (lambda lib: lib.emulated_zero(8), "TILEZERO: #UD: there is no tmm8"),
        (lambda lib: load(7, ONES), "TILELOADD: #UD: tmm7 has no rows in the configuration"),
        (lambda lib: load(6, ONES), "TILELOADD: #UD: rows of tmm6 have 6 bytes, which is no multiple of 4"),
        (lambda lib: stored(7, ONES), "TILESTORED: #UD: tmm7 has no rows in the configuration"),
        (lambda lib: lib.emulated_product(0, 0, 1, 1), "TDPBF16PS: #UD: tmm0, tmm1, tmm1 are not three tiles"),
        (lambda lib: lib.emulated_product(1, 0, 0, 1), "TDPBSSD: #UD: tmm0, tmm0, tmm1 are not three tiles"),
        (lambda lib: lib.emulated_product(2, 0, 1, 7), "TDPBSUD: #UD: tmm7 has no rows in the configuration"),
        (
            lambda lib: lib.emulated_product(0, 0, 3, 1),
            "TDPBF16PS: #UD: shapes (rows x bytes) tmm0 16x64 += tmm3 3x64 times tmm1 16x64 do not match",
        ),
        (
            lambda lib: lib.emulated_product(3, 0, 1, 4),
            "TDPBUSD: #UD: shapes (rows x bytes) tmm0 16x64 += tmm1 16x64 times tmm4 16x60 do not match",
        ),
        (
            lambda lib: lib.emulated_product(4, 0, 1, 5),
            "TDPBUUD: #UD: shapes (rows x bytes) tmm0 16x64 += tmm1 16x64 times tmm5 15x64 do not match",
        ),
    ],
)
def test_what_does_not_fit_the_configuration_is_a_fault(use: Callable[[ctypes.CDLL], object], why: str) -> None:
    configure(MIXED)
    load(0, ONES)
    use(emulated_library())
    assert fault() == why
    assert (stored(0, np.zeros_like(ONES)) == ONES).all() and fault() == "", "it had no effect"


@pytest.mark.parametrize("state", ["never configured", "released", "palette 0"])
def test_nothing_goes_without_a_configuration(state: str) -> None:
    lib = emulated_library()
    if state != "never configured":
        configure(FULL)
        lib.emulated_release() if state == "released" else configure([], palette=0)
    uses: dict[str, Callable[[], object]] = {
        "TILEZERO": lambda: lib.emulated_zero(0), "TILELOADD": lambda: load(0, ONES),
        "TILESTORED": lambda: stored(0, ONES), "TDPBF16PS": lambda: lib.emulated_product(0, 0, 1, 2),
        "TDPBSSD": lambda: lib.emulated_product(1, 0, 1, 2),
    }  # fmt: skip
    for name, use in uses.items():
        use()
        assert fault() == f"{name}: #UD: tiles are not configured"


def test_a_fault_ends_a_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="TILEZERO: #UD: tiles are not configured"), emulation():
        emulated_library().emulated_zero(0)


def test_the_product_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EMULATED in TILED_ISAS and EMULATED.encode() not in library().mr_isas().split()
    assert emulated_library().mr_isas() == EMULATED.encode()
    assert not list((ROOT / "src").rglob("*emulated*")), "which is what a wheel has"
    monkeypatch.setenv("MILLRACE_ISA", EMULATED)
    with pytest.raises(MachineError, match=EMULATED):
        usable_isas()


@pytest.mark.nightly
@pytest.mark.parametrize("precision", [2, 3])
def test_the_loops_of_the_probe_are_allowed(precision: int) -> None:
    """By bytes and by bfloat16; what they measure here is the emulation."""
    rates, error = np.zeros(1), ctypes.create_string_buffer(256)
    arguments = (EMULATED.encode(), 1, precision, 0.001, 1, rates.ctypes.data, error, 256)
    assert emulated_library().mr_probe_rate(*arguments) == 0, error.value
    assert rates[0] > 0 and fault() == ""
