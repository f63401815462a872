"""Results of other instance counts on one page: the plot that Triton's users know."""

import json
import re
from pathlib import Path

import pytest

from millrace.bench.infer.latency_curves import labels, read_curves
from millrace.bench.infer.results import report, write_results
from millrace.bench.null_server.ledger import NullTiming
from millrace.errors import ConfigError
from tests.bench.conftest import Null
from tests.bench.infer.test_infer import inferred


def test_instance_counts_are_lines_of_one_page(null: Null, tmp_path: Path) -> None:
    """A second instance doubles what four at a time get; the dots are what each server did."""
    one, two = (
        inferred(null(NullTiming("20", "0", instances=n), True), concurrency=("1,4",), request_count=8) for n in (1, 2)
    )
    write_results(tmp_path / "one", one)
    before = read_curves(tmp_path / "one")
    assert before == read_curves(tmp_path / "one" / "summary.json")
    write_results(tmp_path / "two", two, True, before)
    page = (tmp_path / "two" / "report.html").read_text()
    assert page.count("<circle") == 4 and page.count("<polyline") == 2
    assert re.findall(r"</svg>(batch [^<]*)</span>", page) == ["batch 1, 2 on CPU", "batch 1, 1 on CPU"]
    ((line,),) = [before]
    assert [dot.load for dot in line.dots] == ["1", "4"]
    assert [dot.median_ms for dot in line.dots] == [p["latency_ms"]["p50"] for p in report(one)["points"]]
    (ours,) = [p["inferences_per_s"]["value"] for p in report(two)["points"] if p["concurrency"] == 4]
    assert 1.5 < ours / line.dots[1].rate < 2.5
    assert labels(before) == ["batch 1"], "instances are named where they differ"


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda told: told.update(schema=9), "schema 9, where 1 is known"),
        (lambda told: told.pop("points"), 'no "points"'),
        (lambda told: told["points"][0].pop("latency_ms"), 'no "latency_ms"'),
        (lambda told: told["points"][0]["latency_ms"].update(p50=float("nan")), "inferences/s at nan ms"),
        (lambda told: told["points"][0].update(latency_ms="x"), "string indices"),
        (lambda told: told["points"].clear(), "no request was answered there"),
        (lambda told: told.update(points=told["points"] * 1001), "1001 points"),
        (lambda told: told.update(points=5), "has no len"),
    ],
)  # fmt: skip
def test_what_is_no_result(tmp_path: Path, change: object, says: str) -> None:
    point = {"batch_size": 1, "concurrency": 2, "latency_ms": {"p50": 3.0}, "inferences_per_s": {"value": 9.0}}
    told = {"schema": 1, "model": {"instances": ""}, "points": [point]}
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(told))
    assert len(read_curves(file)) == 1
    change(told)  # type: ignore[operator]
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigError) as caught:
        read_curves(tmp_path)
    assert says in str(caught.value) and str(file) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{")
    (tmp_path / "large").write_text(" " * ((1 << 24) + 1))
    for name, says in (("gone", "No such file"), ("text", "not JSON"), ("large", "more than 16 MiB")):
        with pytest.raises(ConfigError) as caught:
            read_curves(tmp_path / name)
        assert says in str(caught.value)
