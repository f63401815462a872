"""The probe of matrix products counts what it says it counts."""

import pytest

from benchmarks.products import run, table
from millrace.engine.roofline_probe import product_bytes
from millrace.kernels.library import usable_isas


@pytest.mark.parametrize("precision, nbytes", [("w4a8", 64 * 128 // 2 + 64 * 2), ("bf16", 64 * 128 * 2)])
def test_rates_follow_from_the_time(precision: str, nbytes: int) -> None:
    assert product_bytes(precision, 64, 128) == nbytes
    isa = usable_isas()[0]
    result = run(isa, precision, 1, 64, 128, [1, 3])
    assert [p["rows"] for p in result["products"]] == [1, 3] and result["weights_bytes"] == nbytes
    for p in result["products"]:
        assert p["operations_per_s"] == pytest.approx(2 * p["rows"] * 64 * 128 / p["median_s"])
        assert p["weights_bytes_per_s"] == pytest.approx(nbytes / p["median_s"])
        if precision == "bf16" and isa not in ("amx", "avx512"):
            assert p["peak_per_s"] == 0, "no instruction multiplies such numbers"
        else:
            assert p["operations_per_s"] < p["peak_per_s"]
    assert len(table(result).splitlines()) == 3
