"""Results of modules that an engine hands out, against transformers' hidden states; keeping them changes no answer."""

from pathlib import Path

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.engine import Engine
from millrace.errors import ConfigError
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import last_logits

PROMPTS = [[5, 6, 7, 8, 9], [11, 12]]
KEPT = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.1.mlp.down_proj")


def engine(checkpoint: Path, out: Path, precision: str, keep: tuple[str, ...]) -> Engine:
    source = Source.from_checkpoint(Checkpoint.open(checkpoint))
    plan = plan_engine(source, BuildOptions(precision=precision_map(precision), max_batch=4, keep=keep))
    write_engine(source, plan, out, name="test")
    return Engine.open(out)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_layers_are_as_transformers_has_them(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    checkpoint = random_checkpoint(tmp_path / "checkpoint", family, seed=9)
    kept = engine(checkpoint, tmp_path / "kept", "fp32", KEPT)
    executor = kept.executor(n_pages=8)
    last_logits(kept, executor, PROMPTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    with torch.no_grad():
        states = [model(torch.tensor([p]), output_hidden_states=True).hidden_states for p in PROMPTS]
    for i, name in enumerate(KEPT[:2]):  # the last of transformers' is behind the final norm
        exact = np.concatenate([s[i][0].numpy() for s in states])
        got = executor.output(name)
        assert got.shape == exact.shape and np.abs(got - exact).max() <= 1e-5 * np.abs(exact).max()
    executor.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w4a8"])
def test_keeping_changes_no_answer(precision: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "qwen3", seed=9)
    plain, kept = (engine(checkpoint, tmp_path / f"e{len(keep)}", precision, keep) for keep in ((), KEPT))
    answers = []
    for e in (plain, kept):
        executor = e.executor(n_pages=8)
        answers.append(last_logits(e, executor, PROMPTS))
        if e is kept:
            before, mlp, after = (executor.output(name) for name in KEPT[1:2] + KEPT[3:] + KEPT[2:3])
            assert before.shape == mlp.shape == after.shape == (7, 320) and not (before == after).any()
        else:
            with pytest.raises(ConfigError, match="keeps no"):
                executor.output("model.layers.0")
        executor.close()
    assert (answers[0] == answers[1]).all()


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "llama", seed=9)
    with pytest.raises(ConfigError, match=r'did you mean "model\.layers\.0\.mlp"'):
        engine(checkpoint, tmp_path / "never", "fp32", ("model.layers.0.mpl",))
