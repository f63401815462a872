"""Models of a given shape with random weights: for measurements, which depend on shapes and formats only."""

import zlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.compile.source import Source, with_context
from millrace.model.families import build_model
from millrace.model.module import Weights

SPREAD = 0.02  # standard deviation of the weights


def source_of(config: ModelConfig | EncoderConfig) -> Source:
    """Return a source of normal weights, with norms at 1; each tensor has its own seed, and is drawn on demand."""
    model = build_model(config)
    sizes = {
        n: tuple(d for d in p.stored_shape if isinstance(d, int)) for n, p in model.parameters() if "rotary" not in n
    }

    def load(name: str) -> NDArray[np.float32]:
        if name.lower().endswith("norm.weight"):
            return np.ones(sizes[name], np.float32)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return rng.standard_normal(sizes[name], np.float32) * np.float32(SPREAD)

    return Source(
        module=model, weights=Weights(sizes, load), max_context=config.max_context, vocab_size=config.vocab_size,
        architecture=config.architecture, dtype=config.dtype,
    )  # fmt: skip


def random_source(checkpoint: Checkpoint, max_context: int | None) -> Source:
    """Return a source for a folder without weights. raises ConfigError for a context beyond the model's"""
    return replace(
        source_of(with_context(checkpoint.config, max_context)), identity=checkpoint.identity,
        eos_token_ids=checkpoint.eos_token_ids, bos_token_id=checkpoint.bos_token_id, notes=checkpoint.notes,
        files=lambda: checkpoint.files,
    )  # fmt: skip
