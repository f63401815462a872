"""Environments of peers, hidden instruction sets, and how far answers of a run are from float32's; no peer at all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.peers import race as race_module
from benchmarks.peers.build import cmake_args, usable
from benchmarks.peers.engine import CATALOGUE, Entry
from benchmarks.peers.homes import HIDING, HOMES, home_folder, worker_command
from benchmarks.peers.race import REFERENCE, Course, Race, Text, _read
from benchmarks.peers.worker import read
from millrace.evaluate.divergence import log_softmax


def test_every_home_is_in_the_catalogue_and_the_other_way_round() -> None:
    assert {entry.home for entry in CATALOGUE.values()} - {""} == set(HOMES)


def test_a_peer_runs_in_its_home_else_in_ours_else_it_says_how_to_make_one(tmp_path: Path) -> None:
    absent = Entry("x", "", ("no_such_package",), "int8", home="vllm")
    here = Entry("x", "", ("numpy",), "int8", home="llama.cpp")
    assert absent.missing(tmp_path, None) == ["no_such_package (python -m benchmarks.peers.homes vllm)"]
    assert here.missing(tmp_path, None) == [] and here.python(tmp_path, None) is None
    (python,) = [home_folder(tmp_path, "vllm", None) / "bin" / "python"]
    python.parent.mkdir(parents=True)
    python.touch()
    assert absent.missing(tmp_path, None) == [] and absent.python(tmp_path, None) == python
    assert absent.python(tmp_path, "avx2") == python, "one environment for all: a variable hides"


def test_what_is_built_for_this_processor_is_not_taken_where_wider_sets_are_hidden(tmp_path: Path) -> None:
    here = Entry("x", "", ("numpy",), "int8", home="llama.cpp")
    assert here.missing(tmp_path, "avx2") == [
        "an environment of its own (python -m benchmarks.peers.homes --isa avx2 llama.cpp)"
    ]
    assert home_folder(tmp_path, "llama.cpp", "avx2") != home_folder(tmp_path, "llama.cpp", None)


def test_hiding_reaches_every_library_and_the_build() -> None:
    flags = {"avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"}
    assert cmake_args(flags, isa="avx2") == (
        "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
    )
    assert set(usable(flags, "avx2")) == {"avx", "avx2", "fma", "f16c", "bmi2"} and usable(flags, None) == flags
    environment = CATALOGUE["openvino-genai"].environment(Path("nowhere"), "avx2")
    assert environment.items() >= HIDING["avx2"].items() and "MILLRACE_ISA" in environment
    assert "MILLRACE_ISA" not in CATALOGUE["openvino-genai"].environment(Path("nowhere"), None)


def test_a_worker_of_another_environment_finds_ours_behind_its_own_packages() -> None:
    """This interpreter stands for the other one: the worker starts, and says what it was not given."""
    command = worker_command(Path(sys.executable))
    done = subprocess.run([*command, "one", "two"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "not enough values to unpack (expected 4, got 2)" in done.stderr, done.stderr


class Reader:
    """Log probabilities of fixed logits, for any tokens."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self.logits = logits

    def read(self, ids: NDArray[np.int32], first: int) -> NDArray[np.float32]:
        return log_softmax(self.logits[first : len(ids) - 1])


class Process:
    """A process that reads, or one that cannot."""

    ready_s = 1.0

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_until_ready(self) -> None: ...

    def ask(self, do: str, text: str) -> dict[str, Any]:
        assert do == "read"
        return {"read": read(self.engine, Path(text))}


def test_answers_are_compared_with_float32_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: at each place KL(p || q) of two tokens, p = (0.5, 0.5) and q = (0.8, 0.2)."""
    exact, other = np.zeros((4, 2), np.float32), np.log(np.array([[0.8, 0.2]] * 4, np.float32))
    children = {"same": Process(Reader(exact)), "other": Process(Reader(other)), "silent": Process(object())}
    monkeypatch.setattr(race_module, "_child", lambda _, name: {REFERENCE: Process(Reader(exact))}[name])
    found = Race(engines={name: {} for name in children})
    text = Text("a text", [np.array(row, np.int32) for row in ([0, 0, 1, 0, 1], [1, 1, 1, 1, 1])], first=2)
    course = Course("m.gguf", list(children), [], 1, 1, tmp_path, text=text)
    _read(course, text, children, found, lambda _: None)  # type: ignore[arg-type]
    by_hand = 0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.5 / 0.2)
    answers = json.loads(json.dumps(found.engines))
    assert found.text == "4 tokens of a text" and "answers" not in answers["silent"]
    assert answers["same"]["answers"] == {"kl": 0, "perplexity": pytest.approx(2), "ratio": 1, "agreement": 1}
    assert answers["other"]["answers"]["kl"] == pytest.approx(by_hand)
    # three of the four tokens that came are the second one
    assert answers["other"]["answers"]["ratio"] == pytest.approx(0.5 / (0.8 * 0.2**3) ** 0.25)
    assert not list(tmp_path.glob("answers*"))
