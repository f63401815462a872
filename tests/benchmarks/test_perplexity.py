"""Perplexity beside float32: exact where nothing is lost, close where little is, and the text is what it says it is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import perplexity
from benchmarks.paces import in_turns
from benchmarks.peers.workloads import Workload
from benchmarks.perplexity import (
    CHARACTERS,
    HEADS,
    LENGTH,
    Cost,
    Text,
    Variant,
    costs,
    drawn_text,
    given_text,
    short_text,
    tiny_text,
)
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.engine.cache_specs import KvFormat
from millrace.engine.executor import IntArray
from millrace.errors import RequestError
from millrace.evaluate.divergence import LogProbs, compared
from tests.support.shared import shared


def by_name(found: list[Cost]) -> dict[str, Cost]:
    return {s.precision: s for s in found}


def few(text: Text, n: int) -> Text:
    return Text(text.sequences[:n], text.first)


def test_scores_are_beside_the_first() -> None:
    """Two sequences; each engine knows one distribution for each."""
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    worse = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))

    def of(rows: LogProbs) -> Callable[[IntArray, int], LogProbs]:
        return lambda ids, first: rows[[ids[-1]]]

    text = Text([np.array([9, 0], np.int32), np.array([9, 1], np.int32)])
    readers = {"exact": of(reference), "worse": of(worse)}
    exact, found = compared(readers["exact"], readers, text.sequences, text.first).values()
    assert (exact.mean_kl, exact.ratio, exact.agreement, exact.n) == (0, 1, 1, text.n_scored)
    assert found.perplexity == pytest.approx((0.25 * 0.8) ** -0.5) and found.ratio == pytest.approx(2**0.5)
    assert found.mean_kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2) and found.agreement == 0.5


def test_tiny_loses_little() -> None:
    text = few(tiny_text(), 12)
    assert len({tuple(d) for d in text.sequences}) == 12 and all(20 < len(d) <= LENGTH for d in text.sequences)
    chosen = [
        Variant("fp32", "fp32"), Variant("bf16", "bf16"), Variant("w8a8", "w8a8"), Variant("w4a8", "w4a8", 32),
        Variant("int8 kv", "fp32", kv=KvFormat.INT8),
    ]  # fmt: skip
    found = by_name(costs(BUNDLED / "tiny", text, chosen))
    assert found["fp32"].ratio == 1 and found["fp32"].mean_kl == 0 and found["fp32"].agreement == 1
    assert found["fp32"].perplexity < 5, "it was trained on such text"
    for name, allowed in {"bf16": 1.005, "w8a8": 1.005, "w4a8": 1.2, "int8 kv": 1.005}.items():
        assert 1 / allowed < found[name].ratio < allowed, found[name]
    assert found["w8a8"].mean_kl < found["w4a8"].mean_kl


def test_a_trained_model_reads_its_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = shared("models/stories260K")
    text = few(drawn_text(folder), 4)
    assert all(len(d) == LENGTH for d in text.sequences)
    [found] = costs(folder, text, [Variant("fp32", "fp32")])
    assert found.perplexity < 10, "half of 512 would be chance"


def test_a_text_is_cut_into_windows(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("A miller had a mill. " * (CHARACTERS // 10))
    text = given_text(BUNDLED / "tiny", tmp_path / "long.txt")
    assert {len(ids) for ids in text.sequences} == {512} and text.first == 256
    assert 10 < len(text.sequences) < CHARACTERS / 512


def test_another_cut_has_pieces_behind_the_beginning_token(tmp_path: Path) -> None:
    """Joined without their first tokens, the pieces are the text."""
    (tmp_path / "long.txt").write_text("A miller had a mill. " * (CHARACTERS // 20))
    text, tokenizer = short_text(BUNDLED / "tiny", tmp_path / "long.txt"), Checkpoint.open(BUNDLED / "tiny").tokenizer
    assert len(text.sequences) == 32 and {len(ids) for ids in text.sequences} == {192} and text.n_scored == 6112
    assert {int(ids[0]) for ids in text.sequences} == {tokenizer.bos_token_id}
    joined = tokenizer.decode([int(i) for ids in text.sequences for i in ids[1:]])
    assert joined.strip().startswith("A miller had a mill. A miller") and len(joined) > 5000
    longer = short_text(BUNDLED / "tiny", tmp_path / "long.txt", 48)
    assert len(longer.sequences) == 48
    np.testing.assert_array_equal(longer.sequences[31], text.sequences[31])
    (tmp_path / "short.txt").write_text("A miller.")
    with pytest.raises(RequestError, match="one piece"):
        short_text(BUNDLED / "tiny", tmp_path / "short.txt")


class Paced:
    """Takes `seconds` for everything, and keeps what it was asked."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, [""]

    def warm_up(self, workload: Workload) -> None:
        self.asked.append(f"warm {workload.name}")

    def run(self, workload: Workload) -> float:
        self.asked.append(workload.name)
        return self.seconds


def test_speeds_are_taken_in_turns_beside_the_bandwidth() -> None:
    engines = {"a": Paced(0.5), "b": Paced(0.25)}
    rates = iter(range(100))
    found = in_turns(engines, lambda: float(next(rates)), rounds=2)
    assert {e: {w: s["tokens_per_s"] for w, s in by.items()} for e, by in found.items()} == {
        "a": {"prefill-512": 1024, "decode-1": 64, "decode-16": 1024},
        "b": {"prefill-512": 2048, "decode-1": 128, "decode-16": 2048},
    }
    assert engines["a"].asked[1:4] == ["warm prefill-512", "prefill-512", "prefill-512"]
    assert [found[e]["prefill-512"]["read_bytes_per_s"] for e in "ab"] == [[0, 3], [1, 2]], "who begins changes"


def test_what_is_timed_reads_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning and more room change no answer; untimed engines have no speed in the file."""
    monkeypatch.setattr(perplexity, "TUNE_S", 0.05)
    monkeypatch.setattr(perplexity, "in_turns", partial(in_turns, rounds=1))
    monkeypatch.setattr(perplexity, "_bandwidth", lambda: 1e9)
    text, chosen = few(tiny_text(), 2), [Variant("bf16", "bf16")]
    [plain], [timed] = (costs(BUNDLED / "tiny", text, chosen, timed=t) for t in (False, True))
    assert timed.perplexity == plain.perplexity and timed.weights == plain.weights
    assert timed.speed is not None and min(s["tokens_per_s"] for s in timed.speed.values()) > 0
    assert all(len(s["samples_s"]) == len(s["read_bytes_per_s"]) == 1 for s in timed.speed.values())
    assert "speed" not in plain.as_dict() and timed.as_dict()["speed"] == timed.speed


def test_a_head_has_a_price_of_its_own() -> None:
    found = by_name(costs(BUNDLED / "tiny", few(tiny_text(), 12), HEADS))
    exact, eight, *_, rough = found.values()
    assert exact.mean_kl == 0 and eight.mean_kl < 0.001 and "again in w8a8" in rough.head
    assert eight.head == "w8a8 g128 by Hadamard" and eight.weights == "fp32"
    assert eight.mean_kl < rough.mean_kl and rough.agreement >= 0.98
