"""`millrace bench sweep` and `compare` as people and programs run them, on the null server."""

import json
from pathlib import Path

import pytest

from millrace.bench.client import client_load, core_share
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run import plan
from millrace.bench.run.plan import BenchPlan
from millrace.bench.run.run import Run
from millrace.cli.bench import compare, sweep
from millrace.cli.bench.progress import Begins
from tests.cli.conftest import Millrace

SMALL = ("--isl", "20", "--osl", "5", "--request-count", "12", "--concurrency", "3", "--certify-s", "0")


def test_a_slower_server_is_found_and_ends_with_3(millrace: Millrace, url: str, tmp_path: Path) -> None:
    with NullProcess(NullTiming(ttft_ms="10", itl_ms="4")) as slower:
        rounds = ("--isl", "10", "--osl", "10", "--request-count", "6", "--concurrency", "2", "--rounds", "4")
        worse = millrace("bench", "compare", url, slower.url, *rounds, "--certify-s", "0.4", "--json")
        better = millrace("bench", "compare", slower.url, url, *rounds, "--allow", "30", "--certify-s", "0")
    assert worse.code == 3, worse.err
    told = json.loads(worse.out)
    assert "inter_token_latency" in told["worse"] and told["failed"] == [0, 0] and told["ended_early"] is None
    assert told["valid"] is not told["client"].startswith("NOT CERTIFIED") and "2 streams, " in told["client"]
    assert better.code == 0 and "better" in better.out and "visible" in better.out and "client:" not in better.out


def test_two_servers_are_asked_the_same(millrace: Millrace, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever each makes of words: the old server and the new one may count tokens otherwise."""
    per_word = iter((1.0, 4.0))

    async def reached(plan: BenchPlan) -> PromptWords:
        return PromptWords(next(per_word))

    monkeypatch.setattr(compare, "check_server", reached)
    with NullProcess(NullTiming(ttft_ms="2", itl_ms="1")) as a, NullProcess(NullTiming(ttft_ms="2", itl_ms="1")) as b:
        few = ("--isl", "20", "--osl", "3", "--request-count", "2", "--rounds", "3", "--certify-s", "0")
        assert millrace("bench", "compare", a.url, b.url, *few, "--allow", "1000").code == 0
        asked = [sorted(sent.n_prompt for sent in server.truth_list) for server in (a, b)]
    assert asked[0] == asked[1] and len(asked[0]) == 6 and min(asked[0]) > 15


def test_two_results_are_compared(millrace: Millrace, url: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert millrace("bench", url, *SMALL, "--json", "-o", str(tmp_path / name)).code == 0
    result = millrace("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--allow", "100000")
    assert result.code == 0 and "request_latency" in result.out and "INVALID" not in result.out
    with NullProcess(NullTiming(ttft_ms="10", itl_ms="2", fault="break", fault_every=4)) as server:
        again = millrace("bench", server.url, *SMALL, "-o", str(tmp_path / "b"))
    assert f"{tmp_path / 'b'} holds an earlier result" in again.err
    summary = tmp_path / "a" / "summary.json"
    summary.write_text(summary.read_text().replace('"valid": null', '"valid": false', 1))
    both = ("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--allow", "1000")
    told, shown = json.loads((result := millrace(*both, "--json")).out), millrace(*both).out
    assert result.code == 3 and told["worse"] == ["failures"] and told["valid"] is False
    assert (told["failed"], told["requests"]) == ([0, 3], [12, 12])
    assert "INVALID: the client of A did not keep up" in shown and "0 of A's 12, 3 of B's 12" in shown
    limits = ("--goodput", "latency:100000", "ttft:0.001")
    told, shown = json.loads(millrace(*both, *limits, "--json").out), millrace(*both, *limits).out
    assert [(g["limits"], g["a"], g["b"]) for g in told["goodput"]] == [
        ("request_latency <= 100000 ms and time_to_first_token <= 0.001 ms", 0, 0)
    ]
    assert "0.0% of A's requests, 0.0% of B's" in shown
    millrace(*both, "--goodput", "tft:5").assert_mistake('--goodput knows no "tft"')
    millrace("bench", "compare", str(tmp_path / "a"), url).assert_mistake("one is a file, one is none")
    millrace("bench", "compare", str(tmp_path), str(tmp_path)).assert_mistake("cannot be read")


def test_a_sweep_ends_where_the_limit_breaks(millrace: Millrace, url: str, tmp_path: Path) -> None:
    flags = ["--isl", "10", "--osl", "5", "--request-count", "8", "--most", "4", "-o", str(tmp_path / "sweep.html")]
    result = millrace("bench", "sweep", url, *flags, "--ttft-ms", "200", "--certify-s", "0.4", "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert "will be overwritten" not in result.err
    assert [p["level"] for p in told["points"]] == [1, 2, 4] and told["within"]["level"] in (1, 2, 4)
    assert (tmp_path / "sweep.html").read_text().count("<circle") == 3
    assert "tells nothing" in told["limited_by"]
    assert told["valid"] is not told["client"].startswith("NOT CERTIFIED")
    assert told["client"] in (tmp_path / "sweep.html").read_text() and " streams, " in told["client"]
    result = millrace("bench", "sweep", url, *flags, "--ttft-ms", "1", "--certify-s", "0")
    assert result.code == 0 and "best within limits  none" in result.out
    assert "sweep.html is there; it will be overwritten" in result.err


def test_levels_of_a_sweep_ask_different_texts(millrace: Millrace, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same ones when it is done again; the seed is the largest that there is."""
    texts: list[frozenset[str]] = []

    async def measure(asked: BenchPlan, begins: Begins) -> Run:
        run = await measuring(asked, begins)
        texts.append(frozenset(r.turn.text for r in run.records))
        return run

    measuring = plan.measure
    monkeypatch.setattr(sweep, "measure", measure)
    flags = ("--isl", "10", "--osl", "3", "--request-count", "4", "--most", "4", "--certify-s", "0")
    for _ in range(2):
        assert millrace("bench", "sweep", url, *flags, "--random-seed", str(2**63)).code == 0
    assert texts[:3] == texts[3:] and len(frozenset.union(*texts)) == 12


def test_a_sweep_of_embeddings(millrace: Millrace, url: str) -> None:
    flags = ("--endpoint", "embeddings", "--isl", "9", "--request-count", "6", "--certify-s", "0")
    told = json.loads(millrace("bench", "sweep", url, *flags, "--most", "4", "--json").out)
    rates = {p["level"]: p["requests_per_s"] for p in told["points"]}
    assert told["ranked_by"] == "requests/s" and told["throughput"]["level"] == max(rates, key=lambda n: rates[n])
    shown = millrace("bench", "sweep", url, *flags, "--most", "1").out
    assert "most requests/s" in shown and "tokens/s, " not in shown
    notes = json.loads(millrace("bench", url, *flags, "--json").out)["notes"]
    assert not [note for note in notes if "length asked for" in note]


def test_a_saturated_client_makes_sweep_and_compare_invalid(
    millrace: Millrace, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_load, "SATURATED", 1e-4)
    monkeypatch.setattr(core_share, "SHORTEST_S", 0.0)
    few = ("--isl", "9", "--osl", "3", "--request-count", "3", "--certify-s", "0", "--json")
    told = json.loads(millrace("bench", "sweep", url, *few, "--most", "2").out)
    assert told["valid"] is False and told["notes"][0].startswith("INVALID") and "(at 1 and 2: " in told["notes"][0]
    assert all(0 < p["client_cpu_share"] < 1 and p["valid"] is False for p in told["points"])
    told = json.loads(millrace("bench", "compare", url, url, *few, "--rounds", "3", "--allow", "1000").out)
    assert told["valid"] is False and told["notes"][0].startswith("INVALID") and 0 < told["client_cpu_share"] < 1


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        (["sweep", "x", "--concurrency", "4"], ["--concurrency in a sweep of it"]),
        (["sweep", "x", "--by", "rate", "--request-rate", "4"], ["--request-rate in a sweep"]),
        (["sweep", "x", "--from", "8", "--most", "4"], ["--most 4 is below --from 8"]),
        (["sweep", "x", "--from", "1.5"], ["--from 1.5", "a whole number"]),
        (["sweep"], ["Missing argument 'URL'", "millrace bench sweep"]),
        (["compare", "x"], ["there are not two to compare", "--engine twice"]),
        (["compare", "--engine", "tiny"], ["1 engines", "--engine A --engine B"]),
        (["compare", "x", "--engine", "tiny", "--engine", "tiny"], ["--engine A --engine B, and no URL"]),
        (["compare", "x", "y", "--rounds", "1"], ["1 is not in the range"]),
    ],
)
def test_mistakes_of_sweep_and_compare(millrace: Millrace, arguments: list[str], fragments: list[str]) -> None:
    millrace("bench", *arguments).assert_mistake(*fragments)


@pytest.mark.parametrize("part", ["sweep", "compare"])
def test_the_parts_have_their_own_help(millrace: Millrace, part: str) -> None:
    result = millrace("bench", part, "--help")
    assert result.code == 0 and f"Usage: millrace bench {part}" in result.out and "Examples:" in result.out
