"""`auto` on a real model: what it takes, what it says of that, and how long it needs."""

import time
from pathlib import Path

import pytest

from millrace.compile.builder import build_engine
from millrace.compile.settings import BuildSettings
from millrace.tune.precision_selector import precision_selector
from tools.nightly.packages import smollm2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_auto_takes_the_integers_that_smollm2_stores(tmp_path: Path) -> None:
    """135 M parameters in Q4_1: exact as they are, so that only 8-bit activations cost anything."""
    start_s = time.perf_counter()
    auto = BuildSettings(precision="auto", max_context=1024, tune=0)
    engine = build_engine("smollm2", smollm2(), tmp_path / "auto", auto, new_selector=precision_selector)
    assert time.perf_counter() - start_s < 120
    evaluation = engine.manifest.evaluation
    assert [p.name for p in evaluation.tried] == ["w4a8 as stored, lm_head w8a8"] and evaluation.tokens > 1000
    assert (
        evaluation.chosen_loss is not None
        and evaluation.chosen_loss.kl is not None
        and 0 < evaluation.chosen_loss.kl < 0.01
    )
    rounded = BuildSettings(precision="w4a8", group=128, max_context=1024, tune=0)
    again = build_engine(
        "smollm2", smollm2(), tmp_path / "rounded", rounded, new_selector=precision_selector
    ).manifest.evaluation
    assert (
        again.chosen_loss is not None and again.chosen_loss.kl is not None and again.chosen_loss.kl > 0.1
    )  # four bits, rounded twice
