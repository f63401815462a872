"""Paged attention against the whole softmax in float64, around pages and spans, and its promise of equal bits."""

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.engine.cache_specs import CacheSpec, KvFormat
from millrace.engine.executor import SAMPLING, StepInputs
from millrace.engine.native.executor import NativeExecutor, NativeProgram
from millrace.graph.types import Symbol
from millrace.kernels.attention.ref import ROUNDINGS, ScoreRules, attention, to_fp8, to_int4, to_int8, transformed
from millrace.kernels.catalogue import kernels
from millrace.kernels.declare import MAX_KNOBS, Space
from millrace.kernels.encode import Ref, encode
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import BF16_BY_TILES
from tests.support.emulated_amx import EMULATED
from tests.support.engines import prompts_as_step
from tests.support.one_step import Machine, as_bytes, i32
from tests.support.tolerance import assert_no_worse

F32 = NDArray[np.float32]
LONG = 530  # three spans of 256, the last a short one
Format = KvFormat | str
FORMATS = (*KvFormat, BF16_BY_TILES)
CODES = (KvFormat.INT8, KvFormat.INT4)  # which are read as integers
LATER = (KvFormat.FP8, KvFormat.INT4)  # which share most of their code with bfloat16 and int8


def crossed(
    *axes: Iterable[Any],
    often: Callable[..., bool] = lambda *_: True,
    seldom: Callable[..., bool] = lambda *_: False,
) -> list[Any]:
    """Every format with everything. The night has what is `seldom`, and of the later ones what `often` does not say."""
    return [
        pytest.param(
            format, *rest, marks=pytest.mark.nightly if seldom(*rest) or (format in LATER and not often(*rest)) else ()
        )
        for format, *rest in itertools.product(FORMATS, *axes)
    ]


def kept(format: Format) -> KvFormat:
    return format if isinstance(format, KvFormat) else KvFormat.BF16


def head(format: Format) -> int:
    """A size of which tiles take the whole, and everything else a part of a vector."""
    return 32 if format == BF16_BY_TILES else 24


@dataclass
class Pages:
    """An executor with one attention layer: give it q, k, v of some tokens, get y."""

    heads: int
    kv_heads: int
    size: int
    format: Format
    machine: Machine
    max_tokens: int = LONG
    value_size: int | None = None  # None: as large as a key
    window: int = 0

    def __post_init__(self) -> None:
        tokens, value = self.max_tokens, self.value_size or self.size
        widths = (self.heads * self.size, self.kv_heads * self.size, self.kv_heads * value, self.heads * value)
        self._at = np.cumsum([0, *(4 * tokens * w for w in widths)])
        refs = [Ref(Space.ACTIVATIONS, int(offset)) for offset in self._at]
        shape = {
            "rows": 0,
            "kv_heads": self.kv_heads,
            "head_dim": self.size,
            "value_dim": value,
            "cache": 0,
            "layer": 0,
        }
        rope = {
            **shape, "heads": 0, "q_stride": 0, "k_stride": widths[1], "v_stride": widths[2], "context": 4096,
            "rotary_dim": self.size, "interleaved": 0,
        }  # fmt: skip
        attend = {
            **shape,
            "heads": self.heads,
            "q_stride": widths[0],
            "causal": 1,
            "window": self.window,
            "scale": self.size**-0.5,
            "y_stride": widths[3],
            "tiles": int(self.format == BF16_BY_TILES),
        }
        calls = encode("rope", {"k": refs[1], "v": refs[2]}, rope) + encode(
            "attention", {"q": refs[0], "y": refs[3]}, attend
        )
        cache = CacheSpec(
            layers=1, heads=self.kv_heads, key_size=self.size, value_size=value, format=kept(self.format),
            window=self.window,
        )  # fmt: skip
        program = NativeProgram(
            calls=calls, n_calls=2, weights=np.zeros(64, np.uint8), weights_bytes=64,
            activation_bytes=int(self._at[-1]), symbols={Symbol("T"): tokens, Symbol("S"): 4, Symbol("R"): 4},
            caches=(cache,),
        )  # fmt: skip
        self.executor = NativeExecutor(
            program, n_pages=64, max_context=4096, vocab_size=16, threads=self.machine.threads, isa=self.machine.isa
        )

    def __call__(self, q: F32, k: F32, v: F32, step: StepInputs) -> F32:
        memory = self.executor.activations()
        for array, offset in zip((q, k, v), self._at, strict=False):
            memory[offset : offset + array.nbytes] = as_bytes(array)
        self.executor.run(step)
        shape = (*q.shape[:2], v.shape[2])
        return memory[self._at[3] :][: 4 * int(np.prod(shape))].view(np.float32).reshape(shape).copy()


def one_sequence(first: int, count: int, pages: list[int]) -> StepInputs:
    """Tokens at positions first .. first+count-1 of one sequence."""
    return several([(first, count, pages)])


def several(sequences: list[tuple[int, int, list[int]]]) -> StepInputs:
    """Of each sequence (first, count, pages)."""
    counts = [count for _, count, _ in sequences]
    plain = replace(prompts_as_step([[0] * sum(counts)]), sampling=np.zeros(0, SAMPLING))
    return StepInputs(
        plain.tokens, i32([p for first, n, _ in sequences for p in range(first, first + n)]),
        i32(np.cumsum([0, *counts])), i32([p for _, _, pages in sequences for p in pages]),
        i32(np.cumsum([0, *(len(pages) for _, _, pages in sequences)])), plain.sampling,
        plain.history, plain.bias_ids, plain.bias_values,
    )  # fmt: skip


@pytest.mark.parametrize("size", [8, 24, 64, 136])
def test_what_codes_lose(size: int) -> None:
    """Each within half a step of its code; a Hadamard transform changes no product of queries and keys."""
    rng = np.random.default_rng([17, size])
    x = rng.standard_normal((50, 3, size)) * np.exp(rng.standard_normal(size) * 2)
    x[0], x[1], x[2, 0] = 0, 3.5, np.arange(size) / 16
    amax, spread = np.abs(x).max(axis=-1, keepdims=True), np.ptp(x, axis=-1, keepdims=True)
    assert (np.abs(to_int8(x) - x) <= amax / 254 * 1.000001).all()
    assert (np.abs(to_fp8(x) - x) <= np.maximum(np.abs(x) / 16, amax / 448 / 512) * 1.000001).all()
    assert (np.abs(to_int4(x) - x) <= spread / 30 * 1.000001).all()
    q = rng.standard_normal(x.shape)
    products = (q * x).sum(axis=-1)
    assert np.abs((transformed(q) * transformed(x)).sum(axis=-1) - products).max() <= 1e-5 * np.abs(products).max()


def random_qkv(T: int, heads: int, kv_heads: int, size: int, seed: int) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng([seed, T, heads, size])
    shapes = ((T, heads, size), (T, kv_heads, size), (T, kv_heads, size))
    q, k, v = (rng.standard_normal(s, np.float32) for s in shapes)
    return q * np.float32(2), k, v


@pytest.mark.parametrize(
    "format, shape, T",
    crossed(
        [(4, 4, 16), (5, 1, 64), (14, 2, 40), (3, 1, 8), (2, 2, 128)], [1, 2, 63, 64, 65, 255, 257, LONG],
        often=lambda shape, T: T in (1, 65) or (shape, T) == ((5, 1, 64), 257),
        seldom=lambda shape, T: T in (64, 255, LONG) and shape != (5, 1, 64),
    ),
)  # fmt: skip
def test_attention(format: Format, shape: tuple[int, int, int], T: int, machine: Machine) -> None:
    heads, kv_heads, size = shape
    q, k, v = random_qkv(T, heads, kv_heads, size, seed=1)
    pages = Pages(heads, kv_heads, size, format, machine)
    got = pages(q, k, v, one_sequence(0, T, [9, 3, 7, 1, 20, 5, 11, 12, 2]))
    pages.executor.close()
    assert_as_good_as_the_format(format, got, q, k, v)


def assert_as_good_as_the_format(format: Format, got: F32, q: F32, k: F32, v: F32, window: int = 0) -> None:
    """Against float64 on what the pages hold."""
    size = q.shape[2]
    q, k, v = (code(x) for code, x in zip(ROUNDINGS[kept(format).name.lower()], (q, k, v), strict=True))
    whole = [x.astype(np.float64) for x in (q, k, v)]
    exact = attention(whole[0], whole[1], whole[2], 0, size**-0.5, ScoreRules(window))
    if format == KvFormat.F32:
        assert_no_worse(got, attention(q, k, v, 0, size**-0.5, ScoreRules(window)), exact, factor=2, ulps=8)
    elif format in CODES:  # p has 16 bits relative to the largest, and meets codes of one sign where there is a least
        most = np.ptp(v) if format == KvFormat.INT4 else np.abs(v).max()
        assert np.abs(got - exact).max() <= 2**-12 * most
    else:  # p is rounded to bfloat16: 2^-9 relative each
        assert np.abs(got - exact).max() <= 2**-8 * np.abs(v).max()


@pytest.mark.parametrize("format, shape", [
    *crossed([(2, 1, 136), (4, 1, 256), (1, 1, 512)], often=lambda shape: shape[2] == 136),
    *(pytest.param(f, shape, marks=pytest.mark.nightly) for f in FORMATS for shape in [(3, 3, 192), (2, 1, 328)]),
])  # fmt: skip
def test_large_heads(format: Format, shape: tuple[int, int, int], machine: Machine) -> None:
    """A prompt, then token by token over the end of a page and of a span; the same as the whole in one piece."""
    T, prompt, (heads, kv_heads, size) = 260, 250, shape
    q, k, v = random_qkv(T, heads, kv_heads, size, seed=2)
    pages, table = Pages(heads, kv_heads, size, format, machine), [4, 0, 9, 2, 7]
    whole = pages(q, k, v, one_sequence(0, T, table))
    assert_as_good_as_the_format(format, whole, q, k, v)
    got = [pages(q[:prompt], k[:prompt], v[:prompt], one_sequence(0, prompt, table))]
    got += [pages(q[i : i + 1], k[i : i + 1], v[i : i + 1], one_sequence(i, 1, table)) for i in range(prompt, T)]
    pages.executor.close()
    assert (np.concatenate(got) == whole).all()


@pytest.mark.parametrize("format, seed", crossed(range(3), often=lambda seed: seed == 0))
def test_chunks_pages_threads_and_isas_give_equal_bits(format: Format, seed: int) -> None:
    equal_however_cut(format, seed, usable_isas())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_so_it_is_by_emulated_tiles(seed: int) -> None:
    equal_however_cut(BF16_BY_TILES, seed, [usable_isas()[0], EMULATED])


def equal_however_cut(format: Format, seed: int, isas: Iterable[str]) -> None:
    """However a prompt is cut, wherever its pages lie (full of another's garbage), whoever computes: the same bits."""
    rng = np.random.default_rng(seed)
    q, k, v = random_qkv(LONG, 6, 2, head(format), seed)
    expected = None
    for isa in isas:
        for threads in (1, 2):
            pages = Pages(6, 2, head(format), format, Machine(isa, threads))
            table = [int(p) for p in rng.permutation(64)[:9]]
            junk = random_qkv(LONG, 6, 2, head(format), seed=99)
            junk[2][:] = np.nan
            pages(*junk, one_sequence(0, LONG, table))
            cuts = sorted({0, LONG, *(int(c) for c in rng.integers(1, LONG, int(rng.integers(0, 6))))})
            parts = [pages(q[a:b], k[a:b], v[a:b], one_sequence(a, b - a, table)) for a, b in itertools.pairwise(cuts)]
            pages.executor.close()
            got = np.concatenate(parts)
            expected = got if expected is None else expected
            assert (got == expected).all(), f"{isa}, {threads} threads, cuts {cuts}"


@pytest.mark.parametrize("format, shape", crossed([(3, 3), (8, 1), (13, 1)], often=lambda shape: shape == (13, 1)))
def test_spans_shared_out_give_equal_bits(format: Format, shape: tuple[int, int]) -> None:
    """Few rows of long contexts: who computes which span of 256, and who comes last, changes nothing."""
    n, table, (heads, kv_heads) = 1700, list(range(27)), shape
    q, k, v = random_qkv(n, heads, kv_heads, head(format), seed=5)
    expected = None
    for threads in (1, 2, 3, 5):
        pages = Pages(heads, kv_heads, head(format), format, Machine(usable_isas()[0], threads), max_tokens=n)
        pages(q, k, v, one_sequence(0, n, table))
        last = [(a, b) for a, b in ((1023, 1), (1024, 1), (1279, 2), (n - 1, 1)) for _ in range(3)]
        got = [pages(q[a : a + b], k[a : a + b], v[a : a + b], one_sequence(a, b, table)) for a, b in last]
        pages.executor.close()
        expected = got if expected is None else expected
        assert all((x == y).all() for x, y in zip(got, expected, strict=True)), f"{threads} threads"


KNOBS = next(k for k in kernels() if k.name == "attention").knobs
CONTEXTS = [(1040, 1), (590, 5), (255, 40), (0, 70)]  # (tokens before, of the step): five spans, three, two, one


@pytest.mark.parametrize("format", crossed(often=lambda: False))
def test_no_knob_changes_a_bit(format: Format) -> None:
    equal_whatever_the_knobs(format, usable_isas())


@pytest.mark.nightly
def test_no_knob_changes_a_bit_by_emulated_tiles() -> None:
    equal_whatever_the_knobs(BF16_BY_TILES, [usable_isas()[0], EMULATED])


def equal_whatever_the_knobs(format: Format, isas: Iterable[str]) -> None:
    """Decode, a few rows, a chunk and a prompt in one step, however they are cut into tasks, whoever computes these."""
    heads, kv_heads = 6, 2
    tables = [
        list(range(at, at + -(-(first + n) // 64))) for (first, n), at in zip(CONTEXTS, (0, 17, 27, 32), strict=True)
    ]
    data = [random_qkv(first + n, heads, kv_heads, head(format), seed=first) for first, n in CONTEXTS]
    step = several([(*context, table) for context, table in zip(CONTEXTS, tables, strict=True)])
    q, k, v = (np.concatenate([d[i][first:] for d, (first, _) in zip(data, CONTEXTS, strict=True)]) for i in range(3))
    draw, expected = random.Random(0), None
    for isa in isas:
        for threads in (2, 5):
            pages = Pages(heads, kv_heads, head(format), format, Machine(isa, threads), max_tokens=1040)
            for (first, _), table, (q1, k1, v1) in zip(CONTEXTS, tables, data, strict=True):
                if first:
                    pages(q1[:first], k1[:first], v1[:first], one_sequence(0, first, table))
            for i in range(6):
                knobs = [i and min(draw.choice([0, 1, 2, 3, 5, 8, knob.high]), knob.high) for knob in KNOBS]
                pages.executor.set_tactics([(1, 1, tuple([*knobs, 0, 0, 0, 0][:MAX_KNOBS]))])
                got = pages(q, k, v, step)
                expected = got if expected is None else expected
                assert (got == expected).all(), f"{isa}, {threads} threads, knobs {knobs}"
            pages.executor.close()


def test_spans_stay_together_where_their_parts_find_no_room() -> None:
    """86 tiles of wide heads, which 128 tasks would cut: a result of each span takes 8.7 MB, two workers have 8.4."""
    first, count, table = 768, 256, list(range(16))
    q, k, v = random_qkv(first + count, 4, 1, 512, seed=8)
    found = []
    for threads, knobs in ((1, (0, 0, 0, 0)), (2, (64, 12, 0, 0))):
        machine = Machine(usable_isas()[0], threads)
        pages = Pages(4, 1, 512, KvFormat.BF16, machine, max_tokens=first + count)
        pages.executor.set_tactics([(1, 1, knobs)])
        pages(q[:first], k[:first], v[:first], one_sequence(0, first, table))
        found.append(pages(q[first:], k[first:], v[first:], one_sequence(first, count, table)))
        pages.executor.close()
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_stays_so(format: Format, where: str, bad: float, machine: Machine) -> None:
    """A sequence whose keys or values overflowed fails; it does not answer from zeros."""
    if where == "k" and np.isinf(bad) and format not in (*CODES, KvFormat.FP8):
        pytest.skip("a score of minus infinity is a weight of 0")
    q, k, v = random_qkv(70, 2, 1, head(format), seed=3)
    {"k": k, "v": v}[where][5, 0, 3] = bad
    pages = Pages(2, 1, head(format), format, machine)
    got = pages(q, k, v, one_sequence(0, 70, [1, 2]))
    pages.executor.close()
    assert not np.isfinite(got[5:]).all(axis=(1, 2)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("at", [1, 64, 65, 257])
def test_what_was_said_before_is_not_touched(format: Format, at: int, bad: float, machine: Machine) -> None:
    """Tokens before one that is not finite have the bits that they have without it, in the same chunk and tile.

    Their pages may be shared with another sequence, or read again after preemption.
    """
    q, k, v = random_qkv(at + 9, 4, 2, head(format), seed=4)
    pages, table = Pages(4, 2, head(format), format, machine), [3, 1, 4, 2, 6]
    clean = pages(q, k, v, one_sequence(0, at + 9, table))
    for x in (q, k, v):
        x[at] = bad
    got = pages(q, k, v, one_sequence(0, at + 9, table))
    pages.executor.close()
    assert not np.isfinite(got[at:]).all(axis=(1, 2)).any()
    assert (got[:at] == clean[:at]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("format, length", crossed([1, 2, 63, 65, 200], often=lambda length: length in (2, 65)))
def test_pages_of_a_failed_sequence_are_as_good_as_new(
    format: Format, length: int, bad: float, machine: Machine
) -> None:
    table = [5, 2, 9, 7]
    q, k, v = random_qkv(length, 3, 1, 40, seed=6)
    pages = Pages(3, 1, 40, format, machine)
    clean = pages(q, k, v, one_sequence(0, length, table))
    junk = [np.full_like(x, bad) for x in random_qkv(256, 3, 1, 40, seed=7)]
    pages(junk[0], junk[1], junk[2], one_sequence(0, 256, table))
    assert (pages(q, k, v, one_sequence(0, length, table)) == clean).all()
    pages.executor.close()


def test_sequences_do_not_see_each_other(machine: Machine) -> None:
    """A decode row, a whole prompt and a later chunk in one step equal the same three alone."""
    lengths, chunk = (70, 130, 200), (1, 130, 64)
    data = [random_qkv(n, 4, 2, 16, seed=n) for n in lengths]
    pages = Pages(4, 2, 16, KvFormat.BF16, machine)
    tables = [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    alone = []
    for (q, k, v), n, c, table in zip(data, lengths, chunk, tables, strict=True):
        if n > c:
            pages(q[: n - c], k[: n - c], v[: n - c], one_sequence(0, n - c, table))
        alone.append(pages(q[n - c :], k[n - c :], v[n - c :], one_sequence(n - c, c, table)))
    step = several([(n - c, c, table) for n, c, table in zip(lengths, chunk, tables, strict=True)])
    together = [np.concatenate([d[i][-c:] for d, c in zip(data, chunk, strict=True)]) for i in range(3)]
    got = pages(together[0], together[1], together[2], step)
    pages.executor.close()
    assert (got == np.concatenate(alone)).all()
