"""Every family that arranges known layers in another way, against transformers on random checkpoints."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from millrace import LLM, SamplingParams
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from tests.engine.test_reference import assert_agree
from tests.support.checkpoints import EXPERT_FAMILIES, LATER_FAMILIES, random_checkpoint
from tests.support.engines import build, last_logits
from tests.support.tolerance import assert_no_worse

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("stablelm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 50, "attention_bias": True, "mlp_bias": True}),
    ("olmo3", {"layer_types": None, "num_hidden_layers": 4, "rope_parameters": None}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("starcoder2", {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False}),
    ("cohere2", {"layer_types": None, "num_hidden_layers": 4}),
]
CASES = [
    *(pytest.param(family, {}, id=family) for family in (*LATER_FAMILIES, *EXPERT_FAMILIES)),
    *(pytest.param(*variant, id=f"{variant[0]} {i}", marks=pytest.mark.nightly) for i, variant in enumerate(VARIANTS)),
]


def model(folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    plain: dict[str, Any] = {"experts_implementation": "eager"}  # the others take no float64
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    loaded.set_attn_implementation("eager")
    return loaded.eval()


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_and_tokens_are_those_of_transformers(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of one token, and of more than windows and original contexts; float32 as close as PyTorch's own."""
    folder = random_checkpoint(tmp_path / "checkpoint", family, seed=3, **overrides)
    engine = build(folder, tmp_path / "engine", "fp32", max_step_tokens=512)
    exact, plain = model(folder, torch.float64), model(folder, torch.float32)
    rng = np.random.default_rng(0)
    # transformers' LongRoPE depends on the sequence; an engine's on its context, which is longer than the original one
    lengths = (65, 100, 450) if family == "phi3" else (1, 30, 450)
    prompts = [rng.integers(3, 1003, n).tolist() for n in lengths]
    with closing(engine.executor(n_pages=16)) as executor:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.no_grad():
                truth, theirs = (m(ids).logits[0, -1].double().numpy() for m in (exact, plain))
            # transformers computes angles in float32 in both: they are wrong by up to half an ulp of the position
            ulps = 16 + len(prompt) / 2
            assert_no_worse(last_logits(engine, executor, [prompt])[0], theirs, truth, factor=3.0, ulps=ulps)
    generated = exact.generate(
        torch.tensor([prompts[1]]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with LLM(str(tmp_path / "engine")) as llm:
        (output,) = llm.generate(
            [{"prompt_token_ids": prompts[1]}], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
    assert list(output.outputs[0].token_ids) == generated[0, len(prompts[1]) :].tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*LATER_FAMILIES, *EXPERT_FAMILIES])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8", "w4a8"])
def test_the_native_executor_agrees_with_the_reference(family: str, precision: str, tmp_path: Path) -> None:
    assert_agree(random_checkpoint(tmp_path / "checkpoint", family, seed=5), precision, tmp_path)


def test_longrope_in_an_engine_for_the_original_context(tmp_path: Path) -> None:
    """It has the short factors, as transformers has them for short sequences."""
    folder = random_checkpoint(tmp_path / "checkpoint", "phi3", seed=3)
    source = Source.from_checkpoint(Checkpoint.open(folder), 64)
    write_engine(source, plan_engine(source, BuildOptions()), tmp_path / "engine", name="phi3")
    exact, plain, prompt = model(folder, torch.float64), model(folder, torch.float32), list(range(5, 60))
    with closing(Engine.open(tmp_path / "engine")) as engine, closing(engine.executor(n_pages=4)) as executor:
        with torch.no_grad():
            truth, theirs = (m(torch.tensor([prompt])).logits[0, -1].double().numpy() for m in (exact, plain))
        assert_no_worse(last_logits(engine, executor, [prompt])[0], theirs, truth, factor=3.0, ulps=48)
