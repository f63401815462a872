"""The native probes give plausible figures on every instruction set of this machine, and refuse nonsense."""

import pytest

from millrace.engine.roofline_probe import PRECISIONS, ROUNDS, matmul_rates, peak_rates, read_rates
from millrace.errors import MachineError
from millrace.kernels.library import usable_isas


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("threads", [1, 2])
def test_reading(isa: str, threads: int) -> None:
    rates = read_rates(isa, threads, 16 << 10)
    assert len(rates) == ROUNDS and 1e8 < max(rates) < 1e13 and min(rates) > 0


@pytest.mark.parametrize("isa", usable_isas())
def test_multiplying(isa: str) -> None:
    assert 1e8 < max(peak_rates(isa, "fp32", 1)) < 1e13
    for precision in ("bf16", "int8"):
        rates = peak_rates(isa, precision, 1)
        assert all(rate == 0 for rate in rates) or 1e8 < max(rates) < 1e14


@pytest.mark.timing
@pytest.mark.parametrize("precision", PRECISIONS)
def test_our_own_products_stay_below_the_instructions_peak(precision: str) -> None:
    """In one of three looks: beside other work the peak may be seen at less than half of what it is."""
    isa = usable_isas()[0]
    looks = (
        (max(matmul_rates(isa, precision, 1)), max(peak_rates(isa, PRECISIONS[precision], 1))) for _ in range(3)
    )  # fmt: skip
    assert any(ours > 1e8 and (peak == 0 or ours < 1.5 * peak) for ours, peak in looks), (
        "half as much again for a clock that changes between the two"
    )


@pytest.mark.parametrize(
    "isa, threads, nbytes, message",
    [
        ("mmx", 1, 1 << 20, "mmx cannot run here"),
        ("scalar", 0, 1 << 20, "threads"),
        ("scalar", 1, 1000, "whole KiB"),
        ("scalar", 1, 0, "whole KiB"),
    ],
)
def test_nonsense_is_refused(isa: str, threads: int, nbytes: int, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        read_rates(isa, threads, nbytes)
