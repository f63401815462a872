"""MMLU question by question beside lm-eval on transformers, on a real model's weights in float32."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.copies import copied
from millrace.evaluate.resumable_results import ChosenAnswer, Key, read
from tests.support.shared import NOT_BESIDE, SHARED
from tools.nightly.packages import smollm2

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3300)]
LIMIT = 6  # of each of the 57 subjects: 342 questions
MMLU = SHARED / "data" / "mmlu"


def tasks(lm_eval: Any, folder: Path) -> list[str]:
    """lm-eval's own template, over files that lie here. The names, which are the subjects'"""
    folder.mkdir()
    template = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default" / "_default_template_yaml"
    names = []
    for test in sorted((MMLU / "test").glob("*_test.csv")):
        name = test.name.removesuffix("_test.csv")
        files = {}
        for split in ("dev", "test"):
            with (MMLU / split / f"{name}_{split}.csv").open(newline="") as rows:
                docs = [
                    {"question": row.pop("question"), "answer": int(row.pop("answer")), "choices": list(row.values())}
                    for row in csv.DictReader(rows)
                ]
            files[split] = folder / f"{name}_{split}.jsonl"
            files[split].write_text("".join(json.dumps({**doc, "subject": name}) + "\n" for doc in docs))
        said = f"The following are multiple choice questions (with answers) about {name.replace('_', ' ')}.\n\n"
        where = json.dumps({"data_files": {split: str(path) for split, path in files.items()}})
        task = (
            f"include: {template}", f"task: {name}", f"description: {json.dumps(said)}", "dataset_path: json",
            "dataset_name: null", f"dataset_kwargs: {where}",
        )  # fmt: skip
        (folder / f"{name}.yaml").write_text("\n".join(task) + "\n")
        names.append(name)
    return names


def theirs(lm_eval: Any, model: Path, folder: Path) -> dict[Key, list[float]]:
    from lm_eval.tasks import TaskManager

    names = tasks(lm_eval, folder)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(model), "dtype": "float32", "device": "cpu"}, num_fewshot=5,
        tasks=names, limit=LIMIT, task_manager=manager, batch_size=1, bootstrap_iters=0,
    )  # fmt: skip
    return {
        (name, int(sample["doc_id"])): [float(logprob) for ((logprob, _),) in sample["resps"]]
        for name, samples in found["samples"].items() for sample in samples
    }  # fmt: skip


def test_every_question_is_answered_as_lm_eval_does(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    if not MMLU.is_dir():
        pytest.skip(NOT_BESIDE)
    model, out = copied(smollm2(), tmp_path / "model", "float32"), tmp_path / "ours.jsonl"
    asked = ["--data", str(MMLU), "--limit", str(LIMIT), "--out", str(out), "--precision", "fp32", "--tune", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-m", "millrace", "eval", str(model), *asked], check=True, env=environment)
    expected, chosen = theirs(lm_eval, model, tmp_path / "tasks"), read(out, ChosenAnswer).records
    assert len(expected) == 57 * LIMIT and expected.keys() == chosen.keys()
    for name, logprobs in expected.items():
        assert chosen[name].logprobs == pytest.approx(logprobs, abs=2e-3), name
        assert chosen[name].chosen == max(range(4), key=lambda i: (logprobs[i], -i)), name
    counted = {"questions": len(expected), "right": sum(c.right for c in chosen.values())}
    sys.stdout.write(f"{json.dumps(counted)}\n")
