"""Copies of a GGUF file with its weights as floats, or as integers of another kind: other ways to the same model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from millrace.checkpoint.checkpoint import Checkpoint

FLOATS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Q8_0 = "Q8_0"


@contextmanager
def copies(path: Path) -> Iterator[dict[str, Path]]:
    """By name; in Q8_0 only where llama.cpp is installed, whose quantiser makes it. Gone when the block ends."""
    with TemporaryDirectory() as temporary:
        made = {name: copied(path, Path(temporary) / name, name) for name in FLOATS}
        if find_spec("llama_cpp") is not None and find_spec("gguf") is not None:
            made[Q8_0] = in_q8_0(path, Path(temporary))
        yield made


def copied(path: Path, folder: Path, dtype: str) -> Path:
    """`folder`, made a checkpoint with the weights of a GGUF file as floats. dtype: of `FLOATS`"""
    checkpoint, kind = Checkpoint.open(path), FLOATS[dtype]
    folder.mkdir()
    for name, content in checkpoint.files.items():
        (folder / name).write_bytes(content)
    c = checkpoint.decoder
    config = {
        "architectures": [c.architecture], "model_type": c.family, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "vocab_size": c.vocab_size, "max_position_embeddings": c.max_context,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope.theta, "tie_word_embeddings": c.tie_embeddings,
        "hidden_act": "silu", "torch_dtype": dtype, "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: checkpoint.tensors.load(name).astype(np.float32).astype(kind) for name in checkpoint.tensors}
    save_file(tensors, folder / "model.safetensors")
    return folder


def in_q8_0(path: Path, folder: Path) -> Path:
    """A GGUF file in `folder`, by way of float32, which stays beside it."""
    from benchmarks.peers.gguf_file import quantise

    plain, out = folder / "f32.gguf", folder / "q8_0.gguf"
    quantise(path, plain, "F32")
    quantise(plain, out, Q8_0)
    return out
