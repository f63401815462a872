"""FP8 activations as the reference computes them: each code the nearest, and a text read as plain NumPy reads it."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.compile.build import BuildOptions, plan_pieces
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.source import Source
from millrace.evaluate.fake_quant_activations import fp8_rows, read_with_fp8
from millrace.evaluate.piecewise_forward import read
from millrace.evaluate.text_windows import Windows
from millrace.kernels.convert.ref import to_bf16, to_e4m3
from millrace.kernels.matmul.pack import rounded_e4m3
from millrace.kernels.matmul.ref import matmul_a16, matmul_e4m3
from tests.fuzz.originals import write_checkpoint
from tests.support.compressed_files import FP8_PER_TOKEN, Kind, write_compressed

CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
CODES = np.unique(CODES[np.isfinite(CODES)])


def test_rows_take_the_nearest_code_of_their_own_scale() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 40)) * 10.0 ** rng.integers(-6, 6, (7, 1))
    x[3], x[4, 1:] = 0, 0
    scales = np.abs(x).max(axis=1, keepdims=True) / 448
    exact = np.divide(x, scales, out=np.zeros_like(x), where=scales > 0)
    nearest = np.abs(exact[:, :, None] - CODES).min(axis=2)
    found = np.divide(to_e4m3(x), scales, out=np.zeros_like(x), where=scales > 0)
    np.testing.assert_allclose(np.abs(found - exact), nearest, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.abs(to_e4m3(x)).max(axis=1), np.abs(x).max(axis=1), rtol=1e-6)


def test_a_product_of_both() -> None:
    """Of values that E4M3 holds beside a largest one of 448 it is exact; of others it is that of the nearest."""
    rng = np.random.default_rng(1)
    x, w = rng.choice(CODES, (5, 64)), rng.choice(CODES, (9, 64))
    x[:, 0], w[:, 0] = 448, 448
    q: QuantisedMatrix = rounded_e4m3(w.astype(np.float32))
    np.testing.assert_array_equal(matmul_e4m3(x, q), x @ w.T)
    fine = to_bf16(rng.standard_normal((5, 64)))
    scales = np.abs(fine).max(axis=1, keepdims=True) / 448
    nearest = CODES[np.abs((fine / scales)[:, :, None] - CODES).argmin(axis=2)] * scales
    np.testing.assert_allclose(matmul_e4m3(fine, q), nearest @ w.T, rtol=1e-5, atol=1e-2)
    assert np.abs(matmul_a16(fine, q) - nearest @ w.T).max() > 1


STATIC = {**FP8_PER_TOKEN, "dynamic": False, "strategy": "tensor"}


@pytest.mark.parametrize("kind", [
    Kind("float-quantized", 8, None, floats=True, activations=FP8_PER_TOKEN), Kind(activations=FP8_PER_TOKEN),
])  # fmt: skip
def test_a_text_is_read_with_them(tmp_path: Path, kind: Kind) -> None:
    """Without them the interpreter carries what the kernels do; with them it moves as far as E4M3 moves."""
    write_compressed(tmp_path / "c", write_checkpoint(tmp_path / "source", width=64, inner=64), kind)
    source = Source.from_checkpoint(Checkpoint.open(tmp_path / "c"))
    ids = np.random.default_rng(2).integers(0, 320, (2, 70)).astype(np.int32)
    text, step = Windows(ids, 32), BuildOptions(max_batch=1, max_step_tokens=70, profile={"R": Bounds(1, 64, 64)})
    assert len(fp8_rows(source)) == 7 * len({name.split(".")[2] for name in fp8_rows(source)})
    kernels = read(tuple(plan_pieces(source, step)), text, source.vocab_size, lambda: None).carried
    simulated = read_with_fp8(source, step, text, lambda *_: None).carried
    without = {name: replace(matrix, fp8_rows=False) for name, matrix in source.stored.items()}
    plain = read_with_fp8(replace(source, stored=without), step, text, lambda *_: None).carried
    assert kernels is not None and simulated is not None and plain is not None and kernels.shape == simulated.shape
    size = np.square(kernels).mean() ** 0.5
    rounding, moved = (np.square(found - kernels).mean() ** 0.5 / size for found in (plain, simulated))
    assert rounding < 0.01 and 4 * rounding < moved < 0.2, (rounding, moved)


def test_scales_that_a_checkpoint_fixes_are_not_simulated(tmp_path: Path) -> None:
    """Nor are 8-bit integers, which run as such."""
    kind = Kind("float-quantized", 8, None, floats=True, activations=STATIC)
    write_compressed(tmp_path / "c", write_checkpoint(tmp_path / "source", width=64, inner=64), kind)
    opened = Checkpoint.open(tmp_path / "c")
    assert not fp8_rows(Source.from_checkpoint(opened)) and any("stay bfloat16" in note for note in opened.notes)
