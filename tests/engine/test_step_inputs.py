"""What a step may bring beside token ids: embedding rows, rotary positions, several rows that draw for one sequence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.engine.artifact.engine import Engine
from millrace.engine.executor import ExecutionError, StepInputs, plain_rows
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build, prompts_as_step

PROMPTS = [[5, 900, 17, 33, 2, 8], [7, 7, 9], list(range(3, 90))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=4)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build(folder, tmp_path_factory.mktemp("engine") / "e", "fp32")


def logits(engine: Engine, step: StepInputs) -> np.ndarray:
    executor = engine.executor(n_pages=16)
    try:
        executor.run(step)
        return executor.output("logits").copy()
    finally:
        executor.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_are_the_tokens_they_stand_for(folder: Path, tmp_path: Path, precision: str) -> None:
    """Some of the tokens, in any order of rows."""
    engine, step = build(folder, tmp_path / "e", precision), prompts_as_step(PROMPTS)
    table = Checkpoint.open(folder).tensors.load("model.embed_tokens.weight").astype(np.float32)
    table = table if precision == "fp32" else table.astype(ml_dtypes.bfloat16).astype(np.float32)
    tokens, places = step.tokens.copy(), np.array([3, 0, 50, 8])
    order = np.array([2, 0, 3, 1])
    rows = np.empty((4, table.shape[1]), np.float32)
    rows[order] = table[tokens[places]]
    tokens[places] = -1 - order
    found = logits(engine, replace(step, tokens=tokens.astype(np.int32), embeddings=rows))
    np.testing.assert_array_equal(found, logits(engine, step))


def test_rows_are_those_of_transformers(folder: Path, engine: Engine) -> None:
    rows = np.random.default_rng(1).standard_normal((9, 320)).astype(np.float32)
    step = replace(prompts_as_step([[1] * 9]), tokens=-1 - np.arange(9, dtype=np.int32), embeddings=rows)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(inputs_embeds=torch.from_numpy(rows)[None]).logits[0, -1].numpy()
    np.testing.assert_allclose(logits(engine, step)[0], expected, rtol=2e-3, atol=2e-4)


def test_rotary_positions_are_those_of_transformers(folder: Path, engine: Engine) -> None:
    """As of pictures, whose tokens share positions: not ascending, and with gaps."""
    ids, rotary = PROMPTS[0], [0, 1, 1, 1, 7, 300]
    step = replace(prompts_as_step([ids]), rotary_positions=np.array(rotary, np.int32))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        mask = torch.ones(1, len(ids), dtype=torch.long)
        given = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([rotary]), "attention_mask": mask}
        expected = model(**given).logits[0, -1].numpy()
    found = logits(engine, step)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)
    assert np.abs(found - logits(engine, prompts_as_step([ids]))[0]).max() > 1e-2


def test_drafted_tokens_are_verified_in_one_step(engine: Engine) -> None:
    """A row for each drafted token: what each draws is what it draws alone."""
    prompt, executor = PROMPTS[2], engine.executor(n_pages=16)
    whole = prompts_as_step([prompt])
    rows = plain_rows(5)
    rows["token"] = np.arange(len(prompt) - 5, len(prompt))
    rows["position"] = rows["token"] + 1
    together = executor.run(replace(whole, sampling=rows)).tokens.tolist()
    alone = [int(executor.run(prompts_as_step([prompt[: n + 1]])).tokens[0]) for n in rows["token"].tolist()]
    executor.close()
    assert together == alone


@pytest.mark.parametrize(("changes", "why"), [
    ({"tokens": np.array([1, -1], np.int32)}, "a token beyond the vocabulary"),
    ({"tokens": np.array([1, -2], np.int32), "embeddings": np.zeros((1, 320), np.float32)}, "a token beyond"),
    ({"embeddings": np.zeros((1, 321), np.float32)}, "the width of embedding rows"),
    ({"embeddings": np.zeros((1, 320))}, "embeddings are float64"),
    ({"embeddings": np.zeros(320, np.float32)}, "embeddings are float32"),
    ({"rotary_positions": np.array([0, 512], np.int32)}, "a rotary position beyond the context"),
    ({"rotary_positions": np.array([0, -1], np.int32)}, "a rotary position beyond the context"),
    ({"rotary_positions": np.array([0], np.int32)}, "rotary positions has 1 elements"),
])  # fmt: skip
def test_what_is_illegal(engine: Engine, changes: dict[str, Any], why: str) -> None:
    executor = engine.executor(n_pages=16)
    with pytest.raises(ExecutionError, match=why):
        executor.run(replace(prompts_as_step([[1, 2]]), **changes))
    executor.close()
