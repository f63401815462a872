"""Checkpoints that tie the head by config.json and store one of the two tensors, both, or two that differ.

The truth is transformers: which logits it computes for the same folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from millrace import LLM, SamplingParams
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.weights.tied_head import EMBEDDING_WEIGHT, HEAD_WEIGHT
from millrace.cli.main import cli
from tests.support.checkpoints import random_checkpoint

Change = Callable[[dict[str, Any]], None]


def rolled(tensors: dict[str, Any]) -> None:
    tensors[HEAD_WEIGHT] = np.roll(tensors[EMBEDDING_WEIGHT], 1, 0)


def last_value(tensors: dict[str, Any]) -> None:
    tensors[HEAD_WEIGHT] = tensors[EMBEDDING_WEIGHT].copy()
    tensors[HEAD_WEIGHT][-1, -1] += 4.0


def equal(tensors: dict[str, Any]) -> None:
    tensors[HEAD_WEIGHT] = tensors[EMBEDDING_WEIGHT].copy()


def head_alone(tensors: dict[str, Any]) -> None:
    tensors[HEAD_WEIGHT] = tensors.pop(EMBEDDING_WEIGHT)


def other_dtype(tensors: dict[str, Any]) -> None:
    tensors[HEAD_WEIGHT] = np.roll(tensors[EMBEDDING_WEIGHT], 3, 0).astype(ml_dtypes.bfloat16)


def make(folder: Path, family: str, change: Change) -> Path:
    """Write a checkpoint with tie_word_embeddings true, whose tensors are then changed."""
    random_checkpoint(folder, family, seed=5, max_shard_size="1GB", tie_word_embeddings=True)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("change", [rolled, last_value, equal, head_alone, other_dtype], ids=lambda c: c.__name__)
def test_the_head_is_the_one_that_transformers_uses(tmp_path: Path, family: str, change: Change) -> None:
    import torch
    import transformers

    folder = make(tmp_path / "model", family, change)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = model.get_output_embeddings().weight.detach().numpy()
    opened = Checkpoint.open(folder)
    used = EMBEDDING_WEIGHT if opened.decoder.tie_embeddings else HEAD_WEIGHT
    np.testing.assert_array_equal(opened.tensors.load(used).astype(np.float32), theirs)
    embedding = model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(opened.tensors.load(EMBEDDING_WEIGHT).astype(np.float32), embedding)
    differs = change in (rolled, last_value, other_dtype)
    assert opened.decoder.tie_embeddings is not differs
    assert any(HEAD_WEIGHT in note and "tie_word_embeddings" in note for note in opened.notes) is differs


@pytest.mark.parametrize("change", [rolled, head_alone], ids=lambda c: c.__name__)
def test_tokens_are_those_of_transformers(tmp_path: Path, change: Change) -> None:
    import torch
    import transformers

    folder = make(tmp_path / "model", "llama", change)
    prompt = [5, 17, 301, 88]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    with LLM(folder, precision="fp32", tune=0) as llm:
        asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], asked)
    assert list(answer.outputs[0].token_ids) == theirs[0, len(prompt) :].tolist()


def test_a_stored_tensor_that_is_not_used_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "llama", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq":
                                                                   np.ones(32, np.float32)}))  # fmt: skip
    (note,) = Checkpoint.open(folder).notes
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" in note


@pytest.mark.parametrize("change", [rolled, equal], ids=lambda c: c.__name__)
def test_a_compressed_checkpoint_does_not_contradict_itself(tmp_path: Path, change: Change) -> None:
    """Other tools would tie the head that it stores."""
    folder = make(tmp_path / "model", "llama", change)
    asked = ["compress", str(folder), "-o", str(tmp_path / "out"), "--recipe", "int8-wo", "--no-evaluate"]
    assert CliRunner().invoke(cli, asked).exit_code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is (change is equal)
    opened = Checkpoint.open(tmp_path / "out")
    assert opened.decoder.tie_embeddings is (change is equal) and not opened.notes
