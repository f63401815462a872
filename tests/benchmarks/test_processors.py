"""One block for each kind of processor: which run it shows, its label, and how many times as fast Millrace is."""

from typing import Any

import pytest

from benchmarks import processors, readme
from benchmarks.processors import processor, ratios, runs_by_processor, speed_table
from benchmarks.runs import REAL

WORKLOADS = {"decode-1": {"phase": "decode", "users": 1, "prompt": 16, "new": 64}}
NUMBERS = {"weights": "w", "activations": "a", "head": "h", "version": "1", "weights_bytes": 5_000_000}


def run(file: str, rounds: int = 5, model: str = "6.85", **more: Any) -> dict[str, Any]:
    """Millrace takes 1 s, llama.cpp 2 s on the file, 1.5 s in a format that is as good and 1.2 s in a worse one."""
    seconds = {"millrace": (1.0, 0.002), "llama.cpp": (2.0, 0.002), "llama.cpp-q8_0": (1.5, 0.001),
               "llama.cpp-q4_0": (1.2, 0.3), "vllm-bf16": (8.0, 0.001)}  # fmt: skip
    samples = [
        {"round": at, "engine": name, "workload": "decode-1", "seconds": taken * (1 + at)}
        for at in range(rounds) for name, (taken, _) in seconds.items()
    ]  # fmt: skip
    engines = {
        name: {**NUMBERS, "settings": {}, "answers": {"kl": price}, "ready_s": 7.96}
        for name, (_, price) in seconds.items()
    }
    machine = {"cpu": "A Processor", "cpu_number": model, "cores": 2}
    return {
        "command": "python -m benchmarks.peers", "date": "2027-01-31", "commit": "abc", "shape": REAL, "file": file,
        "machine": machine, "isa": "avx512", "rounds": rounds, "samples": samples, "engines": engines,
        "workloads": WORKLOADS, "text": "9 tokens of a text", "left_out": {}, **more,
    }  # fmt: skip


def given(monkeypatch: pytest.MonkeyPatch, *found: dict[str, Any]) -> None:
    monkeypatch.setattr(processors, "of_kind", lambda _: [(r["file"], r) for r in found])


def test_each_kind_has_its_newest_run_with_rounds_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds: another model, other instruction sets, or some of them hidden; few rounds only where there is no other."""
    runs = (
        run("old"), run("new"), run("few", rounds=4), run("other-few", 1, model="23.1"), run("shape", shape="s"),
        run("hidden", isa="avx2", hidden=True), run("avx2", isa="avx2"), run("vnni", flags=["avx512_vnni"]),
    )  # fmt: skip
    given(monkeypatch, *runs)
    assert [r["file"] for r in runs_by_processor()] == ["vnni", "avx2", "hidden", "other-few", "new"]
    assert readme.newest()["file"] == "vnni"
    given(monkeypatch, run("plain"), run("few", rounds=4, model="1.1"), run("hidden", isa="avx2", hidden=True))
    assert readme.newest()["file"] == "plain"
    told = readme.tables()
    assert told.index("`plain`") < told.index("`hidden`") and told.count("`docs/speed.svg`") == 1
    hidden = "A, family.model 6.85: wider instruction sets than AVX2 hidden"
    assert f"| {hidden} | llama.cpp, the same file | 0.002 / 0.002 |  | 2.00 |  |" in told.splitlines()
    assert "|  | llama.cpp-q8_0: its fastest whose KL is no worse | 0.002 / 0.001 |  | 1.50 |  |" in told.splitlines()
    assert f"- {hidden}; 2 cores; 2027-01-31, commit abc; medians of 5 rounds; `hidden`." in told.splitlines()
    assert "medians of 4 rounds, fewer than the 5 that decide" in told and "medians of 5 rounds; " in told


def test_kinds_are_named_by_what_tells_them_apart() -> None:
    assert processor(run("x", flags=["avx512_vnni", "avx2"])) == "A, family.model 6.85: AVX-512, AVX512_VNNI"
    earlier = run("x")
    del earlier["machine"]["cpu_number"]
    assert processor(earlier) == "A: AVX-512"


def test_ratios_are_with_the_same_file_and_with_the_best_format_that_is_no_worse() -> None:
    """The worse format is the fastest, and does not count."""
    assert ratios(run("x")) == [
        ["millrace to llama.cpp, the same file", "", "2.00", ""],
        ["millrace to the fastest format of llama.cpp whose KL is no worse", "", "1.50 (llama.cpp-q8_0)", ""],
    ]


def test_a_table_says_where_its_figures_are_from() -> None:
    table = speed_table(run("x.json"))
    assert "| vllm-bf16 | w | 5 | a | h | 0.001 |  | 3 |  | 8.0 |" in table.splitlines()
    label = "2 cores of A (6.85); 2027-01-31, commit abc; medians of 5 rounds; llama.cpp 1, millrace 1, vllm 1."
    assert label in table and table.endswith("Speeds from `x.json`. KL on 9 tokens of a text.")
