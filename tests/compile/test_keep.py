"""Results of modules that an engine hands out, against transformers' hidden states; keeping them changes no answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.errors import ConfigError, GraphError
from millrace.graph.graph_json import graph_table
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import last_logits

PROMPTS = [[5, 6, 7, 8, 9], [11, 12]]
KEPT = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.1.mlp.down_proj")


def engine(checkpoint: Path, out: Path, precision: str, keep: tuple[str, ...]) -> Engine:
    source = Source.from_checkpoint(Checkpoint.open(checkpoint))
    plan = plan_engine(source, BuildOptions(precision=precision_map(precision), max_batch=4, keep=keep))
    write_engine(source, plan, out, name="test")
    return Engine.open(out)


LAYERS = 3
ALL = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(LAYERS)), "model.norm")


def states_of_transformers(checkpoint: Path, dtype: str) -> dict[str, NDArray[np.float64]]:
    """(tokens, width) of all prompts, by module: what a hook on each sees."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    layers: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, i, out: layers.append(out[0] if isinstance(out, tuple) else out))
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in ALL}
    for prompt in PROMPTS:
        layers.clear()
        with torch.no_grad():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        # the last of transformers' is behind the final norm
        for name, state in zip(ALL, (states[0], *layers, states[-1]), strict=True):
            found[name].append(state.reshape(len(prompt), -1).double().numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_layers_are_as_transformers_has_them(family: str, precision: str, tmp_path: Path) -> None:
    """Every layer's, against float64: in FP32 by its rounding, in BF16 no further than transformers in bfloat16 is."""
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    checkpoint = random_checkpoint(
        tmp_path / "checkpoint", family, seed=9, dtype=dtype, num_hidden_layers=LAYERS, max_shard_size="8MB"
    )
    kept = engine(checkpoint, tmp_path / "kept", precision, ALL)
    executor = kept.executor(n_pages=8)
    last_logits(kept, executor, PROMPTS)
    exact = states_of_transformers(checkpoint, "float64")
    rounded = states_of_transformers(checkpoint, "bfloat16") if precision == "bf16" else exact
    for name in ALL:
        got, size = executor.output(name).astype(np.float64), np.abs(exact[name]).max()
        assert got.shape == exact[name].shape == (sum(map(len, PROMPTS)), 320)
        tolerance = max(np.abs(rounded[name] - exact[name]).max(), 1e-5 * size)
        assert np.abs(got - exact[name]).max() <= tolerance, name
        assert tolerance <= 0.05 * size, "what it is held to says something"
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


def test_any_value_is_kept_by_its_number(tmp_path: Path) -> None:
    """Each value that the graph's table numbers, fused away or not: and what is near agrees."""
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "llama", seed=9, num_hidden_layers=1)
    source = Source.from_checkpoint(Checkpoint.open(checkpoint))
    options = BuildOptions(precision=precision_map("fp32"), max_batch=4)
    traced = plan_engine(source, options).traced
    nodes = graph_table(traced)["nodes"]
    numbers = [str(n) for node in nodes for n in node["outputs"]]
    kept = engine(checkpoint, tmp_path / "kept", "fp32", tuple(numbers))
    executor = kept.executor(n_pages=8)
    logits = last_logits(kept, executor, PROMPTS)
    plain = engine(checkpoint, tmp_path / "plain", "fp32", ())
    again = plain.executor(n_pages=8)
    assert (last_logits(plain, again, PROMPTS) == logits).all()
    assert (executor.output(numbers[-1]).reshape(logits.shape) == logits).all(), "the last value is the logits"
    up, gate = (
        next(n for n, node in zip(numbers, nodes, strict=True) if f"mlp.{m}_proj" in str(node["origin"]))
        for m in ("up", "gate")
    )
    down = next(n for n, node in zip(numbers, nodes, strict=True) if "mlp.down_proj" in str(node["origin"]))
    u, g = (executor.output(n).astype(np.float64) for n in (up, gate))
    w = source.weights.load("model.layers.0.mlp.down_proj.weight").astype(np.float64)
    exact = (u * g / (1 + np.exp(-g))) @ w.T
    assert np.abs(executor.output(down) - exact).max() <= 1e-5 * np.abs(exact).max()
    for e in (executor, again):
        e.close()
    with pytest.raises(ConfigError, match="number of a value"):
        engine(checkpoint, tmp_path / "never", "fp32", (str(len(numbers) + 4),))


def test_two_outputs_of_one_name_are_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "llama", seed=9, num_hidden_layers=1)
    with pytest.raises(GraphError, match="2 outputs of the name"):
        engine(checkpoint, tmp_path / "never", "fp32", ("model.layers.0", "model.layers.0"))
