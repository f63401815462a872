"""A language model whose attention is of several kinds: each has a cache of its own, all share the pages' numbers."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.lower_cpu.program_builder import lower
from millrace.compile.passes.pipeline import pipeline, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import CacheSpec, KvFormat
from millrace.engine.executor import ExecutionError, ExecutorLimits, StepInputs
from millrace.engine.native.executor import NativeExecutor
from millrace.engine.reference.executor import ReferenceExecutor
from millrace.errors import ConfigError, GraphError
from millrace.kernels.catalogue import operators
from millrace.kernels.library import usable_isas
from millrace.model import ops
from millrace.model.layers import Embedding, Linear, RMSNorm, rotary_table
from millrace.model.module import DECODER, I32, Module, ModuleList, Signature, Table, trace_model
from millrace.model.tensor import Tensor
from tests.support.engines import last_logits, prompts_as_step

WIDTH, VOCAB, N_ADAPTERS = 64, 50, 2


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


class Adapted(Mixed):
    """With a bias for each adapter, 0 of which is none, in front of the first layer."""

    signature = Signature({**DECODER.inputs, "adapters": ("T",)}, ("logits",), {**DECODER.dtypes, "adapters": I32})

    def __init__(self) -> None:
        super().__init__()
        self.biases = Embedding(N_ADAPTERS + 1, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor, *more: Tensor) -> Tensor:
        (adapters,) = more
        x = self.one(self.embed(tokens) + self.biases(adapters), positions, lengths)
        return self.head(ops.gather_rows(self.norm(x), rows))


class Shared(Module):
    """Layers two and three read the cache of layer one; with `apart`, each computes and keeps the same keys itself."""

    signature = DECODER

    def __init__(self, window: int = 0, *, apart: bool = False) -> None:
        self._window, self._apart = window, apart
        self.embed, self.k, self.v = Embedding(VOCAB, WIDTH), Linear(WIDTH, 2 * 16), Linear(WIDTH, 2 * 16)
        self.q = ModuleList([Linear(WIDTH, 4 * 16) for _ in range(3)])
        self.out = ModuleList([Linear(4 * 16, WIDTH) for _ in range(3)])
        self.norm, self.head, self.table = (
            RMSNorm(WIDTH, 1e-5),
            Linear(WIDTH, VOCAB),
            rotary_table(RopeConfig(theta=1e4), 16, 256),
        )

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        T = x.shape[0]

        def keys() -> tuple[Tensor, Tensor]:
            rotated = ops.rope(self.k(first).reshape(T, 2, 16), positions, self.table)
            return rotated, self.v(first).reshape(T, 2, 16)

        k, v = keys()
        for q, out in zip(self.q, self.out, strict=True):
            k, v = keys() if self._apart else (k, v)
            rotated = ops.rope(q(self.norm(x)).reshape(T, 4, 16), positions, self.table)
            y = ops.attention(rotated, k, v, positions, lengths, window=self._window)
            x = x + out(y.reshape(T, 4 * 16))
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


def mixed(model: Module | None = None) -> Source:
    """Random weights."""
    rng, model = np.random.default_rng(4), model or Mixed()
    shapes = {name: tuple(d for d in p.shape if isinstance(d, int)) for name, p in model.parameters()
              if not isinstance(p, Table)}  # fmt: skip
    weights = {n: (rng.standard_normal(s) * 1.5 / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}
    return Source.from_module(model, weights, max_context=256)


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


def ran(executor: NativeExecutor, step: StepInputs) -> NDArray[np.float32]:
    """(S, V): the logits behind each sequence's last token."""
    executor.run(step)
    return executor.output("logits").astype(np.float32)


def test_each_sequence_has_its_adapter(tmp_path: Path) -> None:
    """Beside the reference, and the same bits as in steps of their own; without adapters all have none."""
    source = mixed(Adapted())
    options = BuildOptions(precision=precision_map("fp32", 16), max_batch=4, kv_format=KvFormat.F32)
    plan = plan_engine(source, options)
    write_engine(source, plan, tmp_path / "adapted", name="adapted")
    executor = Engine.open(tmp_path / "adapted").executor(n_pages=8)
    assert executor.limits.n_adapters == N_ADAPTERS
    prompts, numbers = [[1, 2, 3], [1, 2, 3], list(range(40)), [1, 2, 3]], np.array([1, 0, 2, 2], np.int32)
    step = replace(prompts_as_step(prompts), adapters=numbers)
    together = ran(executor, step)
    graph = run_passes(trace_model(source.module, source.weights, operators()), pipeline(precision_map("fp32", 16)))
    exact = ReferenceExecutor(graph, executor.limits, kv=KvFormat.F32, bf16_table=False)
    np.testing.assert_allclose(together, exact.logits(step), rtol=1e-4, atol=1e-4)
    for i, prompt in enumerate(prompts):
        own = replace(prompts_as_step([prompt]), adapters=numbers[i : i + 1])
        np.testing.assert_array_equal(ran(executor, own)[0], together[i])
    np.testing.assert_array_equal(ran(executor, prompts_as_step([prompts[1]]))[0], together[1])
    assert len({row.tobytes() for row in together}) == 4
    with pytest.raises(ExecutionError, match="an adapter that does not exist"):
        executor.run(replace(step, adapters=numbers + 1))
    with pytest.raises(ExecutionError, match="adapters has 3 elements, not 4"):
        executor.run(replace(step, adapters=numbers[:3]))
    executor.close()


class Probable(Mixed):
    """Gives probabilities: sizes of their values are made of the number of rows."""

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        return ops.softmax(super().forward(tokens, positions, lengths, rows))


def test_chunks_that_draw_nothing(tmp_path: Path) -> None:
    """Of a network with operators behind its head: no size may be 0."""
    source = mixed(Probable())
    plan = plan_engine(source, BuildOptions(precision=precision_map("fp32", 16), max_batch=4, kv_format=KvFormat.F32))
    write_engine(source, plan, tmp_path / "probable", name="probable")
    with closing(Engine.open(tmp_path / "probable").executor(n_pages=8)) as executor:
        whole = prompts_as_step([[1, 2, 3, 4, 5]])
        expected = ran(executor, whole)
        first = replace(
            whole, tokens=whole.tokens[:3], positions=whole.positions[:3], starts=np.array([0, 3], np.int32),
            sampling=whole.sampling[:0],
        )  # fmt: skip
        executor.run(first)
        sampling = whole.sampling.copy()
        sampling["token"] = 1
        rest = replace(whole, tokens=whole.tokens[3:], positions=whole.positions[3:], sampling=sampling,
                       starts=np.array([0, 2], np.int32))  # fmt: skip
        np.testing.assert_array_equal(ran(executor, rest), expected)


@pytest.mark.parametrize(("window", "kv"), [(0, KvFormat.F32), (0, KvFormat.INT8), (20, KvFormat.F32)])
def test_layers_that_read_another_layers_cache(window: int, kv: KvFormat, tmp_path: Path) -> None:
    """The bits of layers that keep the same keys themselves, in a third of the memory; prompts and decode steps."""
    found, page_bytes, prompts = list[NDArray[np.float32]](), list[int](), [list(range(50)), [7, 8, 9]]
    for apart in (False, True):
        source, name = mixed(Shared(window, apart=apart)), f"apart-{apart}"
        options = BuildOptions(precision=precision_map("fp32", 16), max_batch=4, max_step_tokens=256, kv_format=kv)
        plan = plan_engine(source, options)
        write_engine(source, plan, tmp_path / name, name=name)
        engine = Engine.open(tmp_path / name)
        page_bytes.append(engine.page_bytes)
        with closing(engine.executor(n_pages=8)) as executor:
            found.append(last_logits(engine, executor, prompts))
            step = prompts_as_step([[5], [6]])
            later = replace(step, positions=np.array([len(p) for p in prompts], np.int32))
            found.append(ran(executor, later))
            exact = ReferenceExecutor(
                run_passes(trace_model(source.module, source.weights, operators()), pipeline(plan.precision)),
                executor.limits, kv=kv, bf16_table=False,
            )  # fmt: skip
            for given, ours in ((prompts_as_step(prompts), found[-2]), (later, found[-1])):
                expected = exact.logits(given)
                assert np.abs(ours - expected).max() <= (1e-5 if kv == KvFormat.F32 else 0.02) * np.abs(expected).max()
    assert page_bytes[1] == 3 * page_bytes[0]
    for shared, apart_ in zip(found[:2], found[2:], strict=True):
        np.testing.assert_array_equal(shared, apart_)


def test_layers_share_a_cache_for_the_same_keys_alone() -> None:
    traced = trace_model(Mixed(), mixed().weights, operators())
    graph = run_passes(traced, pipeline(precision_map("fp32", 16)))
    nodes = [node for node in graph.nodes if node.op == "attention"]
    nodes[2].attrs["layer"] = nodes[0].attrs["layer"]  # type: ignore[index]
    with pytest.raises(GraphError, match="attention in one and in three share a cache for different keys"):
        lower(graph, {s: Bounds(1, 2, 4) for s in graph.symbols}, KvFormat.F32, "f32")


def test_an_engine_without_adapters_refuses_them(source: Source, tmp_path: Path) -> None:
    write_engine(source, plan_engine(source, BuildOptions(max_batch=4)), tmp_path / "mixed", name="mixed")
    executor = Engine.open(tmp_path / "mixed").executor(n_pages=8)
    assert executor.limits.n_adapters == 0
    with pytest.raises(ExecutionError, match="an adapter that does not exist"):
        executor.run(replace(prompts_as_step([[1, 2]]), adapters=np.array([1], np.int32)))
    executor.close()
