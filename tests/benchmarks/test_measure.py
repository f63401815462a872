"""What a decode step reads, which every share of the bandwidth rests on."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as alone
from benchmarks.measure import counted, read_per_step, share_of_bandwidth
from millrace.compile.resolve_model import BUNDLED
from tests.support.engines import build


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 32), ("bf16", 16), ("w8a8", 8.125), ("w4a8", 4.125)])
def test_a_step_reads_each_matrix_once(precision: str, bits: float, tmp_path: Path) -> None:
    """`tiny` has one table for its embedding, of which a row is read, and its head, which is read whole. Where layers
    have four bits, that has eight."""
    engine = build(BUNDLED / "tiny", tmp_path / "engine", precision)
    m = engine.manifest
    wider = m.vocab_size * 256 * 4 / 8 if precision == "w4a8" else 0
    expected = m.n_parameters * bits / 8 + wider
    assert read_per_step(engine) == pytest.approx(expected, rel=0.02)  # norms are float32


def test_a_share_is_of_the_bandwidth_beside_each_sample() -> None:
    """The machine became twice as slow in the middle, for the probes as well as for the work."""
    assert share_of_bandwidth([1.0, 2.0, 2.0], [100, 100, 50, 50], 90) == pytest.approx(0.9)
    assert share_of_bandwidth([1.0], [100, 50], 90) == pytest.approx(1.2), "no measurement, which `counted` says"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.9, 0.5], [0.9, 0.5]), ([0.9, 1.0], [0.9, 1.0]), ([0.9, 1.001], [None, None]), ([None, 0.9], [None, 0.9]),
        ([None, 1.2], [None, None]), ([], []),
    ],
)  # fmt: skip
def test_shares_of_a_run_count_together(shares: list[float | None], expected: list[float | None]) -> None:
    assert counted(shares) == expected


@pytest.mark.parametrize(("most", "expected"), [(0.9, [0.3, 0.6, 0.9]), (1.02, [None, None, None])])
def test_a_run_alone_counts_its_shares_together(
    monkeypatch: pytest.MonkeyPatch, most: float, expected: list[float | None]
) -> None:
    found = dict(zip((1, 4, 16), (0.3, 0.6, most), strict=True))
    monkeypatch.setattr(alone, "load_seconds", lambda *_: (SimpleNamespace(isa="x", close=lambda: None), 1.0))
    monkeypatch.setattr(alone, "peak_rates", lambda *_: [1.0])
    monkeypatch.setattr(alone, "prefill", lambda *_: SimpleNamespace(median_s=1.0, samples_s=[1.0]))
    monkeypatch.setattr(alone, "multiply_operations", lambda _: 1.0)
    monkeypatch.setattr(alone, "shares", lambda *_: [])
    monkeypatch.setattr(alone, "read_per_step", lambda _: 1)
    monkeypatch.setattr(alone, "decode", lambda executor, n, *_: (SimpleNamespace(median_s=1.0, samples_s=[n]), []))
    monkeypatch.setattr(alone, "share_of_bandwidth", lambda samples, *_: found[samples[0]])
    decodes = alone.measure(None, "bf16", 1, 1)["decode"]  # type: ignore[arg-type]
    assert [d["share_of_bandwidth"] for d in decodes] == expected
