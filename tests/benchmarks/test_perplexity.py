"""Perplexity beside float32: exact where nothing is lost, close where little is, and the text is what it says it is."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.perplexity import HEADS, LENGTH, Score, Variant, drawn_documents, score, scores, tiny_documents
from millrace.compile.find import BUNDLED
from millrace.engine.kv import KvFormat
from tests.support.shared import shared


def by_name(found: list[Score]) -> dict[str, Score]:
    return {s.precision: s for s in found}


def test_scores_of_known_distributions() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    worse = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    numbers = {"weights": "int4", "activations": "int8", "head": "bf16", "kv": "bf16"}
    found = score("worse", numbers, worse, reference, np.array([0, 1]))
    assert found.perplexity == pytest.approx((0.25 * 0.8) ** -0.5)
    assert found.ratio == pytest.approx(2**0.5)
    assert found.mean_kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2)
    assert found.agreement == 0.5


def test_tiny_loses_little() -> None:
    documents = tiny_documents()[:12]
    assert len({tuple(d) for d in documents}) == 12 and all(20 < len(d) <= LENGTH for d in documents)
    chosen = [
        Variant("fp32", "fp32"), Variant("bf16", "bf16"), Variant("w8a8", "w8a8"), Variant("w4a8", "w4a8", 32),
        Variant("int8 kv", "fp32", kv=KvFormat.INT8),
    ]  # fmt: skip
    found = by_name(scores(BUNDLED / "tiny", documents, chosen))
    assert found["fp32"].ratio == 1 and found["fp32"].mean_kl == 0 and found["fp32"].agreement == 1
    assert found["fp32"].perplexity < 5, "it was trained on such text"
    for name, allowed in {"bf16": 1.005, "w8a8": 1.005, "w4a8": 1.2, "int8 kv": 1.005}.items():
        assert 1 / allowed < found[name].ratio < allowed, found[name]
    assert found["w8a8"].mean_kl < found["w4a8"].mean_kl


def test_a_trained_model_reads_its_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = shared("models/stories260K")
    documents = drawn_documents(folder)[:4]
    assert all(len(d) == LENGTH for d in documents)
    [found] = scores(folder, documents, [Variant("fp32", "fp32")])
    assert found.perplexity < 10, "half of 512 would be chance"


def test_the_head_in_two_steps_ranks_as_one_in_8_bits_does() -> None:
    _, two_steps, rough, fine, _ = scores(BUNDLED / "tiny", tiny_documents()[:12], HEADS)
    assert two_steps.agreement >= 0.98 and fine.agreement >= 0.98 and rough.agreement <= two_steps.agreement
