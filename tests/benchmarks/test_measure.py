"""What a decode step reads, which every share of the bandwidth rests on."""

from pathlib import Path

import pytest

from benchmarks.measure import read_per_step
from millrace.runtime.open import BUNDLED
from tests.support.engines import build


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 32), ("bf16", 16), ("w8a8", 8.125), ("w4a8", 4.125)])
def test_a_step_reads_each_matrix_once(precision: str, bits: float, tmp_path: Path) -> None:
    """`tiny` has one table for its embedding, of which a row is read, and its head, which is read whole. In 4 bits the
    head is done in two steps: besides, a few rows in 8 bits."""
    engine = build(BUNDLED / "tiny", tmp_path / "engine", precision)
    rescored = 256 * 256 * 8.125 / 8 if precision == "w4a8" else 0
    expected = engine.manifest.n_parameters * bits / 8 + rescored
    assert read_per_step(engine) == pytest.approx(expected, rel=0.02)  # norms are float32
