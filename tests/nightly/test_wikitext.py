"""Perplexities and multiple choice beside lm-eval on transformers, on a real model's weights in float32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.copies import copied
from millrace.evaluate.perplexity import pages
from millrace.evaluate.resumable_results import ChosenAnswer, read
from tests.support.shared import NOT_BESIDE, SHARED
from tools.nightly.packages import smollm2

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
WIKITEXT = SHARED / "data" / "wikitext2" / "wiki.test.txt"
DOCUMENTS, WINDOW = 3, 1024
CHOICES = [
    {"prompt": "Question: What do bees make?\nAnswer:", "choices": ["honey", "a very large amount of milk", "iron"]},
    {"prompt": "The capital of France is", "choices": ["Rome", "Paris", "the city of Berlin in Germany"]},
    {"prompt": "Two plus two is ", "choices": ["four", "five, as everybody knows", "\u0663"]},
    {"prompt": "She opened the door and", "choices": ["walked in.", "ate the sky with a spoon.", "the."]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    return copied(smollm2(), tmp_path_factory.mktemp("m") / "model", "float32")


def ours(model: Path, folder: Path, *asked: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "millrace", "eval", model, *asked, "--precision", "fp32", "--tune", "0", "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    found = subprocess.run(list(map(str, command)), check=True, env=environment, stdout=subprocess.PIPE)
    told: dict[str, Any] = json.loads(found.stdout)
    return told


def theirs(model: Path, folder: Path, task: str, lines: list[dict[str, Any]], yaml: list[str]) -> dict[str, Any]:
    """lm-eval's results of a task over lines of our own; BOS as its task cards have it, and as ours: none in texts."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = folder / f"{task}.json"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = json.dumps({"data_files": {"test": str(data)}})
    local = ("dataset_path: json", "dataset_name: null", f"dataset_kwargs: {where}", "test_split: test")
    (folder / f"{task}.yaml").write_text("\n".join([f"task: {task}", *yaml, *local]) + "\n")
    args = {"pretrained": str(model), "dtype": "float32", "device": "cpu", "max_length": WINDOW, "add_bos_token": False}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="hf", model_args=args, tasks=[task], task_manager=manager, batch_size=1, bootstrap_iters=0, num_fewshot=0
    )
    return {"results": found["results"][task], "samples": found["samples"][task]}


def test_wikitext(model: Path, tmp_path: Path) -> None:
    import lm_eval

    if not WIKITEXT.is_file():
        pytest.skip(NOT_BESIDE)
    folder = Path(lm_eval.__file__).parent / "tasks" / "wikitext"
    documents = list(pages(WIKITEXT.read_text(encoding="utf-8")))[:DOCUMENTS]
    no_other_splits = ["training_split: null", "validation_split: null"]
    yaml = [f"include: {folder / 'wikitext.yaml'}", *no_other_splits]
    expected = theirs(model, tmp_path, "wikitext_here", [{"page": page} for page in documents], yaml)["results"]
    asked = ("--definition", "lm-eval", "--window", str(WINDOW), "--limit", str(DOCUMENTS))
    told = ours(model, tmp_path, "--task", "wikitext", "--data", WIKITEXT, *asked)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert told[name]["value"] == pytest.approx(expected[f"{name},none"], rel=1e-4), name
    sys.stdout.write(f"{json.dumps({name: told[name] for name in ('word_perplexity', 'tokens', 'documents')})}\n")


def test_multiple_choice(model: Path, tmp_path: Path) -> None:
    """Each log probability, and which choice is the likeliest: as it is, and per byte."""
    lines = [{**line, "answer": i % 3} for i, line in enumerate(CHOICES)]
    yaml = [
        "output_type: multiple_choice", 'doc_to_text: "{{prompt}}"', "doc_to_choice: choices", "doc_to_target: answer",
        "metric_list:", *(f"  - {{metric: {name}, aggregation: mean, higher_is_better: true}}" for name in
                          ("acc", "acc_norm", "acc_bytes")),
    ]  # fmt: skip
    expected = theirs(model, tmp_path, "choices_here", lines, yaml)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "ours.jsonl"
    told, kept = ours(model, tmp_path, "--task", tmp_path / "mine.jsonl", "--out", out), read(out, ChosenAnswer).records
    for sample in expected["samples"]:
        logprobs = [float(logprob) for ((logprob, _),) in sample["resps"]]
        assert kept["mine", int(sample["doc_id"])].logprobs == pytest.approx(logprobs, abs=2e-3), sample["doc"]
    assert told["share"] == expected["results"]["acc,none"]
    assert told["per_byte"]["share"] == expected["results"]["acc_bytes,none"]
