"""Products of weights as checkpoints hold them, with minimums and in two levels: nothing of them is rounded."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.weights.quantized_matrix import SUPER_BLOCK, QuantisedFormat, QuantisedMatrix
from millrace.kernels.convert.ref import pack_rows, to_bf16, to_q8
from millrace.kernels.declare import RowFormat, WeightFormat
from millrace.kernels.layout import matrix_bytes, n_groups, row_bytes
from millrace.kernels.library import usable_isas
from millrace.kernels.matmul import ref
from millrace.kernels.matmul.pack import interleave_codes, pack_codes, scaling
from tests.support.emulated_amx import KERNEL_ISAS
from tests.support.one_step import Machine, run_kernel
from tests.support.tolerance import assert_no_worse

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
# as the block types of GGUF; bytes of one block of their own, and how many weights it has
FORMATS = {
    "q4_1": (QuantisedFormat(4, 32, minimums=True), 20, 32),
    "q5_1": (QuantisedFormat(5, 32, minimums=True), 24, 32),
    "q4_k": (QuantisedFormat(4, 32, minimums=True, two_levels=True), 144, 256),
    "q5_k": (QuantisedFormat(5, 32, minimums=True, two_levels=True), 176, 256),
    "q6_k": (QuantisedFormat(6, 16, two_levels=True), 210, 256),
}
KINDS = [
    (name, kind) for name in FORMATS for kind in ("w4a8", "w4a16", "w8a8", "w8a16") if name[1] == "4" or kind[1] == "8"
]
ROWS = {"a8": RowFormat.Q8, "a16": RowFormat.BF16}


def random_matrix(name: str, kind: str, N: int, K: int, *, integers: bool = False) -> QuantisedMatrix:
    """Codes over their whole range. integers: scales and minimums are small ones, upper levels powers of two"""
    format = FORMATS[name][0]
    rng = np.random.default_rng([N, K, len(name + kind), integers])
    low, high = (0, 1 << format.bits) if format.minimums else (-(1 << format.bits - 1), 1 << format.bits - 1)
    groups, supers = n_groups(K, format.group), n_groups(K, SUPER_BLOCK)
    shape = (N, supers if format.two_levels else groups)

    def halves() -> NDArray[np.float16]:
        if integers:
            return (2.0 ** rng.integers(0, 2, shape)).astype(np.float16) * np.float16(rng.choice([-1, 1]))
        return (rng.standard_normal(shape) * 0.01).astype(np.float16)

    def levels(low: int, high: int) -> NDArray[np.int8] | None:
        if not format.two_levels:
            return None
        return rng.integers(*((1, 4) if integers else (low, high)), (N, groups)).astype(np.int8)

    return QuantisedMatrix(
        rng.integers(low, high, (N, K)).astype(np.int8), halves(), format.group, int(kind[1]),
        halves() if format.minimums else None,
        levels(*((0, 64) if format.minimums else (-128, 128))),
        levels(0, 64) if format.minimums else None,
    )  # fmt: skip


def multiply(kind: str, x: F32, w: QuantisedMatrix, machine: Machine, x_group: int = 0) -> F32:
    """x_group: of the activations; 0: as the weights"""
    rows = pack_rows(x, ROWS[kind[2:]], x_group or w.group)
    return product(kind, rows, x.shape[1], w, machine, x_group)


def product(kind: str, rows: NDArray[np.uint8], K: int, w: QuantisedMatrix, machine: Machine, x_group: int = 0) -> F32:
    """Of packed rows through the kernel."""
    M, N, weights = len(rows), len(w.codes), WeightFormat.W4 if w.bits == 4 else WeightFormat.W8
    y = np.zeros((M, N), np.float32)
    params = {
        "rows": 0, "n": N, "k": K, "group": w.group, "x_group": x_group or w.group,
        "format": ROWS[kind[2:]], "weights": weights,
        "scaling": scaling(w.format), "x_stride": rows.shape[1], "y_stride": N, "code": [], "imm": [],
    }  # fmt: skip
    done = run_kernel("matmul", {"x": rows, "w": pack_codes(w, weights), "y": y}, params, [M], machine)
    return done["y"].view(np.float32).reshape(M, N)


def exact(kind: str, x: F32, w: QuantisedMatrix) -> F64:
    """The class's own arithmetic in float64: only activations are rounded."""
    if kind.endswith("a8"):
        return ref.matmul_q8(to_q8(x, w.group), w)
    return ref.matmul_a16(x.astype(np.float64), w)


def plain(kind: str, x: F32, w: QuantisedMatrix) -> F32:
    """The same in float32 by NumPy, one input after the other."""
    left = to_q8(x, w.group).dequantise().astype(np.float32) if kind.endswith("a8") else to_bf16(x)
    right, y = w.dequantise().astype(np.float32), np.zeros((len(x), len(w.codes)), np.float32)
    for k in range(x.shape[1]):
        y += left[:, k, None] * right[None, :, k]
    return y


def activations(M: int, K: int) -> F32:
    return np.random.default_rng([7, M, K]).standard_normal((M, K), np.float32)


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 33, 256), (3, 31, 45), (15, 64, 293), (29, 7, 544)])
def test_only_activations_are_rounded(name: str, kind: str, M: int, N: int, K: int, machine: Machine) -> None:
    x, w = activations(M, K), random_matrix(name, kind, N, K)
    got = multiply(kind, x, w, machine)
    assert_no_worse(got, plain(kind, x, w), exact(kind, x, w))
    weights = w.dequantise()
    if kind.endswith("a8"):  # each activation is off by half a step of its group at most
        step = to_q8(x, w.group).scales.astype(np.float64).repeat(w.group, axis=1)[:, :K]
    else:
        step = np.abs(x) * 2.0**-8
    bound = 0.501 * step @ np.abs(weights).T + 1e-5 * np.abs(x) @ np.abs(weights).T
    assert (np.abs(got - x.astype(np.float64) @ weights.T) <= bound).all()


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 33, 45), (14, 40, 257), (16, 65, 613)])
def test_integers_are_exact(name: str, kind: str, M: int, N: int, K: int, machine: Machine) -> None:
    """Every sum of such products is an integer that float32 holds, so in whatever order nothing is rounded."""
    w = random_matrix(name, kind, N, K, integers=True)
    rng = np.random.default_rng([4, M, K])
    x = rng.integers(-127, 128, (M, K)).astype(np.float32)
    x[:, :: w.group] = 127  # the largest magnitude of each group: its scale is 1
    weights = w.dequantise()
    assert (np.abs(x).astype(np.float64) @ np.abs(weights).T).max() < 2**24 and (weights % 1 == 0).all()
    assert (multiply(kind, x, w, machine) == x.astype(np.float64) @ weights.T).all()


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in KINDS if kind.endswith("a8")])
@pytest.mark.parametrize(("M", "N", "K", "x_group"), [(1, 33, 45, 16), (29, 33, 325, 8)])
def test_activations_have_groups_of_their_own(
    name: str, kind: str, M: int, N: int, K: int, x_group: int, machine: Machine
) -> None:
    """Several of them share a scale and a minimum of the weights. Integers are exact, and the rest as the reference."""
    w = random_matrix(name, kind, N, K, integers=True)
    x = np.random.default_rng([4, M, K]).integers(-127, 128, (M, K)).astype(np.float32)
    x[:, ::x_group] = 127
    assert (multiply(kind, x, w, machine, x_group) == x.astype(np.float64) @ w.dequantise().T).all()
    x, w = activations(M, K), random_matrix(name, kind, N, K)
    x[:, : w.group] *= 20  # of which smaller groups know nothing
    got = multiply(kind, x, w, machine, x_group)
    expected = ref.matmul_q8(to_q8(x, x_group), w)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert (multiply(kind, x[:1], w, Machine(usable_isas()[0]), x_group)[0] == got[0]).all()


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_bits_depend_on_nothing_else(name: str, kind: str) -> None:
    """Each row alone, each instruction set and 1 to 3 threads: the same bits as all rows together."""
    x, w = activations(31, 300), random_matrix(name, kind, 130, 300)
    expected = multiply(kind, x, w, Machine(usable_isas()[0]))
    for isa in KERNEL_ISAS:
        assert (multiply(kind, x, w, Machine(isa, 1 + len(isa) % 3)) == expected).all(), isa
        for row in (0, 13, 30):
            assert (multiply(kind, x[row : row + 1], w, Machine(isa)) == expected[row]).all(), f"{isa}, row {row} alone"


@pytest.mark.parametrize("name", FORMATS)
def test_an_activation_that_is_not_finite_is_seen(name: str, machine: Machine) -> None:
    x, w = activations(3, 96), random_matrix(name, "w8a8", 40, 96)
    x[1, 70] = np.inf
    stride = row_bytes(RowFormat.Q8, 96, w.group)
    params = {"rows": 0, "n": 96, "x_stride": 96, "y_stride": stride, "format": RowFormat.Q8, "group": w.group}
    rows = run_kernel("convert", {"x": x, "y": np.zeros((3, stride), np.uint8)}, params, [3], machine)["y"]
    got = product("w8a8", rows.reshape(3, stride), 96, w, machine)
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_bytes_beside_the_files(name: str, kind: str) -> None:
    """What a step reads: at most 1.03 of the file's bytes, and what codes of five and six bits in eight take more."""
    format, block_bytes, block_weights = FORMATS[name]
    N, K, bits = 64, 1024, int(kind[1])
    weights = WeightFormat.W4 if bits == 4 else WeightFormat.W8
    of_file = N * K // block_weights * block_bytes
    wider = N * K * (bits - format.bits) / 8
    found = matrix_bytes(weights, N, K, format.group, scaling(format))
    assert len(pack_codes(random_matrix(name, kind, N, K), weights)) == found <= 1.03 * of_file + wider


def test_gate_and_up_are_interleaved_whole() -> None:
    """Scales, minimums and levels go with their outputs."""
    gate, up = (random_matrix("q4_k", "w4a8", n, 512) for n in (32, 32))
    up = replace(up, codes=15 - up.codes, scales=-up.scales)
    rows: list[Any] = [m.dequantise().reshape(2, 16, 512) for m in (gate, up)]
    assert (interleave_codes(gate, up).dequantise() == np.stack(rows, axis=1).reshape(64, 512)).all()
