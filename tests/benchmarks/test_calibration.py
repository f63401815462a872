"""What the benchmark of statistics judges: time by the slowest precision, memory by the whole process's."""

import pytest

from benchmarks import calibration, shapes


@pytest.mark.parametrize(("more", "verdict"), [(0, "goal met"), (1 << 20, "missed")])
def test_memory_is_judged_beside_the_weights(more: int, verdict: str) -> None:
    """2 GiB beside 1 GiB of weights, and 1 MiB more; of two runs the one that took more."""
    runs = {
        "fp32": {"seconds_of_all": 250.0, "peak_bytes": (3 << 30) + more},
        "bf16": {"seconds_of_all": 230.0, "peak_bytes": 1 << 30},
    }
    seconds, memory = calibration.goals(runs, 240.0, 1 << 30)
    assert (seconds["reached"], seconds["verdict"]) == (250.0, "missed")
    assert memory["reached"] == pytest.approx(2.0, abs=0.002) and memory["verdict"] == verdict


def test_weights_are_those_of_the_model() -> None:
    """TinyLlama's 1.1 billion, as its paper has them, in 16 bits."""
    assert calibration.weights_bytes(shapes.random_source("tinyllama-1.1b", 512)) == 2 * 1_100_048_384
