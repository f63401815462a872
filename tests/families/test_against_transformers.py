"""Every family on random checkpoints of odd sizes: as close to float64 as transformers' own run in the same type."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.engines import build, last_logits
from tests.support.tolerance import assert_no_worse

torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="the independent truth")

LENGTHS = (1, 17, 64, 70)


def truth(folder: Path, dtype: Any, prompts: list[list[int]]) -> NDArray[np.float64]:
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    with torch.no_grad():
        rows = [model(torch.tensor([p])).logits[0, -1].double().numpy() for p in prompts]
    return np.stack(rows)


def random_prompts(seed: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 10))])
@pytest.mark.parametrize("precision, dtype", [("fp32", "float32"), ("bf16", "bfloat16")])
def test_logits(family: str, seed: int, precision: str, dtype: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", family, seed, dtype=dtype)
    engine = build(folder, tmp_path / "engine", precision)
    prompts = random_prompts(seed, engine.manifest.vocab_size)
    executor = engine.executor(n_pages=16)
    ours = last_logits(engine, executor, prompts)
    executor.close()
    exact = truth(folder, torch.float64, prompts)
    theirs = truth(folder, getattr(torch, dtype), prompts)
    for row in range(len(prompts)):
        assert_no_worse(ours[row], theirs[row], exact[row])


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip  a base so small that all three kinds of waves are among 32: kept, stretched, and between


@pytest.mark.parametrize("precision, dtype", [("fp32", "float32"), ("bf16", "bfloat16")])
def test_llama_3_scaling_beyond_the_original_context(precision: str, dtype: str, tmp_path: Path) -> None:
    """Prompts up to four times as long. Farther out transformers' angles, of float32 in every type, are no truth."""
    folder = random_checkpoint(tmp_path / "checkpoint", "llama", seed=8, dtype=dtype, rope_parameters=LLAMA3)
    engine = build(folder, tmp_path / "engine", precision)
    prompts = random_prompts(8, engine.manifest.vocab_size)
    executor = engine.executor(n_pages=16)
    ours = last_logits(engine, executor, prompts)
    executor.close()
    exact, theirs = truth(folder, torch.float64, prompts), truth(folder, getattr(torch, dtype), prompts)
    for row in range(len(prompts)):
        assert_no_worse(ours[row], theirs[row], exact[row])
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": LLAMA3["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert np.abs(truth(folder, torch.float64, prompts) - exact).max() > 1, "without the scaling it is another model"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [
    "fp32", "bf16", "w8a8", "w4a8",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("w8a16", "w4a16", "fp8a16")),
])  # fmt: skip
def test_fusing_changes_nothing(family: str, precision: str, tmp_path: Path) -> None:
    """The fused program gives the bits of the plain one-to-one lowering."""
    folder = random_checkpoint(tmp_path / "checkpoint", family, seed=3)
    fused, plain = (build(folder, tmp_path / str(f), precision, fuse=f, group=32) for f in (True, False))
    prompts = random_prompts(3, fused.manifest.vocab_size)
    logits = []
    for engine in (fused, plain):
        executor = engine.executor(n_pages=16)
        logits.append(last_logits(engine, executor, prompts))
        executor.close()
    assert fused.manifest.cpu.n_calls < plain.manifest.cpu.n_calls
    assert (logits[0] == logits[1]).all()
