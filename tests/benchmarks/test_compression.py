"""The run of all methods: its arithmetic by hand, what it judges, and that it goes on where it was."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compression
from benchmarks.compression import (
    AWQ,
    GPTQ,
    GPTQ_CLIP,
    MIX,
    RECIPES,
    RTN,
    SIMULATED,
    Bench,
    Cost,
    SearchWindows,
    goals,
    mix,
    of_the_world,
    share_of,
)
from benchmarks.record import RESULTS
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compress.calibration.calibrated_methods import statistics_of
from millrace.compress.compression_plan import plan_compression
from millrace.compress.search.candidates import RoundedMatrixStore
from millrace.evaluate.divergence import DivergenceScore, Tokens
from millrace.evaluate.text_windows import Windows, windows_of
from tests.compress.conftest import first_layers


def test_errors_are_those_of_windows() -> None:
    """Of three windows by hand: tokens of one window say nothing of how far windows differ."""
    kl = np.array([[0.1, 0.3], [0.2, 0.2], [0.5, 0.7]])
    loss, reference = np.log(np.array([[20, 20], [22, 22], [18, 18]])), np.log(np.full((3, 2), 20))
    same = np.array([[True, False], [True, True], [False, False]])
    score = DivergenceScore([Tokens(*rows) for rows in zip(loss, reference, kl, same, strict=True)])
    cost = Cost.of("x", "", "w4a16", 4.2187, score, 1.26)
    means = [0.2, 0.2, 0.6]
    assert cost.kl == pytest.approx((np.mean(means), np.std(means, ddof=1) / 3**0.5))
    logs = np.log([20, 22, 18])
    assert cost.perplexity[0] == pytest.approx(np.exp(logs.mean()))
    assert cost.ratio[1] == pytest.approx(np.exp(logs.mean() - np.log(20)) * logs.std(ddof=1) / 3**0.5)
    assert cost.kl_by_window == pytest.approx([0.2, 0.2, 0.6])
    assert cost.agreement[0] == pytest.approx(0.5) and (cost.bits, cost.seconds) == (4.219, 1.3)


def test_the_interval_of_a_share_is_that_of_pairs() -> None:
    """Windows differ tenfold, and both methods with them: drawn anew with their pairs (a bootstrap) the share moves as
    far as the interval says, though each mean alone moves far more. Twelve windows cover it 19 times of 20."""
    rng = np.random.default_rng(0)
    whole = rng.lognormal(-3, 1.0, 400)
    part = 0.5 * whole * rng.lognormal(0, 0.2, 400)
    ratio, low, high = share_of(part, whole)
    drawn = rng.integers(0, 400, (4000, 400))
    shares = part[drawn].sum(axis=1) / whole[drawn].sum(axis=1)
    assert ratio == pytest.approx(part.sum() / whole.sum())
    assert (low, high) == pytest.approx(np.quantile(shares, [0.025, 0.975]), abs=0.1 * (high - low))
    alone = share_of(part, rng.permutation(whole))
    assert high - low < 0.25 * (alone[2] - alone[1])
    inside = 0
    for _ in range(400):
        whole = rng.lognormal(-3, 0.5, 12)
        _, low, high = share_of(0.5 * whole * (1 + rng.normal(0, 0.2, 12)), whole)
        inside += low <= 0.5 <= high
    assert 0.91 <= inside / 400 <= 0.98


def costs(**kl: tuple[float, ...]) -> dict[str, Cost]:
    one = (1.0, 0.1)
    return {
        name: Cost(name, "", "", 4.0, (float(np.mean(values)), 0.01), one, one, one, 0, values)
        for name, values in kl.items()
    }


def test_goals_are_judged_by_shares_of_pairs() -> None:
    """By hand, of two windows six times: half an interval is 2.201 (t of 11) times the deviation 0.001 (12 / 11)^0.5 of
    what the share leaves of a window, by 12^0.5 and by RTN's mean of 0.5. The named two are judged."""
    pairs = {
        RTN: (0.4, 0.6), AWQ: (0.328, 0.492), GPTQ: (0.239, 0.361), GPTQ_CLIP: (0.1, 0.1), MIX: (0.14, 0.27),
        "int8-sq": (0.0099, 0.0099), "fp8": (0.0176, 0.0176), "fp8-gptq": (0.0085, 0.0107),
    }  # fmt: skip
    found = goals(costs(**{name: values * 6 for name, values in pairs.items()}))
    assert [(g["what"].split(",")[0], g["reached"], g["goal"], g["verdict"]) for g in found] == [
        ("the better of AWQ and GPTQ", 0.6, 0.65, "met"), ("the better of AWQ and GPTQ", 0.6, 0.5, "missed"),
        ("the other of them", 0.82, 0.8, "missed"), (f"the {MIX}", 0.41, 0.4, "not decided"),
        ("KL of int8-sq", 0.0099, 0.01, "met"), ("KL of fp8", 0.0176, 0.01, "missed"),
    ]  # fmt: skip
    half = 2.201 * 0.001 * (12 / 11) ** 0.5 / 12**0.5 / 0.5
    assert found[0]["interval"] == pytest.approx([0.6 - half, 0.6 + half], abs=1e-4)
    assert GPTQ in found[0]["what"] and AWQ in found[2]["what"] and len(found) == compression._GOALS
    some = goals(costs(**{RTN: (0.5,) * 3, "fp8": (0.001,) * 3, "fp8-gptq": (0.001,) * 3}))
    assert [goal["what"] for goal in some] == ["KL of fp8"], "only what was measured, and what a goal names"


def test_a_goal_is_met_by_the_method_that_it_names() -> None:
    """Files from before judged another method by the goal of FP8 to nearest."""
    for met in ("met", "goal met"):
        assert compression.verdict({"what": "KL of fp8-gptq", "verdict": met}) == "missed: the goal names fp8"
        assert compression.verdict({"what": "KL of fp8", "verdict": met}) == met
    assert compression.verdict({"what": "KL of fp8-gptq", "verdict": "not decided"}) == "not decided"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, SearchWindows]:
    checkpoint = first_layers(tmp_path_factory.mktemp("small") / "m", 2)
    texts = of_the_world(checkpoint)
    few = Windows(texts.calibration.ids[:4, :64], 0), Windows(texts.judged.ids[:3, :64], 32)
    return checkpoint, texts._replace(calibration=few[0], judged=few[1])


def test_what_is_judged_was_not_looked_at(small: tuple[Checkpoint, SearchWindows], tmp_path: Path) -> None:
    """None of the windows that earlier runs had: 8, and 12, of the same text."""
    text = tmp_path / "text"
    text.write_text(" ".join(f"{n} apples" for n in range(40_000)))
    checkpoint, _ = small
    texts = compression.of_a_text(checkpoint, text, 2, 12)
    words = text.read_text()
    every = windows_of(checkpoint.tokenizer, checkpoint.tokenizer.encode(words[3 * len(words) // 5 :]), 512)
    seen = {row.tobytes() for n in (8, 12) for row in every.spread(n).ids}
    assert len(every.ids) > 100 and len({row.tobytes() for row in texts.judged.ids}) == 12
    assert not seen & {row.tobytes() for row in texts.judged.ids}


def test_it_goes_on_where_it_was(small: tuple[Checkpoint, SearchWindows], tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    bench = Bench(*small, tmp_path, said.append)
    found = bench.run(["bf16", RTN])
    assert [cost.recipe for cost in found] == ["bf16", RTN] and found[1].precision == "w4a16"
    assert found[0].kl < found[1].kl

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(compression, "compress", never)
    assert bench.run([RTN, "bf16"]) == found[::-1]
    with pytest.raises(AssertionError, match="measured again"):
        bench.run(["fp8"])


def test_a_mix_keeps_within_its_bits(small: tuple[Checkpoint, SearchWindows], tmp_path: Path) -> None:
    """And has used nearly all of them: the next layer would not fit."""
    checkpoint, texts = small
    statistics = statistics_of(checkpoint, texts.calibration, tmp_path, lambda *_: None)
    recipe = mix(checkpoint, statistics, RoundedMatrixStore(tmp_path / "formats"), 4.5)
    job = plan_compression(checkpoint, recipe)
    assert 4.4 < job.bits_per_weight <= 4.5
    formats = {(form.bits, form.group) for _, form in job.layers.values()}
    assert len(formats) > 1 and sum(int(n.split(" layers ")[0]) for n in recipe.about.split(", ")) == len(job.layers)


@pytest.mark.parametrize("model", ["tiny", "SmolLM2-135M-Instruct.Q4_1"])
def test_the_newest_run_has_every_recipe(model: str) -> None:
    """What the docs show is of today's recipes: a new one is measured, and a name that is gone does not stay."""
    newest = max(RESULTS.glob(f"compression-{model}-*.json"))
    kept = {cost["recipe"].removesuffix(SIMULATED) for cost in json.loads(newest.read_text())["costs"]}
    assert kept == {"bf16", *RECIPES, MIX}
