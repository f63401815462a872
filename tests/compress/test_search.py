"""Mixes within a bound: what is predicted, what is measured, and what is written."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import by_statistics, statistics_of
from millrace.compress.calibration.calibration_pass import samples
from millrace.compress.calibration.statistics import CalibrationStatistics, InputStatistics
from millrace.compress.compress import compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.measure import cost
from millrace.compress.measure.accuracy import Loss, measure
from millrace.compress.measure.cost import product_of
from millrace.compress.presets import CompressionTarget
from millrace.compress.recipe import PRESETS, read_recipe
from millrace.compress.search.candidates import (
    FLOAT,
    TREATMENTS,
    RoundedMatrixStore,
    activation_errors,
    candidate_formats,
    recipe_of,
    survey,
)
from millrace.compress.search.loss_bound import KL, MAX_MIXES, PERPLEXITY, MaxLoss, searched
from millrace.compress.search.mixed_precision import Candidate, Mix
from millrace.compress.search.search import RECIPE, SearchGoal, SearchResult, SearchWindows, search
from millrace.engine.roofline_probe import ProbedMatmul
from millrace.errors import ConfigError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.text_windows import Windows
from tests.fuzz.originals import write_checkpoint

TEXT = (BUNDLED / "calibration.txt").read_text()
CUT = len(TEXT) // 2


def nothing(*_: object) -> None: ...


class Model(NamedTuple):
    """Random, of one layer; losses and shelf are of all candidates."""

    checkpoint: Checkpoint
    plan: CompressionPlan
    statistics: CalibrationStatistics
    texts: SearchWindows
    shelf: RoundedMatrixStore
    losses: dict[str, dict[str, float]]

    def search(self, bound: str, out: Path) -> SearchResult:
        asked = SearchGoal(MaxLoss.parse(bound), CompressionTarget.MEMORY, 0, "scalar", 1)
        return search(self.plan, asked, self.statistics, self.texts, out, nothing, self.shelf)


def decided(folder: Path) -> Path:
    """Its logits are 60 times as large: where all tokens are as likely as others, nothing is lost."""
    held = safetensors.numpy.load_file(folder / "model.safetensors")
    held["lm_head.weight"] *= 60
    safetensors.numpy.save_file(held, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    checkpoint = Checkpoint.open(decided(write_checkpoint(folder / "c")))
    text, four = samples(checkpoint.tokenizer, TEXT[:CUT], 4, 64), samples(checkpoint.tokenizer, TEXT[CUT:], 4, 64)
    texts = SearchWindows(Calibration(TEXT[CUT:]), *(Windows(ids, 0) for ids in (four.ids[:2], four.ids[2:])))
    plan, statistics = (
        plan_compression(checkpoint, PRESETS["int8-wo"]),
        statistics_of(checkpoint, text, folder / "s", nothing),
    )
    shelf = RoundedMatrixStore(folder)
    return Model(checkpoint, plan, statistics, texts, shelf, survey(plan, statistics, shelf, nothing))


def bytes_in(folder: Path, plan: CompressionPlan) -> int:
    """Of the layers' codes and scales, by the file's own header; shapes, which packed matrices have, are not counted in
    costs of floats, and are 16 bytes each."""
    with safe_open(folder / "model.safetensors", "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        widths = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}
        return sum(
            int(np.prod(s.get_shape())) * widths[s.get_dtype()]
            for name, s in slices.items() if name.rpartition(".")[0] in plan.layers
        )  # fmt: skip


BOUNDS = (1e-4, 8e-4)


@pytest.fixture(scope="module")
def searches(model: Model, tmp_path_factory: pytest.TempPathFactory) -> list[SearchResult]:
    """Of each bound, in a folder that has nothing else."""
    folder = tmp_path_factory.mktemp("found")
    found = [model.search(f"kl:{bound}", folder / str(number)) for number, bound in enumerate(BOUNDS)]
    assert sorted(p.name for p in folder.iterdir()) == ["0", "1"], "what was tried is gone"
    return found


def test_a_bound_holds_and_a_looser_one_is_never_dearer(model: Model, searches: list[SearchResult]) -> None:
    for bound, found in zip(BOUNDS, searches, strict=True):
        out = found.result.folder
        again = measure(model.checkpoint, Checkpoint.open(out), model.texts.choice, nothing)
        assert again.kl <= bound and again.on(model.texts.calibration) == found.choice
        assert model.texts.proof is not None
        proof = measure(model.checkpoint, Checkpoint.open(out), model.texts.proof, nothing).on(model.texts.calibration)
        assert proof == found.proof == found.loss and proof.kl != again.kl and proof.kl_error
        assert found.mix.cost == bytes_in(out, model.plan)
        assert found.floats == bytes_in(model.checkpoint.folder, model.plan)
        assert {c.format for c in found.mix.chosen.values()} - {FLOAT}, "something is compressed"
        record = json.loads((out / "compression.json").read_text())
        assert record["search"]["found"] == found.search.cheapest and record["loss"]["kl"] == proof.kl
        assert record["search"]["choice"]["kl"] == again.kl and record["search"]["proven"] == proof.kl
        assert record["loss"]["digest"] == model.texts.calibration.digest
    assert searches[1].mix.cost < searches[0].mix.cost


def test_the_recipe_makes_the_same_bytes(model: Model, searches: list[SearchResult], tmp_path: Path) -> None:
    found, out = searches[1], searches[1].result.folder
    assert any("int4" in c.format for c in found.mix.chosen.values())
    plan = plan_compression(model.checkpoint, read_recipe(str(out / RECIPE)))
    compress(plan, tmp_path / "again", by_statistics(model.statistics))
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_where_nothing_is_within(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"within a loss of 1e-08 \(KL\): the best found has [1-9.e-]+") as error:
        model.search("kl:1e-8", tmp_path / "out")
    raised = error.value.fix.removeprefix("raise --max-loss to ").partition(" or more")[0]
    assert MaxLoss.parse(raised).bound > 1e-8 and not list(tmp_path.iterdir())


def test_what_statistics_say_of_each_format(model: Model) -> None:
    """Beside float64, from what is on the shelf; with 8-bit activations more is lost, of the same codes."""
    for layer, losses in model.losses.items():
        w, x = model.checkpoint.tensors.load(f"{layer}.weight").astype(np.float64), model.statistics[layer]
        assert list(losses) and set(losses) == set(candidate_formats(w.shape[1])) and losses[FLOAT] == 0
        gram = x.gram.astype(np.float64)
        for name in [n for n in losses if n != FLOAT]:
            off = model.shelf.get(layer, name).matrix.dequantise() - w
            exact = np.trace(off @ gram @ off.T) / np.trace(w @ gram @ w.T)
            if name.endswith("-a8"):
                assert losses[name] > losses[name.removesuffix("-a8")]
            else:
                assert losses[name] == pytest.approx(exact, rel=1e-3)
        assert max(losses["int8"], losses["fp8"]) < losses["int4-g32"]
    assert candidate_formats(192) == [n for n in TREATMENTS if "g128" not in n] and candidate_formats(20) == [
        FLOAT,
        "int8",
        "int8-a8",
        "fp8",
    ]


@pytest.mark.parametrize("outliers", [1.0, 40.0])
@pytest.mark.parametrize("group", [32, 0])
def test_activations_lose_about_what_is_foretold(outliers: float, group: int) -> None:
    """Beside rounding of drawn rows: of channels alike, and where one in 50 is far larger."""
    rng = np.random.default_rng(3)
    T, N, K = 600, 40, 128
    sizes = np.where(rng.random(K) < 0.02, outliers, 1.0)
    rows, w = rng.normal(size=(T, K)) * sizes, rng.normal(size=(N, K)) / sizes
    each = rows.reshape(T, -1, group or K)
    scales = np.abs(each).max(axis=2, keepdims=True) / 127
    off = (np.rint(each / scales) * scales - each).reshape(T, K)
    exact = np.square(off @ w.T).sum() / np.square(rows @ w.T).sum()
    found = InputStatistics(("x",), (rows.T @ rows / T).astype(np.float32), *np.zeros((2, K), np.float32))
    assert 0.5 * exact < activation_errors(w.astype(np.float32), found, [group])[group] < 2 * exact


@pytest.mark.parametrize("seed", range(10))
def test_a_search_keeps_its_promises_however_uneven_losses_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mixes = [Mix(float(i), 0.0, {"a": Candidate("x", i, 0.0)}) for i in range(MAX_MIXES)]
    losses = np.linspace(1, 0, MAX_MIXES) + rng.normal(0, 0.3, MAX_MIXES)
    before = MAX_MIXES
    for bound in np.linspace(0.05, 2, 40):
        asked: list[int] = []

        def measured(number: int, mix: Mix, asked: list[int] = asked) -> float:
            assert mix is mixes[number]
            asked.append(number)
            return float(losses[number])

        try:
            found = searched(mixes, MaxLoss(KL, bound), measured)
        except ConfigError as error:
            assert before == MAX_MIXES and f"{min(losses[asked]):.3g}" in str(error)
            continue
        assert losses[found.cheapest] <= bound and found.cheapest <= before and len(asked) <= 8
        assert found.cheapest == min(n for n in asked if losses[n] <= bound)
        before = found.cheapest
    assert before == 0, "everything is within the loosest"


def test_predictions_go_through_what_was_measured() -> None:
    mixes = [Mix(1.0, 0.4, {}), Mix(2.0, 0.2, {}), Mix(3.0, 0.1, {})]
    found = searched(mixes, MaxLoss(KL, 5.0), lambda number, _: 10 * mixes[number].loss)
    assert found.cheapest == 0 and found.predicted(2) == pytest.approx(1.0), "ten times, as the others were"
    assert searched(mixes, MaxLoss(KL, 5.0), lambda *_: -1e-9).predicted(2) is None, "below zero they say nothing"


def test_losses_in_words() -> None:
    assert MaxLoss.parse("1%") == MaxLoss.parse(" 1.0 % ") == MaxLoss(PERPLEXITY, 0.01)
    assert MaxLoss.parse("KL:2e-3") == MaxLoss(KL, 0.002)
    for wrong in ("1", "", "%", "-1%", "0%", "kl:", "kl:nan", "kl:0", "1.2.3%", ".%", "2000%", "kl:1e9", "kl:11"):
        with pytest.raises(ConfigError, match="--max-loss is"):
            MaxLoss.parse(wrong)
    worse, luckier = (Loss(0.01, p, 20.0, 0.9, 100, "w8a16") for p in (21.0, 19.0))
    percent = MaxLoss(PERPLEXITY, 0.01)
    assert percent.loss_value(worse) == pytest.approx(0.05) and MaxLoss(KL, 1).loss_value(worse) == 0.01
    assert percent.loss_value(luckier) == pytest.approx(np.expm1(0.01)), "a perplexity that falls is no gain"
    assert percent.format_value(0.0123) == "+1.23 %" and MaxLoss(KL, 1).format_value(0.0123) == "0.0123"


@pytest.mark.parametrize("kind", [PERPLEXITY, KL])
def test_a_bound_that_is_named_can_be_asked_for(kind: str) -> None:
    """It is read as it is written, holds what it is said of, and is hardly larger."""
    rng = np.random.default_rng(4)
    for value in [*np.exp(rng.uniform(np.log(1e-6), np.log(10), 300)), 0.01, 0.00335, 0.1, 1.0, 9.9999, 10.0]:
        text = MaxLoss(kind, 1.0).as_flag(value)
        assert text is not None
        found = MaxLoss.parse(text)
        assert found.kind == kind and value <= found.bound <= 1.011 * value, (value, text)
    assert MaxLoss(kind, 1.0).as_flag(10.01) is None, "no bound is as large"
    assert MaxLoss.parse(MaxLoss(kind, 1.0).as_flag(1e-15) or "").bound >= 1e-15
    with pytest.raises(ConfigError) as error:
        searched([Mix(1.0, 1.0, {})], MaxLoss(kind, 0.01), lambda *_: 1e6)
    assert error.value.fix == "leave the model as it is"


def test_what_is_timed_is_what_runs(model: Model, tmp_path: Path) -> None:
    """Each layer in another format: the products of the folder's engine, by its own reader."""
    layers = list(model.plan.layers)
    names = ["float", "int8", "int8-a8", "fp8", "int4-g32", "int4-g64-a8", "int4-g32-a8"]
    chosen = dict(zip(layers, names, strict=True))
    compress(plan_compression(model.checkpoint, recipe_of(chosen)), tmp_path / "out", model.shelf.method(chosen))
    made = Source.from_checkpoint(Checkpoint.open(tmp_path / "out"))
    for layer, name in chosen.items():
        product = product_of(model.plan, layer, name, "avx2")
        precision, held = made.own_precision.precision_of(layer), made.stored[layer].codes
        assert product.weights == precision.weights, (layer, name)
        assert product.format == precision.storage(product.group).format
        assert product.group == (held.group if held else 0)
        assert (product.n, product.k) == model.checkpoint.tensors[f"{layer}.weight"].shape


def test_a_mix_of_all_kinds_is_what_its_recipe_makes(model: Model, tmp_path: Path) -> None:
    """With FP8 in it, from the shelf and from the recipe's own methods: the same bytes."""
    layers = list(model.plan.layers)
    chosen = dict(zip(layers, ["fp8", "int8", "fp8", "int4-g32", FLOAT, "fp8", "int4-g64-a8"], strict=True))
    plan = plan_compression(model.checkpoint, recipe_of(chosen))
    compress(plan, tmp_path / "shelf", model.shelf.method(chosen))
    compress(plan, tmp_path / "recipe", by_statistics(model.statistics))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "shelf" / name).read_bytes() == (tmp_path / "recipe" / name).read_bytes()
    with safe_open(tmp_path / "shelf" / "model.safetensors", "np") as file:
        for layer, format in chosen.items():
            weights = [name for name in file.keys() if name.startswith(f"{layer}.weight")]  # noqa: SIM118
            assert any(file.get_slice(name).get_dtype() == "F8_E4M3" for name in weights) == (format == "fp8")


def test_times_are_taken_once_for_each_kind(model: Model) -> None:
    timed: list[ProbedMatmul] = []

    def clock(product: ProbedMatmul) -> float:
        timed.append(product)
        return product.nbytes / 1e9

    found = cost.seconds(model.plan, 4, "avx2", 1, nothing, clock)
    assert found.keys() == model.plan.layers.keys()
    q = found["model.layers.0.self_attn.q_proj"]
    assert q["int4-g64"] < q["int8"] < q[FLOAT] and q["int8"] == q["int8-a8"]
    assert q["int4-g64"] < q["fp8"] < q[FLOAT]
    ours = cost.Clock("scalar", 1, 2, lambda _: 3)
    product = product_of(model.plan, "model.layers.0.self_attn.v_proj", "int4-g64-a8", "scalar")
    taken = ours(product)
    assert 1e-7 < taken < 1 and ours(product) == taken and ours.result == {product: taken}


def test_recipes_of_mixes() -> None:
    chosen: Mapping[str, str] = {"a": "int8", "b": "int8", "c": "float", "d": FLOAT, "e": FLOAT, "f": "int4-g64-a8"}
    recipe = recipe_of(chosen)
    assert recipe.usual == TREATMENTS["int8"], "floats are never the usual"
    assert {layer: recipe.layer_recipe(layer) for layer in chosen} == {
        layer: TREATMENTS[f] for layer, f in chosen.items()
    }


def test_a_text_of_few_windows_proves_nothing(model: Model, tmp_path: Path) -> None:
    """Then the loss is that of the choice, and it says so."""
    few = model._replace(texts=replace(model.texts, proof=None))
    found = few.search("kl:8e-4", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert found.proof is None and found.loss == found.choice and record["search"]["proven"] is None
