"""What precisions cost, and which one `auto` takes: the same everywhere, and what built engines are found to cost."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.weights.quantized_matrix import FP8
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import PrecisionMap, StoredMatrix, nearest_precisions, precision_map
from millrace.compile.precision_selection import AccuracyQuery
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.engine.artifact.accuracy_loss import AccuracyLoss, Evaluation, rounded
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.engine.native.executor import NativeExecutor
from millrace.errors import CheckpointError, ConfigError
from millrace.evaluate import piecewise_forward
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.divergence import compared, log_probabilities
from millrace.evaluate.sizes import SHORTEST
from millrace.graph.types import Array
from millrace.model.module import Weights
from millrace.tune.precision import AccuracySelector, label
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import BLOCKY, write_gguf

CONTEXT = 48  # short windows: quick
SELECTOR = AccuracySelector(Calibration("The wheel turned all day, and the river went by under the old mill. " * 12))


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return Checkpoint.open(BUNDLED / "tiny")


FOUR = "w4a8 g32, lm_head w8a8"


def question(
    checkpoint: Checkpoint, candidates: Sequence[str], max_kl: float | None = None, context: int = CONTEXT,
    **others: object,
) -> AccuracyQuery:  # fmt: skip
    return AccuracyQuery(
        source=Source.from_checkpoint(checkpoint, context), tokenizer=checkpoint.tokenizer,
        options=BuildOptions(**others),  # type: ignore[arg-type]
        candidates=[precision_map(c, 32) for c in candidates], max_kl=max_kl, progress=lambda *_: None,
    )  # fmt: skip


def test_the_loss_is_that_of_a_built_engine(tiny: Checkpoint, tmp_path: Path) -> None:
    """`compared` goes by whole engines, and is itself tested against transformers."""
    executors, source = {}, Source.from_checkpoint(tiny, CONTEXT)
    for name, kv in (("fp32", None), ("w4a8", None), ("w8a8", KvFormat.INT8)):
        options = BuildOptions(precision=precision_map(name, 32), kv_format=kv)
        write_engine(source, plan_engine(source, options), tmp_path / name, name=name)
        executors[name] = Engine.open(tmp_path / name).executor(n_pages=2)
    text = SELECTOR.calibration.windows(tiny.tokenizer, CONTEXT)
    readers = {name: partial(log_probabilities, executor) for name, executor in executors.items()}
    found = compared(readers["fp32"], readers, [*text.ids], text.first)
    for name, kv in (("w4a8", None), ("w8a8", KvFormat.INT8)):
        chosen, evaluation = SELECTOR.select(question(tiny, [name], kv_format=kv))
        (loss,) = evaluation.tried
        assert chosen == precision_map(name, 32) and evaluation.tokens == found[name].n > 100
        assert loss.kl == rounded(found[name].mean_kl) and loss.perplexity_ratio == rounded(found[name].ratio)
        assert loss.agreement == pytest.approx(found[name].agreement, abs=5e-4) and loss.kl is not None
        table = Engine.open(tmp_path / name)
        assert loss.weights_bytes < table.manifest.cpu.weights_bytes
    for executor in executors.values():
        executor.close()


def test_auto_takes_the_first_that_keeps_within_the_bound(tiny: Checkpoint) -> None:
    names = ("w4a8", "w8a8", "bf16", "fp32")
    chosen, everything = SELECTOR.select(question(tiny, names, max_kl=0))
    losses = everything.tried
    kls = [p.kl or 0 for p in losses]
    assert chosen.default == "fp32" and losses[3] == AccuracyLoss(
        "fp32", 0, 1, 1, 15_859_712
    )  # the reference is not run twice
    assert [p.name for p in losses] == [FOUR, "w8a8 g32", "bf16", "fp32"] and kls == sorted(kls, reverse=True)
    chosen, evaluation = SELECTOR.select(question(tiny, names, max_kl=kls[1]))  # the bound itself is within
    assert chosen.default == "w8a8" and evaluation.tried == losses[:2] and evaluation.chosen_loss == losses[1]
    assert (evaluation.text, evaluation.digest) == ("bundled", SELECTOR.digest) and evaluation.not_measured == ""
    with pytest.raises(ConfigError, match=r"no precision keeps within --max-kl 1e-09: the best is w8a8 g32") as refused:
        SELECTOR.select(question(tiny, names[:2], max_kl=1e-9))
    assert f"at least {kls[1]:.3g}" in refused.value.expected


def test_the_answer_depends_neither_on_threads_nor_on_the_instruction_set(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, selector = question(tiny, ["w8a8"]), AccuracySelector(Calibration(SELECTOR.calibration.content[:400]))
    found = selector.select(asked)
    for way in ({"threads": 1}, {"threads": 1, "isa": "scalar"}):
        monkeypatch.setattr(piecewise_forward, "NativeExecutor", partial(NativeExecutor, **way))
        assert selector.select(asked) == found


def test_progress_counts_on_to_its_total(tiny: Checkpoint) -> None:
    seen: list[tuple[str, int, int]] = []
    asked = replace(question(tiny, ["w4a8", "w8a8"], max_kl=0.1), progress=lambda *said: seen.append(said))
    SELECTOR.select(asked)
    done, totals = [d for _, d, _ in seen], {t for _, _, t in seen}
    assert done == sorted(done) and totals == {3 * 11} and done[0] == 0 and done[-1] < 3 * 11
    assert [w for w, d, _ in seen if d in (0, 11, 22)] == [
        f"measuring {name}, piece by piece" for name in ("fp32, the reference", FOUR, "w8a8 g32")
    ]  # fmt: skip


def of_file(folder: Path, kind: Kind) -> PrecisionMap:
    path = write_gguf(folder / f"{kind.name}.gguf", folder / "c", kind)
    return Source.from_checkpoint(Checkpoint.open(path)).own_precision


def test_the_page_about_precisions_shows_what_is_found(tiny: Checkpoint) -> None:
    """docs/precision.md: its example, and why W4A16 is no candidate."""
    page = " ".join((Path(__file__).parents[2] / "docs" / "precision.md").read_text().split())
    selector, source = AccuracySelector(Calibration.open(None)), Source.from_checkpoint(tiny)
    own = replace(question(tiny, [], max_kl=0.1), source=source, candidates=selector.candidates(source.own_precision))
    _, evaluation = selector.select(own)
    assert f"accuracy {evaluation.summary}" in page
    better = selector.select(replace(own, candidates=[precision_map("w4a16")], max_kl=None))[1].chosen_loss
    assert better and f"(KL {better.kl} instead of {evaluation.tried[0].kl} on `tiny`)" in page


def test_candidates(tmp_path: Path) -> None:
    """Cheapest first, nothing above the checkpoint's own; integers as they are stored before all else."""

    def of(own: PrecisionMap) -> list[str]:
        return [p.default.value for p in SELECTOR.candidates(own)]

    assert of(precision_map("bf16")) == ["w4a8", "w8a8", "w8a16", "bf16"]
    assert of(precision_map("fp32")) == ["w4a8", "w8a8", "w8a16", "bf16", "fp32"]
    asked = SELECTOR.candidates(precision_map("bf16", 64, "w8a8"))
    assert {(p.group, p.head) for p in asked} == {(64, "w8a8")}
    random_checkpoint(tmp_path / "c", "llama", **BLOCKY)
    four, eight = of_file(tmp_path, Kind.Q4_0), of_file(tmp_path, Kind.Q8_0)
    assert of(four) == ["w4a8", "w4a16", "bf16", "fp32"] and of(eight) == ["w8a8", "w8a16", "bf16", "fp32"]
    as_stored, wider, *_ = SELECTOR.candidates(four)
    assert as_stored == four and {p for _, p in wider.patterns} <= {"w4a16", "w8a16"}
    fp8 = nearest_precisions({"q": StoredMatrix("fp8", 9, FP8), "lm_head": StoredMatrix("bfloat16", 1)})
    assert of(fp8) == ["fp8a16", "bf16", "fp32"] and SELECTOR.candidates(fp8)[0] == fp8
    assert of(replace(four, group=128, stored_groups=False)) == [
        "w4a8",
        "w8a8",
        "w8a16",
        "bf16",
        "fp32",
    ]  # rounded again anyway
    assert of(of_file(tmp_path, Kind.F16))[-1] == "fp32"


def test_answers_that_are_not_finite_have_no_loss(tmp_path: Path) -> None:
    """And cannot be written into a manifest as numbers: JSON has none for them."""
    folder = random_checkpoint(tmp_path / "c", "llama")
    checkpoint = Checkpoint.open(folder)
    asked = question(checkpoint, ["w8a8"], context=SHORTEST)
    given = asked.source.weights

    def huge(name: str) -> Array:
        return given.load(name).astype(np.float32) * np.float32(1e30 if "attention_layernorm" in name else 1)

    source = replace(asked.source, weights=Weights(given.shapes, huge))
    _, evaluation = SELECTOR.select(replace(asked, source=source))
    with pytest.raises(ConfigError, match="no precision whose answers are finite"):
        SELECTOR.select(replace(asked, source=source, max_kl=1.0))
    assert evaluation.chosen_loss is not None and evaluation.chosen_loss.kl is None and "no KL" in evaluation.summary
    assert msgspec.json.decode(msgspec.json.encode(evaluation), type=Evaluation) == evaluation


def test_weights_that_cannot_be_rounded_so_are_out_of_the_race(tmp_path: Path) -> None:
    """Scales in float16 do not hold them; bfloat16 does. Asked for by name it is an error, as it ever was."""
    asked = question(Checkpoint.open(random_checkpoint(tmp_path / "c", "llama")), ["w8a8", "bf16"], context=SHORTEST)
    given = asked.source.weights

    def small(name: str) -> Array:
        return given.load(name).astype(np.float32) * np.float32(1e-12 if "o_proj" in name else 1)

    asked = replace(asked, source=replace(asked.source, weights=Weights(given.shapes, small)))
    chosen, evaluation = SELECTOR.select(replace(asked, max_kl=10.0))
    assert chosen.default == "bf16" and evaluation.tried[0].kl is None and "w8a8 g32 none" in evaluation.summary
    with pytest.raises(CheckpointError, match="too small"):
        SELECTOR.select(replace(asked, candidates=asked.candidates[:1]))


def test_a_context_too_short_for_it_is_said(tiny: Checkpoint) -> None:
    chosen, evaluation = SELECTOR.select(question(tiny, ["w4a8"], context=SHORTEST - 1))
    assert chosen.default == "w4a8" and evaluation.summary == "not measured: a context of 15 tokens is too short for it"
    with pytest.raises(ConfigError, match="a context of 15 tokens is too short"):
        SELECTOR.select(question(tiny, ["w4a8"], 0.1, context=SHORTEST - 1))
    text = SELECTOR.calibration.windows(tiny.tokenizer, SHORTEST)
    assert SELECTOR.select(question(tiny, ["w4a8"], context=SHORTEST))[1].tokens == len(text.ids) * 11


def test_names() -> None:
    plain = (KvFormat.BF16, False)
    assert label(precision_map("w4a8", 32), *plain) == FOUR
    assert label(precision_map("w4a8", 32, head="w4a8"), *plain) == "w4a8 g32"
    assert label(precision_map("bf16"), KvFormat.INT8, True) == "bf16, int8 keys and values, bf16 summed by tiles"
    assert label(precision_map({"default": "w4a8", "a.*": "bf16"}, head="w8a8"), *plain) == (
        "w4a8 g128, lm_head w8a8, a.* bf16"
    )
    many = precision_map({"default": "w4a8", **{f"layers.{i}.*": "bf16" for i in range(30)}})
    assert label(many, *plain) == "w4a8 g128, lm_head w8a8, 30 layers otherwise"
    assert label(precision_map("fp8a16"), *plain) == "fp8a16, lm_head w8a16 g128"
    assert label(precision_map({"default": "bf16", "a.*": "w8a8"}, 64), *plain) == "bf16, a.* w8a8 g64"


def test_rounded_again_is_not_as_stored(tmp_path: Path) -> None:
    """Of a file in Q8_0: four bits are another rounding, which no figure may hide; eight are its own."""
    random_checkpoint(tmp_path / "c", "llama", **BLOCKY)
    stored = Source.from_checkpoint(Checkpoint.open(write_gguf(tmp_path / "q.gguf", tmp_path / "c", Kind.Q8_0))).stored

    def named(asked: str, head: str | None = None) -> str:
        return label(precision_map(asked, 32, head, stored_groups=True), KvFormat.BF16, False, stored)

    assert [named(p) for p in ("w8a8", "w8a16", "w4a8", "fp8a16")] == [
        "w8a8 as stored", "w8a16 as stored", "w4a8 g32, lm_head w8a8", "fp8a16, lm_head w8a16 g32",
    ]  # fmt: skip
    assert named("fp32", "w8a8") == "fp32, lm_head w8a8 as stored", "a head of codes that are the file's"
    assert named("fp8a16", "w8a8") == "fp8a16, lm_head w8a8 g32", "E4M3 has no groups"


def test_figures_are_kept_to_three_digits() -> None:
    assert (rounded(0.0123456), rounded(1.0), rounded(float("nan")), rounded(float("inf"))) == (0.0123, 1.0, None, None)
