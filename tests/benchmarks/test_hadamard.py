"""The price of rounding is taken in pairs of the same work: same rows, same bytes of weights, other activations."""

import numpy as np
import pytest

from benchmarks import hadamard
from benchmarks.hadamard import GROUP, OTHERS, PLAIN, WEIGHTS, Rows, layer, line, priced
from millrace.kernels.declare import RowFormat
from millrace.kernels.library import usable_isas
from millrace.kernels.matmul.pack import hadamard as transformed

SMALL = {"up": (96, 256), "down": (64, 128)}


def test_a_ratio_is_the_median_of_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Way i takes 1 + i seconds, on a machine that is slower from pair to pair: ratios do not see that."""
    calls = {"n": 0, "pair": 0}
    ways = [PLAIN, *OTHERS]

    def took(network: object, rows: int, repeats: int) -> float:
        at = calls["n"]
        calls["n"] += 1
        if at < 2 * len(ways):
            return 1.0
        pair, turn = divmod(at - 2 * len(ways), len(ways))
        way = turn if pair % 2 else len(ways) - 1 - turn
        return (1.0 + way) * (1 + pair)

    monkeypatch.setattr(hadamard, "sample_s", took)
    found = priced(2, "w8", usable_isas()[0], 1, 3, SMALL)
    assert [w["ratio"] for w in found["ways"]] == [1 + i for i in range(len(ways))]
    assert [w["name"] for w in found["ways"]][:2] == ["groups of 128", "groups of 128, by Hadamard"]
    assert "groups of 128, by Hadamard +100.0%" in line(found) and found["repeats"] == 1


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_what_is_timed_runs(weights: str, rows: int) -> None:
    found = priced(rows, weights, usable_isas()[0], 1, 2, SMALL)
    assert len(found["ways"]) == 1 + len(OTHERS)
    assert all(len(w["samples_s"]) == 2 and min(w["samples_s"]) > 0 for w in found["ways"])


@pytest.mark.parametrize("format", [RowFormat.Q8, RowFormat.HADAMARD_Q8])
def test_rows_are_rounded_within_what_is_timed(format: RowFormat) -> None:
    """The codes that the conversion leaves for the last product, of rows that are transformed or are not."""
    k = SMALL["down"][1]
    network = layer(1, WEIGHTS["w8"], Rows(format, GROUP), usable_isas()[0], 1, SMALL)
    try:
        x = network.activations()[: 4 * k].view(np.float32).copy()[None]
        network.compute([1])
        codes = network.activations()[4 * 256 :][:k].view(np.int8)
    finally:
        network.close()
    exact = transformed(x, GROUP)[0] if format == RowFormat.HADAMARD_Q8 else x[0]
    assert np.abs(codes - exact * (127 / np.abs(exact).max())).max() <= 0.51
