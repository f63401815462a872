"""Networks that are no language model, of random weights: a small MLP and a small encoder, with inputs for them."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.model import ops
from millrace.model.bert import BertSentences
from millrace.model.layers import LayerNorm, Linear
from millrace.model.module import Module, Signature
from millrace.model.tensor import Tensor

Arrays = dict[str, NDArray[Any]]
IMAGES = {"images": Bounds(1, 8, 40)}


class Digits(Module):
    """An MLP with two outputs: what it sees, and what it saw on the way."""

    signature = Signature({"pixels": ("images", 49), "weights": ("images", 10)}, ("scores", "hidden"))

    def __init__(self) -> None:
        self.norm = LayerNorm(49, 1e-5)
        self.one, self.two = Linear(49, 30, bias=True), Linear(30, 10, bias=True)

    def forward(self, pixels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        hidden = ops.gelu(self.one(self.norm(pixels)))
        return self.two(hidden) * weights, hidden


def parameters(model: Module, seed: int = 3) -> Arrays:
    rng, found = np.random.default_rng(seed), {}
    for name, p in model.parameters():
        shape = tuple(d for d in p.shape if isinstance(d, int))
        noise = rng.standard_normal(shape).astype(np.float32)
        norm = name.endswith("norm.weight") or name.endswith("LayerNorm.weight")
        found[name] = 1 + 0.2 * noise if norm else noise * np.float32(1.3 / np.sqrt(shape[-1]))
    return found


def network(model: Module, out: Path, precision: str = "fp32", profile: Any = None, **options: Any) -> Engine:
    source = Source.from_module(model, parameters(model))
    asked = BuildOptions(precision=precision_map(precision, 32), profile=profile or {}, **options)
    write_engine(source, plan_engine(source, asked), out, name="test")
    return Engine.open(out)


def pixels(n: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng([seed, n])
    return {
        "pixels": rng.standard_normal((n, 49)).astype(np.float32),
        "weights": rng.standard_normal((n, 10)).astype(np.float32),
    }


SMALL = EncoderConfig(
    architecture="BertModel",
    vocab_size=97, hidden_size=96, intermediate_size=200, n_layers=2, n_heads=3, max_positions=300, n_types=2,
    norm_eps=1e-12, activation="gelu",
)  # fmt: skip
LENGTHS = (1, 64, 3, 65, 300, 17, 2)


def texts(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SMALL.vocab_size, n).astype(np.int32) for n in lengths]


def packed(found: list[NDArray[np.int32]]) -> Arrays:
    tokens = np.concatenate(found)
    return {
        "tokens": tokens, "types": np.zeros_like(tokens), "lengths": np.array([len(t) for t in found], np.int32),
        "positions": np.concatenate([np.arange(len(t), dtype=np.int32) for t in found]),
    }  # fmt: skip


def encoder(out: Path, precision: str, **options: Any) -> Engine:
    return network(BertSentences(SMALL), out, precision, max_step_tokens=512, max_batch=8, **options)
