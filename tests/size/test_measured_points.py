"""A table of measurements decides as it is read: the published decision table, row by row, and what is refused."""

from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.size.performance.measured_points import read_points, write_points
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import Limits, OperatingPoint, best, latency_optimal, throughput_optimal
from tests.size.tables import SIZING, needs_tables

HEAD = "model,gpu,precision,tp,isl,osl,concurrency,ttft_ms,itl_ms,e2e_ms,req_s"
ROW = "m,H100,fp8,1,100,11,10,100,10,200,50"


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@needs_tables
def test_the_published_decision_table() -> None:
    """Llama-3-8B, 2,000 tokens in and 200 out, H100: requests/s of 8 GPUs under each limit."""
    points, left_out = read_points(SIZING / "nim_dli_concurrency.csv")
    assert len(points) == 385 and left_out == 11, "runs that were not in their steady state"
    ours = [
        p for p in points
        if "8b" in p.model and "H100" in p.device and (p.input_tokens, p.output_tokens) == (2000, 200)
    ]  # fmt: skip

    def told(p: OperatingPoint) -> tuple[str, int, float, float, int]:
        where = p.configuration.split(" on ")[0]
        return (
            where,
            int(p.concurrency),
            round(p.rate_of_system, 2),
            round(p.mean.ttft_s * 1e3),
            round(p.mean.e2e_s * 1e3),
        )

    fp16 = [p for p in ours if p.precision == "fp16"]
    assert told(latency_optimal(ours)) == ("fp8 TP2", 1, 3.73, 30, 1073)
    assert told(best(ours, Limits(ttft_s=0.3))) == ("fp8 TP1", 10, 41.56, 221, 1924)
    assert told(best(ours, Limits(ttft_s=0.5))) == ("fp8 TP1", 25, 70.75, 489, 2825)
    assert told(best(ours, Limits(ttft_s=0.5, statistic="p95"))) == ("fp8 TP2", 25, 45.92, 367, 2176)
    assert told(best(ours, Limits(ttft_s=1.0))) == ("fp8 TP1", 150, 106.52, 975, 11080)
    assert told(throughput_optimal(ours)) == ("fp8 TP1", 250, 110.62, 1163, 17794)
    assert told(best(fp16, Limits(ttft_s=0.5))) == ("fp16 TP2", 25, 40.95, 500, 2441)


def test_limits_that_nothing_keeps_name_the_closest(tmp_path: Path) -> None:
    points, _ = read_points(table(tmp_path, HEAD, ROW))
    with pytest.raises(ConfigError, match=r"limit on TTFT and ITL \(mean\)") as said:
        best(points, Limits(ttft_s=0.05, itl_s=0.005))
    assert "fp8 TP1 on H100 with 10 in flight: TTFT 100 ms, ITL 10.0 ms" in said.value.expected
    with pytest.raises(ConfigError, match="no p95 is known"):
        best(points, Limits(ttft_s=0.5, statistic="p95"))


@pytest.mark.parametrize("lines, said", [
    ([HEAD.replace(",osl", ""), ROW], "no column osl"),
    ([HEAD, ROW, ROW.replace(",50", ",fast")], "line 3: req_s is 'fast'"),
    ([HEAD, ROW.replace(",10,100,", ",10,-1,")], "line 2: ttft_ms is '-1'"),
    ([HEAD, ROW.replace(",50", ",nan")], "line 2: req_s is 'nan'"),
    ([HEAD, ROW.replace(",50", "")], "line 2: req_s is None"),
    ([HEAD, ROW.replace(",200,50", ",200000,50")], "none has concurrency = rate x time"),
    ([HEAD], "of 0 rows none"),
    ([f"{HEAD},req_s", f"{ROW},70"], "several columns req_s"),
    ([HEAD, ROW, ROW.replace(",fp8,1,", ",fp8,0.5,")], "line 3: tp is 0.5"),
])  # fmt: skip
def test_broken_tables_are_refused_by_line(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_points(table(tmp_path, *lines))


P95 = "ttft_p95_ms,itl_p95_ms,e2e_p95_ms"


@pytest.mark.parametrize("head, row, said", [
    (HEAD, "m,H100,fp8,1,100,11,10,201,10,200,50", "line 3: ttft_ms is 201, and e2e_ms 200[^|]*before the last"),
    (HEAD, "m,H100,fp8,1,100,11,10,100,24,200,50", "line 3: 11 tokens 24 ms apart take 240 ms, and e2e_ms is 200"),
    (HEAD, "m,H100,fp8,1,100,0.5,10,100,10,200,50", "line 3: osl is '0.5'[^|]*a number from 1, at most 1e"),
    (HEAD, "m,H100,fp8,1,0,11,10,100,10,200,50", "line 3: isl is '0'"),
    (HEAD, "m,H100,fp8,1,100,11,10,100,0,200,50", "line 3: itl_ms is '0'[^|]*a number above 0, at most 1e"),
    (HEAD, "m,H100,fp8,2048,100,11,10,100,10,200,50", "line 3: tp is 2048[^|]*at most 1024"),
    (HEAD, "m,H100,fp8,1,100,11,10,100,10,200,2e12", "line 3: req_s is '2e12'[^|]*at most 1e"),
    (f"{HEAD},{P95}", f"{ROW},300,12,290", "line 3: ttft_p95_ms is 300, and e2e_p95_ms 290"),
    (f"{HEAD},{P95}", f"{ROW},150,,290", "line 3 has ttft_p95_ms, e2e_p95_ms without itl_p95_ms"),
])  # fmt: skip
def test_rows_that_no_run_has_are_refused_by_line(tmp_path: Path, head: str, row: str, said: str) -> None:
    good = ROW if head == HEAD else f"{ROW},,,"
    with pytest.raises(ConfigError, match=rf"runs\.csv, {said}"):
        read_points(table(tmp_path, head, good, row))


def test_rows_at_the_edge_are_taken(tmp_path: Path) -> None:
    """One token is the first and the last; tokens of several lengths are apart by a little more; p95 below the mean."""
    rows = ("m,H100,fp8,1,100,1,10,200,0,200,50,250,0,250", "m,H100,fp8,1,100,11,10,100,22,200,50,90,22,199",
            f"{ROW},,,")  # fmt: skip
    points, left_out = read_points(table(tmp_path, f"{HEAD},{P95}", *rows))
    assert left_out == 0 and [p.p95 is None for p in points] == [False, False, True]
    write_points(tmp_path / "again.csv", points)
    assert read_points(tmp_path / "again.csv") == (points, 0)


# Llama-3 8B in fp16 has 14.96 GB without embeddings, and the head reads as much as it stores: 16 bits of 7.5 G values
# are 15 GB, which an H100 SXM (3.35 TB/s) reads in 4.48 ms. A token in 4 ms is impossible, one in 5 ms is not.
@pytest.mark.parametrize("model, gpu, itl_ms, possible", [
    ("llama-3-8b", "H100", 4.0, False), ("llama-3-8b", "H100", 5.0, True), ("Llama-3-8B", "H100", 4.0, False),
    ("mine", "H100", 4.0, False), ("other", "H100", 4.0, True), ("llama-3-8b", "some card", 4.0, True),
])  # fmt: skip
def test_rows_that_no_device_could_do_are_refused_by_line(
    tmp_path: Path, model: str, gpu: str, itl_ms: float, possible: bool
) -> None:
    e2e_ms = 100 + 10 * itl_ms
    good = f"llama-3-8b,H100,fp16,1,100,11,1,100,10,200,{1000 / 200:g}"
    row = f"{model},{gpu},fp16,1,100,11,1,100,{itl_ms:g},{e2e_ms:g},{1000 / e2e_ms:.6g}"
    path = table(tmp_path, HEAD, good, row)
    shapes = {**PRESETS, "mine": PRESETS["llama-3-8b"]}
    if possible:
        assert len(read_points(path, shapes)[0]) == 2
    else:
        with pytest.raises(ConfigError, match=r"runs\.csv, line 3: 1\.1\d times all bandwidth \(MBU\) of 1 x H100 SXM"):
            read_points(path, shapes)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_points(tmp_path / "none.csv")


def test_a_table_without_end_is_not_read_to_it() -> None:
    """A device has no size, and a line without end is one row."""
    with pytest.raises(ConfigError, match="/dev/zero is larger than 67108864 bytes"):
        read_points(Path("/dev/zero"))


@pytest.mark.parametrize("wrong", [{"ttft_s": 0}, {"itl_s": -1}, {"e2e_s": float("nan")}, {"statistic": "median"}])
def test_limits_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Limits(**wrong)  # type: ignore[arg-type]
