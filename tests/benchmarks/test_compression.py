"""The run of all methods: its arithmetic by hand, what it judges, and that it goes on where it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compression
from benchmarks.compression import AWQ, GPTQ, GPTQ_CLIP, MIX, RTN, Bench, Cost, Texts, goals, mix, of_the_world
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compress.calibrated import statistics_of
from millrace.compress.plan import plan
from millrace.evaluate.divergence import Score, Tokens
from millrace.evaluate.windows import Windows
from tests.compress.conftest import first_layers


def test_errors_are_those_of_windows() -> None:
    """Of three windows by hand: tokens of one window say nothing of how far windows differ."""
    kl = np.array([[0.1, 0.3], [0.2, 0.2], [0.5, 0.7]])
    loss, reference = np.log(np.array([[20, 20], [22, 22], [18, 18]])), np.log(np.full((3, 2), 20))
    same = np.array([[True, False], [True, True], [False, False]])
    score = Score([Tokens(*rows) for rows in zip(loss, reference, kl, same, strict=True)])
    cost = Cost.of("x", "", "w4a16", 4.2187, score, 1.26)
    means = [0.2, 0.2, 0.6]
    assert cost.kl == pytest.approx((np.mean(means), np.std(means, ddof=1) / 3**0.5))
    logs = np.log([20, 22, 18])
    assert cost.perplexity[0] == pytest.approx(np.exp(logs.mean()))
    assert cost.ratio[1] == pytest.approx(np.exp(logs.mean() - np.log(20)) * logs.std(ddof=1) / 3**0.5)
    assert cost.agreement[0] == pytest.approx(0.5) and (cost.bits, cost.seconds) == (4.219, 1.3)


def costs(**kl: float) -> dict[str, Cost]:
    one = (1.0, 0.1)
    return {name: Cost(name, "", "", 4.0, (value, 0.01), one, one, one, 0) for name, value in kl.items()}


def test_goals_are_judged_by_shares() -> None:
    whole = costs(**{RTN: 0.5, AWQ: 0.41, GPTQ: 0.3, GPTQ_CLIP: 0.2, MIX: 0.21, "int8-sq": 0.0099, "fp8-gptq": 0.0101})
    verdicts = {g["what"].split(",")[0]: (g["reached"], g["verdict"]) for g in goals(whole)}
    assert verdicts == {
        "the better of AWQ and GPTQ": (0.4, "goal met"), "the other of them": (0.82, "missed"),
        f"the {MIX}": (0.42, "missed"), "KL of int8-sq": (0.0099, "goal met"), "KL of fp8-gptq": (0.0101, "missed"),
    }  # fmt: skip
    assert [g["what"] for g in goals(costs(**{RTN: 0.5, "fp8-gptq": 0.001}))] == ["KL of fp8-gptq"], (
        "only what was measured"
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Texts]:
    checkpoint = first_layers(tmp_path_factory.mktemp("small") / "m", 2)
    texts = of_the_world(checkpoint)
    few = Windows(texts.calibration.ids[:4, :64], 0), Windows(texts.judged.ids[:3, :64], 32)
    return checkpoint, texts._replace(calibration=few[0], judged=few[1])


def test_it_goes_on_where_it_was(small: tuple[Checkpoint, Texts], tmp_path: Path, monkeypatch: Any) -> None:
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


def test_a_mix_keeps_within_its_bits(small: tuple[Checkpoint, Texts], tmp_path: Path) -> None:
    """And has used nearly all of them: the next layer would not fit."""
    checkpoint, texts = small
    statistics = statistics_of(checkpoint, texts.calibration, tmp_path, lambda *_: None)
    job = plan(checkpoint, mix(checkpoint, statistics, 4.5))
    assert 4.4 < job.bits_per_weight <= 4.5
    assert {form.bits for _, form in job.layers.values()} == {4, 8}
