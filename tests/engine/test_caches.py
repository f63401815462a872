"""A language model whose attention is of several kinds: each has a cache of its own, all share the pages' numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.pipeline import pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.engine import Engine
from millrace.engine.executor import ExecutorLimits
from millrace.engine.kv import CacheSpec, KvFormat
from millrace.engine.reference import ReferenceExecutor
from millrace.errors import ConfigError, GraphError
from millrace.kernels.catalogue import operators
from millrace.kernels.library import usable_isas
from millrace.model import ops
from millrace.model.layers import Embedding, Linear, RMSNorm
from millrace.model.module import DECODER, Module, trace_model
from millrace.model.tensor import Tensor
from tests.support.engines import last_logits, prompts_as_step

WIDTH, VOCAB = 64, 50


class Attention(Module):
    """H query heads and K heads of keys of D and values of V."""

    def __init__(self, heads: int, kv_heads: int, size: int, value_size: int) -> None:
        self._shapes = (heads, size), (kv_heads, size), (kv_heads, value_size)
        self.q, self.k, self.v = (Linear(WIDTH, n * d) for n, d in self._shapes)
        self.out = Linear(heads * value_size, WIDTH)
        self.norm = RMSNorm(WIDTH, 1e-5)

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        T, y = x.shape[0], self.norm(x)
        q, k, v = (p(y).reshape(T, *s) for p, s in zip((self.q, self.k, self.v), self._shapes, strict=True))
        found = ops.attention(q, k, v, positions, lengths)
        _, heads, size = found.shape
        assert isinstance(heads, int) and isinstance(size, int)
        return x + self.out(found.reshape(T, heads * size))


class Mixed(Module):
    signature = DECODER

    def __init__(self) -> None:
        self.embed = Embedding(VOCAB, WIDTH)
        self.one, self.two = Attention(4, 2, 16, 16), Attention(2, 1, 32, 24)
        self.three, self.four = Attention(4, 2, 16, 16), Attention(3, 3, 8, 40)
        self.norm, self.head = RMSNorm(WIDTH, 1e-5), Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in (self.one, self.two, self.three, self.four):
            x = layer(x, positions, lengths)
        return self.head(ops.gather_rows(self.norm(x), rows))


class Elsewhere(Mixed):
    """Attention is given something else in the place of the step's own numbers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        given = {"positions": (tokens, lengths), "lengths": (positions, rows)}[self._what]
        x = self.one(self.embed(tokens), *given)
        return self.head(ops.gather_rows(self.norm(x), rows))


@pytest.mark.parametrize("what", ["positions", "lengths"])
def test_attention_means_the_inputs_of_these_names(what: str) -> None:
    """Its kernel takes both from the step: a graph that means another value would be computed as if it did not."""
    weights = {n: np.zeros([d for d in p.shape if isinstance(d, int)], np.float32) for n, p in Mixed().parameters()}
    with pytest.raises(GraphError, match=f'the input "{what}"|the input "lengths"'):
        plan_engine(Source.from_module(Elsewhere(what), weights, max_context=64), BuildOptions(max_batch=4))


def mixed() -> Source:
    """Random weights."""
    rng = np.random.default_rng(4)
    shapes = {name: tuple(d for d in p.shape if isinstance(d, int)) for name, p in Mixed().parameters()}
    weights = {n: (rng.standard_normal(s) * 1.5 / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}
    return Source.from_module(Mixed(), weights, max_context=256)


@pytest.fixture
def source() -> Source:
    return mixed()


def test_a_language_model_has_a_context(source: Source) -> None:
    with pytest.raises(ConfigError, match="sequences of 0 tokens"):
        plan_engine(replace(source, max_context=0), BuildOptions())


@pytest.mark.parametrize(
    ("precision", "kv"),
    [
        ("fp32", KvFormat.F32),
        ("fp32", KvFormat.BF16),
        ("w8a8", KvFormat.INT8),
        ("fp32", KvFormat.FP8),
        ("fp32", KvFormat.INT4),
    ],
)
def test_several_kinds_of_attention(source: Source, precision: str, kv: KvFormat, tmp_path: Path) -> None:
    options = BuildOptions(precision=precision_map(precision, 16), max_batch=4, max_step_tokens=256, kv_format=kv)
    plan = plan_engine(source, options)
    write_engine(source, plan, tmp_path / "mixed", name="mixed")
    engine = Engine.open(tmp_path / "mixed")
    shared = {"format": kv}
    assert engine.caches == (
        CacheSpec(layers=2, heads=2, key_size=16, value_size=16, **shared),
        CacheSpec(layers=1, heads=1, key_size=32, value_size=24, **shared),
        CacheSpec(layers=1, heads=3, key_size=8, value_size=40, **shared),
    )
    assert engine.page_bytes == sum(c.page_bytes() for c in engine.caches)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 70, 33)]
    limits = ExecutorLimits(256, 4, 4, 256, 64, 16, VOCAB)
    graph = run_passes(trace_model(source.module, source.weights, operators()), pipeline(plan.precision))
    exact = ReferenceExecutor(graph, limits, kv=kv, bf16_table=precision != "fp32").logits(prompts_as_step(prompts))
    tolerance = (2e-6 if (precision, kv) == ("fp32", KvFormat.F32) else 0.02) * np.abs(exact).max()
    for isa in usable_isas():
        executor = engine.executor(n_pages=16, isa=isa)
        together = last_logits(engine, executor, prompts)
        assert np.abs(together - exact).max() <= tolerance
        alone = np.concatenate([last_logits(engine, executor, [p]) for p in prompts])
        assert (alone == together).all()
        executor.close()
