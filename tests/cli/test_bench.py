"""`millrace bench` as people and programs run it, on the null server."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from millrace.bench.client import client_load, core_share
from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT
from millrace.bench.infer.settings import ALIASES as INFER_ALIASES
from millrace.bench.infer.settings import LevelSettings, ModelSettings
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run.run import Run, RunLoad
from millrace.bench.settings import ALIASES, InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import show_and_write, translate_flags
from millrace.cli.bench.infer_options import command as bench_infer
from millrace.cli.bench.options import command as bench
from millrace.cli.bench.progress import Begins, run_with_progress
from millrace.report.png import has_no_font
from millrace.settings import Settings, declared
from tests.cli.conftest import Millrace
from tests.serve.support import MODEL, Fake, running
from tests.support.command_line import ROOT, environment

SMALL = ("--isl", "20", "--osl", "5", "--request-count", "12", "--concurrency", "3", "--certify-s", "0")


def test_the_report_for_programs(millrace: Millrace, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    result = millrace(
        "bench", url, "--model", "m", *SMALL, "--json", "-o", str(folder), "--goodput", "ttft:500", "itl:50"
    )
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told == json.loads((folder / "summary.json").read_text())
    assert told["requests"] == {"whole": 12, "failed": 0, "by_failure": {}}
    assert told["metrics"]["input_sequence_length"]["mean"] == 20 and told["goodput"][0]["share"] == 1
    assert told["token_source"] == "the server's usage" and told["ended_early"] is None


def test_the_report_for_people(millrace: Millrace, url: str) -> None:
    result = millrace("bench", url, *SMALL, "--pattern", "10/4", "--pattern", "20/6", "--goodput", "reading-speed")
    assert result.code == 0, result.err
    for said in ("12 answers in", "output tokens/s", "TTFT, ms", "ITL, ms a token", "10/4: ", "20/6: ", "<= 90 ms",
                 "?: too few requests"):  # fmt: skip
        assert said in result.out


@pytest.mark.parametrize("streaming", ["--streaming", "--no-streaming"])
def test_tritons_generate(millrace: Millrace, url: str, streaming: str) -> None:
    """It tells no tokens: each chunk counts as one, and that is said; a model's name is in the path."""
    flags = ("--endpoint", "generate", streaming, "--json")
    told = json.loads(millrace("bench", url, "--model", "any/name", *SMALL, *flags).out)
    assert told["requests"] == {"whole": 12, "failed": 0, "by_failure": {}} and told["endpoint"] == "generate"
    assert any("tells no input lengths" in note for note in told["notes"])
    assert ("time_to_first_token" in told["metrics"]) == (streaming == "--streaming")
    if streaming == "--streaming":
        assert told["metrics"]["output_sequence_length"]["mean"] == 5
    millrace("bench", url, *SMALL, *flags).assert_mistake("--endpoint generate without a model", "--model")


def test_inferences_of_a_tensor_model(millrace: Millrace, url: str, tmp_path: Path) -> None:
    """As perf_analyzer's page writes it."""
    flags = ["-m", "null", "-u", url, "-b", "4", "--concurrency-range", "1:2", "--request-count", "6"]
    flags += ["--certify-s", "0"]
    told = json.loads(millrace("bench", "infer", *flags, "--json", "-o", str(tmp_path / "found")).out)
    points = [(p["batch_size"], p["concurrency"], p["requests"]["whole"]) for p in told["points"]]
    assert points == [(4, 1, 6), (4, 2, 6)]
    assert told == json.loads((tmp_path / "found" / "summary.json").read_text()) and told["model"]["max_batch"] == 128
    shown = millrace("bench", "infer", *flags)
    assert shown.code == 0 and "null: instances: 1 on CPU" in shown.out and "Quickest: p50 " in shown.out
    refused = millrace("bench", "infer", *flags[2:], "-m", "gone")
    assert refused.code == 2 and "'gone' is not found" in refused.err


def test_flags_of_other_tools_are_taken(millrace: Millrace, url: str) -> None:
    """As the pages of GenAI-Perf and AIPerf write them."""
    flags = ["-m", "m", "-u", url, "--endpoint-type", "chat", "--streaming", "--synthetic-input-tokens-mean=20",
             "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", "5", "--request-count", "4",
             "--num-warmup-requests", "2", "--max-concurrency", "2", "--extra-inputs", "ignore_eos:true",
             "--random-seed", "100", "-H", "x-key: value", "--json", "--certify-s", "0"]  # fmt: skip
    result = millrace("bench", *flags)
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["requests"]["whole"] == 4 and told["load"]["warm_up"] == 2 and told["load"]["seed"] == 100


def test_every_alias_is_a_flag_of_ours_and_told_in_the_docs() -> None:
    known = {flag for parameter in bench.params for flag in parameter.opts}
    page = (ROOT / "docs" / "bench.md").read_text()
    for theirs, ours in INFER_ALIASES.items():
        assert ours in {flag for parameter in bench_infer.params for flag in parameter.opts} and f"`{theirs}`" in page
    for theirs, ours in ALIASES.items():
        assert theirs not in known and (not ours or ours in known), theirs
        assert f"`{theirs}`" in page, f"docs/bench.md leaves out {theirs}"


def test_several_limits_may_follow_one_flag() -> None:
    assert translate_flags(["--goodput", "ttft:5", "itl:6", "http://x:1"]) == [
        "--goodput", "ttft:5", "--goodput", "itl:6", "http://x:1",
    ]  # fmt: skip
    assert translate_flags(["--goodput"]) == ["--goodput"] and translate_flags(["--seed=4", "-m", "x"]) == [
        "--random-seed=4", "--model", "x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        ([], ["there is no one URL"]),
        (["ftp://x"], ['the URL is "ftp://x"', "http://HOST:PORT"]),
        (["http://127.0.0.1:1"], ["gives no answer to a first question: unreachable", "start it"]),
        (["x", "--concurrency", "0"], ["--concurrency is 0", "1 to 65536"]),
        (["x", "--endpoint", "speech"], ['--endpoint is "speech"', "chat, completions"]),
        (["x", "--burstiness", "2"], ["--burstiness without"]),
        (["x", "--pattern", "short"], ['--pattern is "short"']),
        (["x", "--goodput", "tft:5"], ['--goodput knows no "tft"', 'did you mean "ttft"?']),
        (["x", "--goodput"], ["requires an argument"]),
        (["x", "--input-file", "absent.jsonl"], ["absent.jsonl cannot be read"]),
        (["x", "--prefix-prompt-length", "600"], ["a shared prefix of 600 tokens in prompts of 550"]),
        (["x", "--num-prefix-prompts", "6"], ["--num-prefix-prompts without a length"]),
        (["x", "--header", "nothing"], ['--header is "nothing"', "NAME:VALUE"]),
        (["x", "--png"], ["--png without --output", "-o"]),
        (["x", "--request-cout", "5"], ["no option --request-cout", 'did you mean "--request-count"?']),
    ],
)
def test_mistakes(millrace: Millrace, arguments: list[str], fragments: list[str]) -> None:
    millrace("bench", *arguments).assert_mistake(*fragments)


def test_a_model_or_path_that_is_not_there(millrace: Millrace, url: str) -> None:
    millrace("bench", f"{url}/elsewhere").assert_mistake(
        "status 404", "there is no /elsewhere/v1/chat", "correct --model"
    )


def test_an_invalid_trace_line_is_named(millrace: Millrace, url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 0, "input_length": "x"}\n')
    millrace("bench", url, "--input-file", str(trace)).assert_mistake(f"{trace}, line 2")


def test_a_server_that_stops_midway_leaves_what_there_is(millrace: Millrace, tmp_path: Path) -> None:
    with NullProcess(NullTiming(ttft_ms="10", itl_ms="2", fault="break", fault_every=4)) as server:
        result = millrace("bench", server.url, *SMALL, "-o", str(tmp_path))
    assert result.code == 0 and "failed (broken off)" in result.out and "9 answers" in result.out
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 12


NOBODY = "http://127.0.0.1:1"  # who asked it would hear of that


@pytest.mark.parametrize(
    "part, output, fragment",
    [
        ((NOBODY,), "/proc/nope/x", "/proc/nope/x cannot be written: No such file"),
        ((NOBODY,), "taken", "report.html is a folder"),
        ((NOBODY,), "file", "is a file"),
        (("infer", NOBODY, "--model", "m"), "/proc/nope/x", "/proc/nope/x cannot be written"),
        (("infer", NOBODY, "--model", "m"), "taken", "report.html is a folder"),
        (("sweep", NOBODY), "/proc/nope/x.html", "x.html cannot be written"),
        (("sweep", NOBODY), "taken", "taken is a folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_the_run(
    millrace: Millrace, tmp_path: Path, part: tuple[str, ...], output: str, fragment: str
) -> None:
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    (tmp_path / "file").touch()
    millrace("bench", *part, "-o", str(tmp_path / output)).assert_mistake("--output", fragment)


@pytest.mark.parametrize("part, full", [((), "requests.jsonl"), (("infer",), "summary.json"), (("sweep",), "")])
def test_a_full_disk_takes_no_figures_away(
    millrace: Millrace, url: str, tmp_path: Path, part: tuple[str, ...], full: str
) -> None:
    """They are told first, then the mistake."""
    output = tmp_path / full if full else Path("/dev/full")
    if full:
        output.symlink_to("/dev/full")
    few = (
        "--model",
        "null",
        "--request-count",
        "3",
        "--certify-s",
        "0",
        *(() if full == "summary.json" else ("--osl", "3")),
    )
    few += () if full else ("--most", "1")
    result = millrace("bench", *part, url, *few, "--json", "-o", str(tmp_path if full else output))
    result.assert_mistake("is not whole: No space left on device", "--output")
    told = json.loads(result.out)
    assert told["requests"]["whole"] == 3 if part == () else len(told["points"]) == 1


def test_files_are_written_where_nobody_reads_the_figures(tmp_path: Path) -> None:
    """`millrace bench -o results | head -1`"""

    def closed() -> None:
        raise BrokenPipeError

    def write(folder: Path) -> list[str]:
        (folder / "summary.json").touch()
        return ["summary.json"]

    with pytest.raises(BrokenPipeError):
        show_and_write(closed, tmp_path, write)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_nothing_was_answered(millrace: Millrace, url: str) -> None:
    result = millrace("bench", url, *SMALL, "--timeout-s", "0.012")
    assert result.code == 2 and "timeout" in result.err


def test_ctrl_c_still_reports(cache: Path, url: str, tmp_path: Path) -> None:
    flags = ["--isl", "10", "--osl", "5", "--duration-s", "60", "-o", str(tmp_path), "--certify-s", "0"]
    command = [sys.executable, "-m", "millrace", "bench", url, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(cache)) as process:
        assert process.stderr is not None
        assert b"running" in process.stderr.readline()  # it has begun
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert process.returncode == 0 and told["ended_early"] == "Ctrl-C" and told["requests"]["whole"] > 3, err
    assert b"The run ended early: Ctrl-C." in out and b"TTFT, ms" in out


def test_ctrl_c_between_two_runs_ends_the_next() -> None:
    async def work(begins: Begins) -> Run:
        async with Client(BenchTarget("http://127.0.0.1:9", CHAT)) as client:
            begins(Run(client, RunLoad()))
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
            begins(run := Run(client, RunLoad(n_sessions=1)))
            await run.drive(iter([]))
            return run

    run = run_with_progress(work, quiet=True)
    assert run.ended == "Ctrl-C" and not run.records
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "what comes later ends the command"


def test_the_client_proves_itself_first(millrace: Millrace, url: str) -> None:
    result = millrace("bench", url, *SMALL[:-2], "--certify-s", "0.6", "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)["client"]
    assert told["certificate"]["streams"] == 3 and 0 < told["certificate"]["chunks_per_s"] < 180
    assert told["certificate"]["delay_p50_ms"] > 0 and told["certificate"]["cpu_share"] > 0
    assert told["streams"] == 3 and told["late_ms"] == 0.0, "whoever waits for an answer is due when it has come"


@pytest.mark.timing
def test_the_client_proves_that_it_keeps_pace(millrace: Millrace, url: str) -> None:
    result = millrace("bench", url, *SMALL[:-2], "--certify-s", "0.6", "--json")
    certificate = json.loads(result.out)["client"]["certificate"]
    assert 60 < certificate["chunks_per_s"] < 180
    assert 0 < certificate["delay_p50_ms"] < 5 and 0 < certificate["cpu_share"] < 0.8


def test_a_client_that_does_not_keep_up_says_so(millrace: Millrace, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_load, "SATURATED", 1e-4)
    monkeypatch.setattr(core_share, "SHORTEST_S", 0.0)
    result = millrace("bench", url, *SMALL, "--json")
    told = json.loads(result.out)
    assert told["valid"] is False and told["notes"][0].startswith("INVALID: this client does not keep up")


def test_the_command_tells_where_the_time_went(millrace: Millrace) -> None:
    flags = ("--concurrency", "4", "--request-count", "24", "--isl", "8", "--osl", "6", "--certify-s", "0")
    with running(Fake()) as server:
        shown = millrace("bench", server.url, "--model", MODEL, "--endpoint", "completions", *flags).out
    assert "where the time went, of 24 requests that the server tells of" in shown
    assert re.search(r"\n  ms to the first token( +-?[\d.]+){5}\n    the 3 slowest", shown) and "slowest took" in shown


def test_an_engine_in_this_process(millrace: Millrace, built_tiny: Path, tmp_path: Path) -> None:
    """All queued, random tokens, exact lengths; a prompt that is longer than the context is a failure."""
    load = ("--isl", "20", "--osl", "6", "--request-count", "9", "--json")
    result = millrace("bench", "--engine", str(built_tiny), *load, "-o", str(tmp_path))
    assert result.code == 0, result.err
    told = json.loads(result.out)
    lengths = [told["metrics"][f"{side}_sequence_length"] for side in ("input", "output")]
    assert [(m["n"], m["min"], m["max"]) for m in lengths] == [(9, 20, 20), (9, 6, 6)]
    assert told["load"]["concurrency"] == 9 and told["valid"] is None and told["client"]["certificate"] is None
    whom = {name: told[name] for name in ("url", "endpoint", "model", "engine")}
    assert whom == {"url": None, "endpoint": None, "model": None, "engine": str(built_tiny)}, (
        "nobody was asked at a URL"
    )
    page = (tmp_path / "report.html").read_text()
    assert "In this process, without HTTP" in page and f"<h1>{built_tiny}</h1>" in page
    mixed = millrace("bench", "--engine", str(built_tiny), *load, "--pattern", "10/4", "--pattern", "100000/4")
    assert json.loads(mixed.out)["requests"]["by_failure"].keys() == {"server error"}
    millrace("bench", "http://x", "--engine", "tiny").assert_mistake("there is no one URL")
    millrace("bench", "--engine", "tiny", "--header", "a:b").assert_mistake(
        "--engine beside flags of a server's requests"
    )


@pytest.mark.skipif(has_no_font(), reason="no font here")
def test_plots_as_pictures(millrace: Millrace, url: str, tmp_path: Path) -> None:
    """Beside the page of a run, of inferences and of a sweep."""
    few = ("--request-count", "3", "--certify-s", "0", "--png")
    assert millrace("bench", url, "--isl", "9", "--osl", "5", *few, "-o", str(tmp_path / "run")).code == 0
    assert millrace("bench", "infer", url, "-m", "null", *few, "-o", str(tmp_path / "infer")).code == 0
    flags = ("--isl", "9", "--osl", "5", "--request-count", "3", "--most", "2", "--png", "-o", str(tmp_path / "s.html"))
    assert millrace("bench", "sweep", url, *flags).code == 0
    pictures = sorted(path.name for path in (tmp_path / "run").glob("*.png"))
    assert len(pictures) == (tmp_path / "run" / "report.html").read_text().count("<svg") and "timeline.png" in pictures
    for path in (tmp_path / "infer" / "inferences.png", tmp_path / "s.png", tmp_path / "run" / "timeline.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_two_engines_are_compared_on_recorded_traffic(millrace: Millrace, built_tiny: Path, tmp_path: Path) -> None:
    """The same engine twice is not worse; each round asks the trace's lengths of both, at its times."""
    trace = tmp_path / "traffic.jsonl"
    lines = [{"timestamp": 5 * i, "input_length": 600, "output_length": 4, "hash_ids": [1, 10 + i]} for i in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--engine", str(built_tiny), "--engine", str(built_tiny), "--input-file", str(trace), "--rounds", "3")
    result = millrace("bench", "compare", *flags, "--allow", "300", "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["failed"] == [0, 0] and told["worse"] == [] and told["ended_early"] is None
    names = ["output_tokens_per_s", "requests_per_s", "time_to_first_token", "inter_token_latency", "request_latency"]
    names += ["time_to_first_token_from_intended", "request_latency_from_intended"]
    assert {d["name"]: d["n"] for d in told["metrics"]} == dict.fromkeys(names, 3)
    shown = millrace(
        "bench", "compare", *flags[:4], "--isl", "8", "--osl", "4", "--request-count", "4", "--rounds", "3"
    )
    assert shown.code in (0, 3) and "B over A" in shown.out


@pytest.mark.parametrize(
    "settings", [TargetSettings, LoadSettings, InputSettings, SessionSettings, ModelSettings, LevelSettings]
)
def test_settings_say_what_they_are(settings: type[Settings]) -> None:
    assert 0 < len(fields(settings)) <= 12 and all(declared(f).help for f in fields(settings))
