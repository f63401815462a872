"""`millrace size`: on a screen, as JSON, from a file, asked one after the other, and what it refuses."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from millrace.cli.size import interview, options, run
from millrace.compile.cache.rooflines import store_roofline
from millrace.errors import ConfigError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores
from millrace.machine.roofline import Compute, MemoryLevel, Rate, Roofline
from millrace.size.question.settings import GROUPS
from millrace.size.simulation import capacity
from tests.cli.conftest import Millrace

ASKED = ("size", "--model", "llama-3-8b", "--isl", "2000", "--osl", "200", "--ttft-ms", "500", "--no-simulate")


def test_a_screen_has_every_part(millrace: Millrace) -> None:
    done = millrace(*ASKED, "--rate", "500", "--hardware", "H100", "--spare", "1")
    assert done.code == 0, done.err
    for said in (
        "systems", "What users wait for", "latency-optimal", "throughput-optimal", "limits on the p95", "Memory of an",
        "Why ", "What would change it", "What follows", "TensorRT-LLM 0.9.0", "what binds", "1 to spare",
    ):  # fmt: skip
        assert said in done.out


def test_json_and_a_file_agree_with_flags(millrace: Millrace, tmp_path: Path) -> None:
    flags = json.loads(millrace(*ASKED, "--rate", "500", "--json").out)
    file = tmp_path / "q.yaml"
    file.write_text("model: llama-3-8b\nisl: 2000\nosl: 200\nttft_ms: 500\nrate: 1\nsimulate: false\n")
    assert json.loads(millrace("size", "--answers", file, "--rate", "500", "--json").out) == flags
    assert flags["answer"]["systems"] >= 1 and flags["question"]["rate"] == 500


def test_help_has_every_flag_once_below_its_question(millrace: Millrace) -> None:
    told = millrace("size", "--help").out
    headings = ["Model and request lengths:", "Load:", "Latency limits:", "Hardware:", "Search:", "Costs:",
                "Input and output:", "Commands:"]  # fmt: skip
    places = [told.index(f"\n{heading}\n") for heading in headings]
    assert places == sorted(places)
    for cls, start, end in zip(GROUPS, places, places[1:], strict=False):
        for f in fields(cls):
            flag = "\n  --" + f.name.replace("_", "-")
            assert flag in told[start:end] and len(re.findall(rf"{flag}[ \n]", told)) == 1, f.name
    assert "--report" in told[places[-2] : places[-1]]


def test_mistakes(millrace: Millrace, tmp_path: Path) -> None:
    millrace("size").assert_mistake("nothing is asked")
    millrace(*ASKED, "--rate", "5", "--hardware", "H10").assert_mistake("no device is known as H10")
    millrace(*ASKED, "--input", "3500 words", "--rate", "5").assert_mistake("said twice")
    millrace(*ASKED).assert_mistake("how many requests come is not said")
    file = tmp_path / "q.yaml"
    file.write_text("raet: 5")
    millrace("size", "--answers", file).assert_mistake('did you mean "rate"')
    file.write_text("ttft-ms: 5\nttft_ms: 6")
    millrace("size", "--answers", file).assert_mistake("ttft_ms is answered twice")
    millrace("size", "--rate", "5", "fit", file).assert_mistake("answers before `fit`")


def test_the_six_questions_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong answer is asked again, and an empty one takes the default."""
    monkeypatch.setattr(run, "_is_terminal", lambda: True)
    monkeypatch.setattr(capacity, "_LEAST", 100)  # requests that are simulated
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)
    typed = "llama-3-9b\nllama-3-8b\n3500\n375 words\n10 tokens\n-5\n\nfirst 0\nfirst 500 ms\nH100\n"
    done = CliRunner().invoke(options.command, [], input=typed)
    assert done.exit_code == 0, done.output
    assert "no model is known as llama-3-9b" in done.output and "3,500 of what?" in done.output
    assert "--rate is -5.0" in done.output and "--ttft-ms is 0.0" in done.output
    assert "375 words are 500 tokens" in done.output and "peak: 10 requests/s" in done.output
    ended = CliRunner().invoke(options.command, [], input="llama-3-8b\n")
    assert ended.exit_code == 1 and "Aborted" in ended.output


@pytest.mark.parametrize("number, text, answers", [
    (1, "rag", {"preset": "rag"}), (3, "10000 users", {"users": 10_000.0}), (3, "30M/year", {"calls": "30M/year"}),
    (3, "1,000", {"rate": 1000.0}), (4, "none", {"mode": "offline"}),
    (4, "last 5000", {"mode": "sequential", "e2e_ms": 5000.0}), (5, "h100", {"hardware": ["H100 SXM"]}),
    (5, "this, H200 3g", {"hardware": ["this", "H200 SXM 3g"]}),
])  # fmt: skip
def test_what_people_type(number: int, text: str, answers: dict[str, object]) -> None:
    assert interview.QUESTIONS[number].read(text) == answers


@pytest.mark.parametrize("number, text", [(3, "many"), (4, "500"), (4, "first soon"), (5, "H1000"), (2, "rag")])
def test_what_is_asked_again(number: int, text: str) -> None:
    with pytest.raises(ConfigError):
        interview.QUESTIONS[number].read(text)


def test_a_report_is_written_and_made_again(millrace: Millrace, tmp_path: Path) -> None:
    page = tmp_path / "size.html"
    for _ in range(2):
        done = millrace(*ASKED, "--rate", "500", "--report", page, "--json")
        assert json.loads(done.out)["answer"]["systems"] and "for a browser" in done.err
        assert page.read_text().startswith("<!doctype html>")
    page.write_text("mine")
    millrace(*ASKED, "--rate", "500", "--report", page).assert_mistake("is no page of millrace")
    assert page.read_text() == "mine"
    millrace(*ASKED, "--rate", "5", "--report", tmp_path / "none" / "x.html").assert_mistake("a folder that exists")


def test_several_models_share_systems(millrace: Millrace, tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.yaml" for n in (1, 2)]
    for file, model in zip(files, ("llama-3-8b", "mistral-7b"), strict=True):
        file.write_text(f"model: {model}\nisl: 500\nosl: 100\nttft_ms: 500\nrate: 5\n")
    both = ("size", "--answers", files[0], "--answers", files[1], "--hardware", "H100", "--no-simulate")
    assert "1 for all models, of H100 SXM; 2 were each by itself" in millrace(*both).out
    told = json.loads(millrace(*both, "--json").out)
    assert told["together"]["systems"] == 1 and [m["question"]["model"] for m in told["models"]][1] == "mistral-7b"
    millrace(*both, "--report", tmp_path / "x.html").assert_mistake("--report with several models")


def test_this_machine_as_it_was_measured(millrace: Millrace, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `doctor` has kept is taken; else it is measured, and that is said."""

    def rate(value: float) -> Rate:
        return Rate(value, value, value)

    threads, isa = usable_cores(), usable_isas()[0]
    found = Roofline(threads, (MemoryLevel("DRAM", None, rate(9e9), rate(1e10)),),
                     (Compute("bf16", rate(1e11), rate(2e11), None),))  # fmt: skip
    asked = ("size", "--model", "smollm2-135m", "--isl", "64", "--osl", "16", "--rate", "0.1", "--ttft-ms", "9000",
             "--hardware", "this", "--json", "--no-simulate")  # fmt: skip
    monkeypatch.setattr(run, "measured_here", lambda: found)
    first = millrace(*asked)
    assert (
        first.err.count("Measuring this machine") == 1 and json.loads(first.out)["answer"]["point"]["system_size"] == 1
    )
    store_roofline(cache / "millrace", isa, found)
    again = millrace(*asked)
    assert "Measuring" not in again.err and again.out == first.out


def test_benchmarks_of_ones_own(millrace: Millrace, tmp_path: Path) -> None:
    """Fitted, so that what is computed is what was measured; as a stack and as a table they decide."""
    told = {"request_throughput": 8.85, "completed": 5, "total_input_tokens": 10_000, "total_output_tokens": 1000,
            "mean_ttft_ms": 489.5, "mean_tpot_ms": 11.73}  # fmt: skip
    result, runs, stack = tmp_path / "r.json", tmp_path / "runs.csv", tmp_path / "s.json"
    result.write_text(json.dumps(told))
    asked = ("size", "fit", result, "--model", "llama-3-8b", "--hardware", "H100", "--precision", "fp8")
    done = millrace(*asked, "-o", stack, "--table", runs)
    assert "2000/200" in done.out and "factors" in done.out and done.err.count("written to") == 2
    found = json.loads(millrace(*asked, "--json").out)
    assert found["after"]["rate"]["mape"] < 0.03 < found["before"]["rate"]["mape"]
    (row,) = found["results"]
    assert row["requests_per_s"] == 8.85 == pytest.approx(row["computed_requests_per_s"], rel=0.03)
    answer = json.loads(millrace("size", "--measured", runs, *ASKED[3:], "--rate", "70", "--json").out)
    assert answer["answer"]["fractional"] == pytest.approx(70 / 8 / 8.85)
    own = json.loads(millrace(*ASKED, "--rate", "70", "--stack", stack, "--json").out)
    assert "refitted to 1 run" in own["answer"]["provenance"]
    millrace(*asked, "--leave-one-out").assert_mistake("--leave-one-out of 1 runs")
    others = [tmp_path / f"{n}.json" for n in range(4)]
    for n, other in enumerate(others):
        other.write_text(json.dumps({**told, "request_throughput": 1.2 * (n + 1), "mean_tpot_ms": 6 + n}))
    left = json.loads(millrace(*asked[:2], *others, *asked[2:], "--leave-one-out", "--json").out)["left_out"]
    assert len({one["what"] for one in left}) == 5 and all(one["rate"]["n"] == 1 for one in left)
    worst = max(left, key=lambda one: one["rate"]["mape"])
    shown = millrace(*asked[:2], *others, *asked[2:], "--leave-one-out").out
    assert f"worst error of requests/s {worst['rate']['mape']:.1%}: {worst['what']}" in shown
    millrace(*asked[:-2], "--precision", "fp4").assert_mistake("does not multiply fp4")
    millrace(*asked[:2], tmp_path / "none", *asked[3:]).assert_mistake("cannot be read")
