"""Exams of `tiny` as `millrace eval` reads them, and runs that are complete."""

import json
from pathlib import Path

from benchmarks import scores
from benchmarks.compression import TINY_WINDOWS
from benchmarks.runs import results
from millrace.evaluate.questions import read_questions
from tools.tiny.world import held_out_exam


def test_exams_are_others_than_those_of_losses(tmp_path: Path) -> None:
    """Of the generator's next ones, with the letter that is right."""
    questions = read_questions(scores.exams(tmp_path / "exams.jsonl", 40))
    assert questions.is_choice and len(questions.lines) == 40
    judged = {held_out_exam(100_000 + seed).prompt for seed in range(4 * TINY_WINDOWS)}
    raw = [json.loads(line) for line in (tmp_path / "exams.jsonl").read_text().splitlines()]
    for i, line in enumerate(raw):
        exam = held_out_exam(200_000 + i)
        assert line["prompt"] == exam.prompt and "ABCD"[line["answer"]] == exam.choice.letter
    assert len({line["prompt"] for line in raw} - judged) > 30, "some short questions are the same"


def test_the_newest_run_of_tiny_has_every_recipe() -> None:
    """All of them answered the same questions, and their source did."""
    found = [r for _, r in results() if r["command"].startswith("python -m benchmarks.scores") and r["model"] == "tiny"]
    asked = found[-1]["runs"]
    assert list(asked) == [scores.BASE, *scores.RECIPES]
    assert {run["questions"] for run in asked.values()} == {2000}
