"""What the page of performance must not keep to itself: missed goals, engines left out, how peers were built."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import losses, page_rows, readme, runs
from benchmarks import page as pages
from benchmarks.page import page
from benchmarks.runs import REAL, Numbers, kind, left_out, remarks, results

MACHINE = {"cpu": "a CPU", "cores": 2}


def given(monkeypatch: pytest.MonkeyPatch, **result: Any) -> list[str]:
    """The page's lines where this is the only result with goals."""
    whole = {"date": "2026-01-31", "commit": "abc", "command": "python -m benchmarks.peers", "shape": "s", **result}
    monkeypatch.setattr(pages, "results", lambda: [("file.json", {**whole, "machine": MACHINE})])
    return page().splitlines()


def test_every_kind_of_result_and_every_engine_left_out_is_on_the_page() -> None:
    told = page()
    for name, result in results():
        assert result["commit"] in told, name
        if kind(result) == "peers":
            assert all(line in told for line in (*left_out(result), *remarks(result))), name
    assert {kind(r) for _, r in results()} - {"hadamard", "gpu", "busy_machine"} == {  # of these there may be none yet
        "alone", "calibration", "compression", "contexts", "embeddings", "gpu_kernels", "grammars", "loop", "mmlu",
        "peers", "perplexity", "products", "scores", "serving", "sizing", "start", "tensors", "tensors.backends",
        "tensors.batching", "tensors.child", "tensors.routes", "triton_tests", "truth", "versions",
    }  # fmt: skip
    for shown in (
        "operations/s by rows",
        "sampling of 16 rows",
        "over HTTP",
        "decode by depth",
        "build, s",
        "16 masks of 16 grammars",
        "statistics of 128 samples",
        "| int4-gptq-clip | w4a16 |",
    ):
        assert shown in told


def test_kernels_for_gpus_are_told_one_by_one_of_the_newest_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(commit: str, spilled: int) -> dict[str, Any]:
        of = {"kernel": "attend", "about": "", "architecture": "sm_90", "registers": 100, "shared_bytes": 2048}
        two = [{**of, "spilled_bytes": spilled}, {**of, "kernel": "norm", "spilled_bytes": 0, "registers": 32}]
        return {"date": "2026-01-31", "commit": commit, "machine": MACHINE, "kernels": two, "file": f"{commit}.json"}

    monkeypatch.setattr(page_rows, "of_kind", lambda kind: [("", run("old", 8)), ("", run("new", 4))])
    rows = list(page_rows._gpu_kernels())
    assert [label.split(", ")[1] for *_, label in rows] == ["old", "new", "new"]
    assert [label.split(", ")[-1] for *_, label in rows] == ["`old.json`", "`new.json`", "`new.json`"]
    assert rows[0][1] == "2 of them, 100 registers at most, 2,048 bytes shared; 1 spill, 8 bytes"
    assert rows[1][:2] == ["GPU kernel, compiled alone: attend, sm_90", "100 registers, 2,048 bytes shared, 4 spilled"]


OURS = {"weights": "int8, groups of 128", "activations": "int8, groups of 128", "head": "w8a8 g128", "kv": "bf16"}
THEIRS = {"weights": "Q8_0", "activations": "int8, groups of 32", "head": "Q8_0", "kv": "fp16"}
BY_TILES = "attention by tiles"


def score(name: str, kl: float, numbers: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        "precision": name,
        **numbers,
        "perplexity": 20 + kl,
        "ratio": 1 + kl,
        "mean_kl": kl,
        "agreement": 0.9,
    } | more


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Made-up results: answers of five engines that differ in one thing each, and a race of three."""
    whole = {"date": "2026-01-31", "time": "2026-01-31T12:00:00Z", "commit": "abc", "machine": MACHINE}
    speed = {
        name: {"tokens_per_s": rate, "samples_s": [1.0, 0.5, 2.0], "read_bytes_per_s": [1e9] * 3}
        for name, rate in (("prefill-512", 1234.0), ("decode-1", 56.0), ("decode-16", 789.0))
    }  # fmt: skip
    scores = [
        score("w8a8", 0.0011, OURS, attention="", speed=speed), score("int8 kv", 0.0033, {**OURS, "kv": "int8"}),
        score("by tiles", 0.0022, OURS, attention=BY_TILES), score("llama.cpp", 0.0044, THEIRS),
    ]  # fmt: skip
    more = [{"about": "the short cut", "text": "32 pieces", "tokens": 6112, "scores": [score("x", 0.0055, OURS)]}]
    answers = {
        **whole, "command": "python -m benchmarks.perplexity", "model": REAL, "text": "t", "tokens": 9,
        "scores": scores, "heads": [], "more": more,
    }  # fmt: skip
    engines = {
        name: {**numbers, "version": "1", "settings": settings, "weights_bytes": 5_000_000, "correlation": 0.987}
        for name, numbers, settings in (
            ("millrace-w8a8", {**OURS, "attention": BY_TILES}, {"isa": "amx"}),
            ("millrace-plain", {**OURS, "attention": ""}, {}),
            ("llama.cpp", THEIRS, {"amx": "no AMX", "tried": {"decode-1": [{"flash": True, "seconds": 0.25}]}}),
        )
    }  # fmt: skip
    samples = [
        {"engine": name, "workload": "decode-1", "seconds": s}
        for name, taken in (("millrace-w8a8", (1, 2, 4)), ("millrace-plain", (3, 3, 3)), ("llama.cpp", (5, 5, 5)))
        for s in taken
    ]
    workload = {"phase": "decode", "users": 1, "prompt": 16, "new": 64}
    peers = {
        **whole, "command": "python -m benchmarks.peers", "shape": REAL, "engines": engines, "samples": samples,
        "workloads": {"decode-1": workload}, "left_out": {"openvino-int4": "it computes another model"}, "goals": [],
    }  # fmt: skip
    for name, result in (("perplexity", answers), ("peers", peers)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    for kept in (runs.accuracy, runs.made_alike):
        kept.cache_clear()
    yield
    for kept in (runs.accuracy, runs.made_alike):
        kept.cache_clear()


@pytest.mark.usefixtures("two_files")
def test_numbers_of_files_are_on_the_page_and_in_the_readme() -> None:
    """KL goes to the row of the very same numbers: not that of an int8 cache, nor that of other sums."""
    told, numbers = page(), "int8, groups of 128 / int8, groups of 128 / w8a8 g128"
    for line in (
        f"| w8a8 | {numbers} / bf16 | 20.001 | +0.11% | 0.0011 | 90.0% "
        "| 1,234 (617-2,468) | 56 (28-112) | 789 (394-1,578) |",
        f"| int8 kv | {numbers} / int8 | 20.003 | +0.33% | 0.0033 | 90.0% |  |  |  |",
        f"| by tiles | {numbers} / bf16 / attention by tiles | 20.002 | +0.22% | 0.0022 | 90.0% |  |  |  |",
        "The short cut, 32 pieces, 6,112 tokens:",
        f"| x | {numbers} / bf16 | 20.006 | +0.55% | 0.0055 | 90.0% |",
        f"| decode-1 | millrace-w8a8 | {numbers} / attention by tiles | 5 | 0.0022 | 32 (16-64) in 1 |",
        f"| decode-1 | millrace-plain | {numbers} | 5 | 0.0011 | 21 (21-21) in 1 |",
        "| decode-1 | llama.cpp | Q8_0 / int8, groups of 32 / Q8_0 | 5 | 0.0044 | 13 (13-13) in 1 |",
        "| llama.cpp | 1 | amx: no AMX | 0.987 | 2026-01-31, 2 cores of a CPU, `peers.json` |",
        "| llama.cpp | decode-1 | flash True: 0.25 | 2026-01-31, 2 cores of a CPU, `peers.json` |",
    ):
        assert line in told.splitlines(), line
    table = readme.tables()
    ours = "int8, groups of 128 | 5 | int8, groups of 128 | w8a8 g128"
    for line in (
        f"| millrace-w8a8 | {ours}; attention by tiles | 0.0022 |  | 32 |  |",
        f"| millrace-plain | {ours} | 0.0011 |  | 21 |  |",
        "| llama.cpp | Q8_0 | 5 | int8, groups of 32 | Q8_0 | 0.0044 |  | 13 |  |",
        "Left out: openvino-int4: it computes another model.",
        "Speeds from `peers.json`. KL from `perplexity.json`. `docs/speed.svg` shows the same figures.",
    ):  # fmt: skip
        assert line in table.splitlines(), line


@pytest.mark.usefixtures("two_files")
def test_a_peer_has_the_price_of_weights_that_are_made_alike(tmp_path: Path) -> None:
    """By its name, where its numbers on the real model are others: a row that its blocks do not divide."""
    fallen_back = {"weights": "Q5_0", "activations": "int8, groups of 32", "head": "Q8_0", "kv": "fp16"}
    answers = json.loads((tmp_path / "perplexity.json").read_text())
    answers |= {"time": "2026-01-31T13:00:00Z", "scores": [score("llama.cpp-q4_k_m", 0.066, fallen_back)]}
    (tmp_path / "others.json").write_text(json.dumps(answers))
    asked = Numbers("Q4_K", "int8, groups of 32", "Q6_K")
    assert runs.kl_class("llama.cpp-q4_k_m", asked) == 0.066
    assert runs.kl_class("llama.cpp-q4_k_m", Numbers("Q4_K", "int8, groups of 256", "Q6_K")) == 0.066
    assert runs.kl_class("llama.cpp-q4_0", asked) is None
    assert runs.kl_class("anyone", Numbers.of(OURS)) == 0.0011, "of these very numbers"


@pytest.mark.usefixtures("two_files")
@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_a_score_with_rounded_keys_is_nobody_elses_price(tmp_path: Path, kv: str) -> None:
    """Whichever of its kinds: what the same numbers cost with plain keys and values stays what it was."""
    answers = json.loads((tmp_path / "perplexity.json").read_text())
    rounded = score("rounded", 0.05, {**OURS, "kv": kv}, attention="")
    answers |= {"time": "2026-01-31T13:00:00Z", "scores": [*answers["scores"], rounded]}
    (tmp_path / "others.json").write_text(json.dumps(answers))
    assert runs.accuracy()[REAL][Numbers.of(OURS)] == 0.0011


@pytest.mark.usefixtures("two_files")
def test_a_price_of_rounding_is_on_the_page(tmp_path: Path) -> None:
    ways = [
        {"name": "groups of 128", "ratio": 1.0, "median_s": 0.002},
        {"name": "groups of 32", "ratio": 1.25, "median_s": 0.0025},
    ]
    result = {
        "date": "2026-01-31", "commit": "abc", "machine": MACHINE, "command": "python -m benchmarks.hadamard",
        "prices": [{"isa": "amx", "weights": "w4", "rows": 512, "ways": ways}],
    }  # fmt: skip
    (tmp_path / "hadamard.json").write_text(json.dumps(result))
    line = next(line for line in page().splitlines() if "w4 on amx, 512 rows" in line)
    assert "| 2.000 ms with activations in groups of 128; groups of 32 +25.0% |" in line


def test_losses_are_on_the_page_and_in_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 2.093 standard errors each way (of 19 degrees of freedom), shares of what rounding to nearest costs;
    the newest run of a model."""

    def cost(recipe: str, kl: float, bits: float, ratio: float) -> dict[str, Any]:
        return {
            "recipe": recipe, "about": "3 of 9 layers", "precision": "w4a16", "bits": bits, "kl": [kl, kl / 10],
            "perplexity": [20 * ratio, 1.0], "ratio": [ratio, 0.01], "agreement": [0.75, 0.01], "seconds": 12.4,
        }  # fmt: skip

    for day, kl in (("02", 0.1), ("01", 0.9)):
        result = {
            "date": f"2026-01-{day}", "time": f"2026-01-{day}T12:00:00Z", "commit": f"c{day}", "machine": MACHINE,
            "command": "python -m benchmarks.compression", "model": "m", "text": "a text", "windows": 20,
            "tokens": 5100, "goals": [{"what": "KL of fp8", "reached": 0.0137, "goal": 0.01, "verdict": "missed"}],
            "costs": [cost("int4-wo", 0.4, 4.22, 1.5), cost("mix", kl, 4.5, 1.1), cost("fp8", 0.0137, 8.02, 1.01)],
        }  # fmt: skip
        (tmp_path / f"{day}.json").write_text(json.dumps(result))
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    rows = (
        "| int4-wo | w4a16 | 4.22 | 0.4000 ± 0.0837 | 30.00 | +50.00% (+47.91% to +52.09%) | 75.0% | 12 s |",
        "| mix: 3 of 9 layers | w4a16 | 4.50 | 0.1000 ± 0.0209, 25% of int4-wo's | 22.00 "
        "| +10.00% (+7.91% to +12.09%) | 75.0% | 12 s |",
        "| fp8 | w4a16 | 8.02 | 0.0137 ± 0.0029 | 20.20 | +1.00% (-1.09% to +3.09%) | 75.0% | 12 s |",
    )
    told = [line for part in pages._compressions() for line in part.splitlines()]
    document = losses.written(f"before\n{losses.BEGIN}\nold\n{losses.END}\nafter").splitlines()
    for row in rows:
        assert row in told and row in document, row
    first = tmp_path / "03.json"
    newer = json.loads((tmp_path / "02.json").read_text()) | {"time": "2026-01-03T12:00:00Z", "commit": "c03"}
    of_windows = [0.3, 0.5] * 10, [0.1, 0.1] * 10, [0.01] * 20
    for one, values in zip(newer["costs"], of_windows, strict=True):
        one["kl_by_window"] = values
    newer["goals"][0]["interval"] = [0.012, 0.0154]
    first.write_text(json.dumps(newer))
    later = losses.written(f"before\n{losses.BEGIN}\nold\n{losses.END}\nafter")
    # 0.025 is what a share of a quarter leaves of each window: 2.093 * 0.025 (20 / 19)^0.5 / 20^0.5 / 0.4 = 3.0 %
    assert "| 0.1000 ± 0.0209, 25% of int4-wo's (22% to 28%) |" in later
    assert "- KL of fp8: 0.0137 (0.012 to 0.0154), asked: at most 0.01: missed" in later
    assert "c01" in "".join(told) and "c01" not in "".join(document)
    assert document[0] == "before" and document[-1] == "after" and "old" not in document
    assert "- KL of fp8: 0.0137, asked: at most 0.01: missed" in document


def test_right_answers_stand_behind_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the newest run of the model; what is lost is a share of what the source had right."""
    asked = {"task": "exam", "questions": 1000, "cut": 0}
    beside = {"difference": -0.01, "interval": [-0.03, 0.01], "gained": 20, "lost": 30, "p_value": 0.2026}
    for day, right in (("01", 500), ("02", 490)):
        base = {"precision": "default bf16", "right": 500, "share": 0.5, "interval": [0.469, 0.531], **asked}
        made = {"precision": "default w4a16", "share": right / 1000, "interval": [0.459, 0.521], **asked}
        result = {
            "date": f"2026-01-{day}", "time": f"2026-01-{day}T12:00:00Z", "commit": f"c{day}", "machine": MACHINE,
            "command": "python -m benchmarks.scores", "model": "m",
            "runs": {"bf16": base, "x": {**made, "against": beside}},
        }  # fmt: skip
        (tmp_path / f"{day}.json").write_text(json.dumps(result))
    of_losses = {**result, "command": "python -m benchmarks.compression", "text": "a text", "windows": 20, "tokens": 9,
                 "costs": [], "goals": []}  # fmt: skip
    (tmp_path / "03.json").write_text(json.dumps(of_losses))
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    document = losses.written(f"{losses.BEGIN}\n{losses.END}")
    assert "Right answers of m: 1,000 questions (exam); 2026-01-02 12:00, c02" in document and "c01" not in document
    assert "| bf16 | bf16 | 50.00% (46.9% to 53.1%) |  |  |  |" in document
    row = "| x | w4a16 | 49.00% (45.9% to 52.1%) | +2.00% (-2.00% to +6.00%) | 20 / 30 | 0.2 |"
    assert row in document and row in "\n".join(pages._compressions())


def test_the_document_has_the_newest_losses() -> None:
    assert losses.written(losses.DOCUMENT.read_text()) == losses.DOCUMENT.read_text()


@pytest.mark.parametrize(("share", "verdict"), [(0.81, "goal met"), (0.5, "missed")])
def test_files_older_than_their_goals_are_judged(monkeypatch: pytest.MonkeyPatch, share: float, verdict: str) -> None:
    result = {
        "command": "python -m benchmarks.contexts", "decode": {"share": share}, "kv_cache_dtype": "int8",
        "mixed": {"p99_to_median_gap": 1.0, "total_to_one_after_the_other": 1.0, "samples": [{}] * 5},
    }  # fmt: skip
    goal = next(line for line in given(monkeypatch, **result) if line.startswith("| s: decode at 4,096"))
    assert goal == f"| s: decode at 4,096 as a share of decode at 128, KV in int8 | {share:.2f} | 0.8 | " + (
        f"{verdict}, judged later | `file.json` |"
    )
    written = [{"what": "x", "reached": 0.5, "goal": 0.8, "verdict": "missed"}]
    surely = [written[0] | {"interval": [0.409, 0.591]}]
    assert "| s: x | 0.50 (0.41 to 0.59) | 0.8 | missed | `file.json` |" in given(monkeypatch, **result, goals=surely)
    assert "| s: x | 0.50 | 0.8 | missed | `file.json` |" in given(monkeypatch, **result, goals=written)


@pytest.mark.parametrize(
    ("reached", "shown"), [(0.00902, "0.00902"), (0.0102, "0.0102"), (0.0176, "0.0176"), (0.8, "0.80"), (0, "0.00")]
)
def test_a_small_figure_is_not_rounded_to_its_goal(monkeypatch: pytest.MonkeyPatch, reached: float, shown: str) -> None:
    goals = [{"what": "KL", "reached": reached, "goal": 0.01, "at_most": True, "verdict": "as told"}]
    assert f"| s: KL | {shown} | at most 0.01 | as told | `file.json` |" in given(monkeypatch, goals=goals)


@pytest.mark.parametrize(
    ("share", "samples", "said"),
    [(1.0, 128, ""), (0.0909, 64, " (extrapolated from 9% of the layers and 64 samples)"),
     (1.0, 64, " (extrapolated from 100% of the layers and 64 samples)")],
)  # fmt: skip
def test_a_goal_reached_by_a_part_says_so(
    monkeypatch: pytest.MonkeyPatch, share: float, samples: int, said: str
) -> None:
    goals = [{"what": "statistics, s", "reached": 1291.4, "goal": 1800.0, "at_most": True, "verdict": "missed"}]
    told = given(monkeypatch, command="python -m benchmarks.calibration", share_of_layers=share, samples=samples,
                 goals=goals)  # fmt: skip
    assert f"| s: statistics, s{said} | 1291.40 | at most 1800.0 | missed | `file.json` |" in told


@pytest.mark.parametrize("start_s", [0.5, 1.5])
def test_old_starts_are_judged(monkeypatch: pytest.MonkeyPatch, start_s: float) -> None:
    result = {"precision": "w4a8", "build_s": 1.0, "start_to_first_token_s": start_s, "resident_beyond_bytes": 1 << 20,
              "builds_s": [1.0] * 5, "starts_s": [start_s] * 5}  # fmt: skip
    told = given(monkeypatch, command="python -m benchmarks.start --shape s", **result)
    verdict = "goal met" if start_s < 1 else "missed"
    assert (
        f"| s: process start to first token, seconds | {start_s:.2f} | at most 1.0 | {verdict}, judged later "
        "| `file.json` |"
    ) in told


def test_an_impossible_share_in_an_old_file_takes_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    goals = [
        {"what": f"decode-1: {what}", "reached": reached, "goal": 0.9, "verdict": "goal met"}
        for what, reached in (
            ("a, share of the read bandwidth", 0.95),
            ("b, share of the read bandwidth", 1.02),
            ("a to c", 2.0),
        )
    ]
    for most, impossible in ((1.02, True), (0.99, False)):
        summary = [{"workload": "decode-1", "share_of_limit": s} for s in (0.95, most, None)]
        told = [
            line
            for line in given(monkeypatch, goals=goals, summary=summary, rounds=5)
            if line.startswith("| s: decode-1")
        ]
        assert ["no measurement" in line for line in told] == [impossible, impossible, False]
