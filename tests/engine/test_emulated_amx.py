"""Engines that sum by AMX's tiles give the same tokens and logits on emulated tiles as on lanes."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millrace.api.offline_generate import CompletionOutput, generate
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.engine.artifact.engine import Engine
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import BF16_BY_TILES
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from tests.engine.test_golden import CASES, RECORDED, built, digests
from tests.support.emulated_amx import EMULATED, emulation
from tests.support.engines import build, last_logits

PROMPTS = ["Once upon a time", "a", "Lily and Tom went to the park. " * 3]


@pytest.fixture(autouse=True)
def amx_is_emulated() -> Iterator[None]:
    with emulation():
        yield


def answers(engine: Engine, isa: str) -> list[CompletionOutput]:
    """Greedy and drawn, of prompts of mixed lengths in one batch, with log probabilities."""
    executor = engine.executor(n_pages=32, threads=2, isa=isa)
    assert executor.isa == isa
    loop = EngineLoop(executor, open_tokenizer(engine.folder), GenerationDefaults())
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True, seed=i, temperature=i % 2, logprobs=2)
        for i in range(len(PROMPTS))
    ]
    outputs = generate(loop, PROMPTS, params)
    executor.close()
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("precision", [BF16_BY_TILES, "w8a8", pytest.param("w4a8", marks=pytest.mark.nightly)])
def test_tiny_says_the_same(precision: str, tmp_path: Path) -> None:
    engine = build(BUNDLED / "tiny", tmp_path / "engine", precision, group=64)
    expected = answers(engine, usable_isas()[0])
    assert answers(engine, EMULATED) == expected
    assert len({tuple(answer.token_ids) for answer in expected}) == len(PROMPTS)


def test_the_order_of_sums_is_seen(tmp_path: Path) -> None:
    """Without tiles the same engine's logits have other bits, so equal ones above are those of tiles."""
    prompts = [list(range(3, 3 + n)) for n in (1, 17)]
    found = {}
    for precision in (BF16_BY_TILES, "bf16"):
        executor = build(BUNDLED / "tiny", tmp_path / precision, precision).executor(n_pages=8, isa=EMULATED)
        engine = Engine.open(tmp_path / precision)
        found[precision] = last_logits(engine, executor, prompts)
        executor.close()
    assert (found["bf16"] != found[BF16_BY_TILES]).any()
    assert np.allclose(found["bf16"], found[BF16_BY_TILES], atol=0.1)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "precision"), [case for case in CASES if "tiles" in case[1] or "a8" in case[1]])
def test_logits_are_as_recorded(family: str, precision: str, tmp_path: Path) -> None:
    recorded: dict[str, str] = json.loads(RECORDED.read_text())
    assert digests(built(tmp_path, family, precision), EMULATED) == recorded[f"{family} {precision}"]
