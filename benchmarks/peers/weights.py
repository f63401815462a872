"""The weights that all engines get: a configuration, and a way to load each tensor by its Hugging Face name.

Random ones in a real model's shape, or a real model's from a GGUF file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.workloads import CONTEXT
from benchmarks.shapes import SHAPES, random_source
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.graph.types import Array


@dataclass(frozen=True, slots=True)
class NamedWeights:
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    load: Callable[[str], Array]
    file: Path | None = None  # the GGUF that they are from

    @classmethod
    def named(cls, subject: str) -> "NamedWeights":
        """subject: one of `benchmarks.shapes`, or the path of a GGUF file"""
        if subject in SHAPES:
            return cls.random(subject)
        checkpoint = Checkpoint.open(Path(subject))
        found = cls.of(checkpoint)
        return cls(found.config, found.shapes, found.load, checkpoint.folder)

    @classmethod
    def random(cls, shape: str) -> "NamedWeights":
        """Of one of `benchmarks.shapes`; each tensor from a seed of its own, so every process makes the same."""
        weights = random_source(shape, CONTEXT).weights
        return cls(SHAPES[shape], weights.shapes, weights.load)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "NamedWeights":
        tensors = checkpoint.tensors
        return cls(checkpoint.decoder, {name: info.shape for name, info in tensors.items()}, tensors.load)


def multiply_operations(config: ModelConfig) -> float:
    """Operations of the matrix products of one token, without the head (it runs for sampled rows only)."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    width = c.intermediate_size if c.experts is None else c.experts.routing.chosen * c.experts.size
    return 2.0 * c.n_layers * (attention + 3 * c.hidden_size * width)
