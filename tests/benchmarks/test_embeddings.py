"""The race of encoders: batches put together and taken apart again, distances, goals, the page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import embedders, page_rows
from benchmarks.embedders import Batched, Millrace, Rectangle
from benchmarks.embeddings import LONGEST, SHORTEST, goals, random_texts, table, truth
from tests.support.checkpoints import random_encoder


class Model:
    """A text's vector is its first id and its length; one setting is slow."""

    settings = ("slow", "quick")

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def vectors(self, setting: str, batches: Sequence[Rectangle]) -> list[NDArray[np.float32]]:
        self.asked += [(setting, len(ids)) for ids, _ in batches]
        for ids, mask in batches:
            assert ids.shape == mask.shape and (ids[mask == 0] == 0).all() and mask.sum(axis=1).max() == ids.shape[1]
        return [np.stack([ids[:, 0], mask.sum(axis=1)], axis=1).astype(np.float32) for ids, mask in batches]

    def describe(self) -> dict[str, object]:
        return {"version": "1"}


def test_batches_are_of_similar_lengths_and_answers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[i + 1] * n for i, n in enumerate((9, 2, 7, 2, 30, 1, 5))]
    model = Model()
    monkeypatch.setattr(embedders, "seconds", lambda work: (work(), {"slow": 9.0, "quick": 1.0}[model.asked[-1][0]])[1])
    monkeypatch.setattr(embedders, "BATCHES", (3,))
    batched = Batched(model)
    batched.warm_up(texts)
    assert batched.describe() == {"version": "1", "chosen": "quick", "batch": 3}
    model.asked.clear()
    assert batched.run().tolist() == [[i + 1, len(ids)] for i, ids in enumerate(texts)]
    assert model.asked == [("quick", 3), ("quick", 3), ("quick", 1)]


def test_texts_are_of_the_lengths_that_are_said() -> None:
    texts = random_texts(500, 30522)
    lengths = {len(ids) for ids in texts}
    assert min(lengths) == SHORTEST and max(lengths) == LONGEST and texts == random_texts(500, 30522)
    assert all(ids[0] == 101 and ids[-1] == 102 and max(ids) < 30522 for ids in texts)


def test_ours_is_as_near_to_transformers_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedders, "TUNE_S", 0.05)
    rng = np.random.default_rng(1)
    texts = [rng.integers(5, 403, n).tolist() for n in (8, 60, 99)]
    ours = Millrace(random_encoder(tmp_path / "checkpoint"), tmp_path / "engine", "fp32", 1)
    ours.warm_up(texts)
    assert np.abs(ours.run() - truth(tmp_path / "checkpoint", texts)).max() <= 1e-6
    assert ours.describe()["step_tokens"] == 512


SAMPLES = {
    "millrace-fp32": [1.0, 2.0, 1.0], "onnxruntime-fp32": [3.0, 3.0, 3.0], "openvino-fp32": [1.2, 2.4, 1.1],
    "millrace-bf16": [1.0, 1.0, 1.0],
}  # fmt: skip


def test_goals_are_to_the_faster_in_the_same_numbers() -> None:
    (judged,) = goals(SAMPLES)  # nobody to compare bf16 with
    assert judged["reached"] == 1.2 and judged["against"] == "openvino-fp32" and judged["verdict"] == "goal met"
    assert goals({**SAMPLES, "openvino-bf16": [0.8, 0.8, 0.8]})[1]["verdict"] == "missed"


def test_a_run_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"median": 3220.0, "low": 2209.0, "high": 6353.0}
    result: dict[str, Any] = {
        "shape": "minilm", "texts": 3, "tokens": 90, "threads": 2, "lengths": [8, 256], "goals": goals(SAMPLES),
        "engines": {"millrace-fp32": {"tokens_per_s": speed, "distance": 2.3e-7}}, "left_out": {"openvino-fp32": "why"},
        "date": "2026-01-31", "commit": "abc", "machine": {"cpu": "c", "cores": 2, "memory_bytes": 1},
        "command": "python -m benchmarks.embeddings x", "file": "file.json",
    }  # fmt: skip
    told = table(result)
    assert "3,220 tokens/s (2,209-6,353), 2.3e-07" in told and "left out: openvino-fp32: why" in told
    monkeypatch.setattr(page_rows, "of_kind", lambda name: [("file.json", result)] if name == "embeddings" else [])
    (row,) = page_rows.other_rows()
    assert row[0] == "minilm, millrace-fp32: embeddings of 8 to 256 tokens, tok/s"
    assert row[1].startswith("3,220 (2,209-6,353), at most 2e-07")
