"""docs/tutorial.md, run as it stands there, on `tiny`, a real model's GGUF file and random weights of Gemma's shape.

Each figure that it makes is computed again from what lies beside it. `tiny` has to tell what the page shows.
"""

import json
import os
import re
import socket
import sys
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.engine.artifact.engine import Engine
from tests.support.checkpoints import random_checkpoint
from tests.support.shared import shared
from tools.nightly.packages import smollm2
from tools.tutorial import NOTEBOOK, PAGE, run, steps, words

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3300)]
OFTEN = {"At", "B is worse", "B is worse by more than", "to the first token, the"}  # said where it is so
LEVEL = r"^ +\d+ +[\d.,]+ +([\d.]+) +[\d.,]+ / "  # of a sweep: concurrency, tokens/s, requests/s, TTFT
GEMMA: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128,
    "max_position_embeddings": 2048,
}  # fmt: skip


def model(name: str, folder: Path) -> str:
    if name == "gemma":
        return str(random_checkpoint(folder / "gemma", "gemma", **GEMMA))
    return str(smollm2()) if name == "smollm2" else name


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def free_ports() -> dict[str, str]:
    with socket.socket() as one, socket.socket() as other:
        for found in (one, other):
            found.bind(("127.0.0.1", 0))
        return {"PORT": str(one.getsockname()[1]), "OTHER": str(other.getsockname()[1])}


def surroundings(folder: Path) -> dict[str, str]:
    """Our commands, which may be another environment's than this interpreter's; a cache of its own."""
    (site,) = {Path(str(distribution("millrace").locate_file("")))}
    path = f"{site.parents[2] / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def executed(book: Any, folder: Path, environment: dict[str, str]) -> list[str]:
    """What each cell of commands wrote to stdout; the others show a picture. raises CellExecutionError"""
    client = pytest.importorskip("nbclient").NotebookClient(
        book, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    commands = []
    for cell in (cell for cell in book.cells if cell.cell_type == "code"):
        if cell.source.startswith("%"):
            commands.append("".join(o.text for o in cell.outputs if o.get("name") == "stdout"))
        else:
            assert [sorted(o.data) for o in cell.outputs] == [["image/png", "text/plain"]], cell.source
    return commands


def test_the_notebook_runs_as_it_is(tmp_path: Path) -> None:
    """In Jupyter's kernel, cell by cell; but for its ports, which may be somebody's here."""
    pytest.importorskip("ipykernel")
    book, folder = pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4), tmp_path / "run"
    folder.mkdir()
    (folder / "mmlu").symlink_to(shared("data/mmlu").resolve())
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    ports = free_ports()
    first.source = first.source.replace("PORT=8000", f"PORT={ports['PORT']}").replace(
        "OTHER=8001", f"OTHER={ports['OTHER']}"
    )
    outputs = executed(book, folder, surroundings(tmp_path))
    page = steps(PAGE.read_text())
    assert len(outputs) == len(page)
    for step, said in list(zip(page, outputs, strict=True))[1:]:
        assert [w for w in words(step.shown) if w not in OFTEN] == [w for w in words(said) if w not in OFTEN]
    check_load(folder)
    check_smaller(folder, check_questions(folder, outputs[2]), of_floats=True)
    check_fitted(folder, outputs)


@pytest.mark.parametrize("name", ["tiny", "smollm2", "gemma"])
def test_the_page_runs_as_it_stands_there(name: str, tmp_path: Path) -> None:
    mmlu = shared("data/mmlu")
    environment = surroundings(tmp_path)
    page, folder = steps(PAGE.read_text()), tmp_path / "run"
    folder.mkdir()
    given = {"MODEL": model(name, tmp_path), "MMLU": str(mmlu), **free_ports()}
    outputs = run(page, given, folder, environment)
    assert len(outputs) == len(page)
    if name == "tiny":
        for step, said in zip(page, outputs, strict=True):
            assert [w for w in words(step.shown) if w not in OFTEN] == [w for w in words(said) if w not in OFTEN]
    right = check_questions(folder, outputs[2])
    load = check_load(folder)
    check_smaller(folder, right, of_floats=name != "smollm2")
    check_fitted(folder, outputs)
    sys.stdout.write(f"\n{json.dumps({name: {'mmlu_right': right, **load}})}\n")


def check_questions(folder: Path, said: str) -> int:
    answers = lines(folder / "answers.jsonl")[1:]
    right = sum(int(a["chosen"] == a["answer"]) for a in answers)
    assert len(answers) == len({a["group"] for a in answers}) == 57 and f"{right} of 57: " in said
    assert all(a["chosen"] == int(np.argmax(a["logprobs"])) for a in answers)
    return right


def check_load(folder: Path) -> dict[str, float]:
    """Means by hand, of the stamps of each chunk."""
    asked, told = lines(folder / "load" / "requests.jsonl"), json.loads((folder / "load" / "summary.json").read_text())
    assert len(asked) == 100 and all(r["n_output"] == 50 for r in asked)
    first = np.mean([r["chunk_ms"][0] for r in asked])
    assert told["metrics"]["time_to_first_token"]["mean"] == pytest.approx(first, rel=1e-3)
    assert told["metrics"]["request_latency"]["mean"] > first
    pages = ((folder / "load" / "report.html").read_text(), (folder / "sweep.html").read_text())
    assert all("<svg" in text for text in pages)
    pictures = [folder / "sweep.png", *(folder / "load").glob("*.png")]
    assert len(pictures) >= 6 and all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    return {"ttft_ms": round(float(first), 1), "tokens_per_s": round(told["output_tokens_per_s"]["value"], 1)}


def check_smaller(folder: Path, right: int, of_floats: bool) -> None:
    """What has four bits already, as SmolLM2's file, does not get smaller."""
    told = json.loads((folder / "small" / "compression.json").read_text())
    assert told["loss"]["kl"] > 0 and told["speed"]["paces"]
    assert (told["bytes_after"] < told["bytes_before"]) == of_floats
    assert told["mmlu"]["questions"] == 57 and told["mmlu"]["source_right"] == right


def check_fitted(folder: Path, outputs: list[str]) -> None:
    """Every recorded request fits, and no page more; at a time there were as many as 99 % of the arrivals saw.

    Recorded are the load's hundred and three seconds of each level of the sweep, however many levels the machine bears.
    """
    asked = lines(folder / "traffic.jsonl")
    levels = re.findall(
        LEVEL, next(said for said in outputs if "TTFT p50 / p90" in said and "requests/s" in said), re.MULTILINE
    )
    assert len(levels) > 1 and len(asked) > 100 + 0.9 * sum(3 * float(per_s) for per_s in levels)
    needed = max(r["input_length"] + max(r["output_length"], r.get("max_tokens", 0)) for r in asked)
    engine = Engine.open(folder / "fitted.engine").manifest
    assert engine.max_context - 64 < needed <= engine.max_context
    stays = [(r["timestamp"], r["timestamp"] + max(r["duration"] - r["waited"], 1e-6)) for r in asked]
    there = sorted(sum(start <= at < end for start, end in stays) for at, _ in stays)
    assert all(a <= b for a, b in pairwise(there))
    assert engine.max_sequences == there[-(-99 * len(there) // 100) - 1]
