"""Attention to the last tokens alone: against float64, equal bits however it is cut, over pages that come and go."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from millrace.engine.cache_specs import KvFormat
from millrace.engine.executor import ExecutionError, StepInputs, WindowPages
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import BF16_BY_TILES
from tests.kernels.test_attention import (
    FORMATS,
    LONG,
    Format,
    Pages,
    assert_as_good_as_the_format,
    crossed,
    head,
    one_sequence,
    random_qkv,
    several,
)
from tests.support.emulated_amx import EMULATED
from tests.support.one_step import Machine, i32

TABLE = [9, 3, 7, 1, 20, 5, 11, 12, 2]


def moving(window: int, first: int, count: int, table: list[int]) -> StepInputs:
    """Tokens first .. first+count-1 of one sequence, with no page that lies before their windows."""
    step, gone = one_sequence(first, count, table), max(0, first - window + 1) // 64
    pages = table[gone : -(-(first + count) // 64)]
    return replace(step, windows=(WindowPages(i32(pages), i32([0, len(pages)]), i32([gone])),))


@pytest.mark.parametrize(
    "format, window, T",
    crossed(
        [1, 2, 63, 64, 65, 100, 255, 256, 257, 300], [1, 65, 257, LONG],
        often=lambda window, T: (window, T) in ((65, 257), (300, LONG)),
        seldom=lambda window, T: T in (1, 65) and window not in (2, 64),
    ),
)  # fmt: skip
def test_a_window(format: Format, window: int, T: int, machine: Machine) -> None:
    q, k, v = random_qkv(T, 4, 2, head(format), seed=window)
    pages = Pages(4, 2, head(format), format, machine, window=window)
    got = pages(q, k, v, one_sequence(0, T, TABLE))
    pages.executor.close()
    assert_as_good_as_the_format(format, got, q, k, v, window)


@pytest.mark.parametrize("format, window", crossed([1, 64, 90, 256, 301], often=lambda window: window == 90))
def test_chunks_pages_threads_and_isas_give_equal_bits(format: Format, window: int) -> None:
    equal_however_cut(format, window, usable_isas())


@pytest.mark.nightly
@pytest.mark.parametrize("window", [1, 64, 90, 256, 301])
def test_so_it_is_by_emulated_tiles(window: int) -> None:
    equal_however_cut(BF16_BY_TILES, window, [usable_isas()[0], EMULATED])


def equal_however_cut(format: Format, window: int, isas: Iterable[str]) -> None:
    """Pages before a window are another's by now: what stands there is not finite."""
    rng = np.random.default_rng(window)
    q, k, v = random_qkv(LONG, 6, 2, head(format), window)
    junk = [np.full_like(x, np.nan) for x in random_qkv(64, 6, 2, head(format), seed=0)]
    expected = None
    for isa in isas:
        for threads in (1, 2):
            pages = Pages(6, 2, head(format), format, Machine(isa, threads), window=window)
            table = [int(p) for p in rng.permutation(64)[:9]]
            cuts = sorted({0, LONG, *(int(c) for c in rng.integers(1, LONG, int(rng.integers(0, 6))))})
            parts, n_gone = [], 0
            for a, b in itertools.pairwise(cuts):
                for gone in range(n_gone, n_gone := max(0, a - window + 1) // 64):
                    pages(junk[0], junk[1], junk[2], one_sequence(0, 64, [table[gone]]))
                parts.append(pages(q[a:b], k[a:b], v[a:b], moving(window, a, b - a, table)))
            pages.executor.close()
            got = np.concatenate(parts)
            expected = got if expected is None else expected
            assert (got == expected).all(), f"{isa}, {threads} threads, cuts {cuts}"


@pytest.mark.parametrize("format, shape", crossed([(3, 3), (13, 1)], often=lambda shape: shape == (13, 1)))
def test_spans_shared_out_give_equal_bits(format: Format, shape: tuple[int, int]) -> None:
    n, window, (heads, kv_heads) = 2600, 1300, shape
    table = list(range(41))
    q, k, v = random_qkv(n, heads, kv_heads, head(format), seed=5)
    expected = None
    for threads in (1, 2, 3, 5):
        machine = Machine(usable_isas()[0], threads)
        pages = Pages(heads, kv_heads, head(format), format, machine, max_tokens=n, window=window)
        pages(q, k, v, one_sequence(0, n, table))
        last = [(a, b) for a, b in ((1299, 1), (1300, 1), (2047, 2), (n - 30, 30)) for _ in range(3)]
        got = [pages(q[a : a + b], k[a : a + b], v[a : a + b], moving(window, a, b, table)) for a, b in last]
        pages.executor.close()
        expected = got if expected is None else expected
        assert all((x == y).all() for x, y in zip(got, expected, strict=True)), f"{threads} threads"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [2, 33, 100])
def test_what_is_not_finite_is_so_within_its_window_alone(
    format: Format, window: int, bad: float, machine: Machine
) -> None:
    """Tokens before it and beyond its window have the bits that they have without it, in the same chunk and tile."""
    at, T = 67, 67 + window + 20
    q, k, v = random_qkv(T, 4, 2, head(format), seed=4)
    pages = Pages(4, 2, head(format), format, machine, window=window)
    clean = pages(q, k, v, one_sequence(0, T, TABLE))
    for x in (q, k, v):
        x[at] = bad
    got = pages(q, k, v, one_sequence(0, T, TABLE))
    pages.executor.close()
    assert not np.isfinite(got[at]).any()
    for part in (slice(0, at), slice(at + window, T)):
        assert (got[part] == clean[part]).all()


def test_sequences_of_different_lengths_in_one_step(machine: Machine) -> None:
    window, lengths, chunk = 70, (70, 130, 300), (1, 130, 64)
    data = [random_qkv(n, 4, 2, 16, seed=n) for n in lengths]
    pages = Pages(4, 2, 16, KvFormat.BF16, machine, window=window)
    tables, alone = [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]], []
    for (q, k, v), n, c, table in zip(data, lengths, chunk, tables, strict=True):
        if n > c:
            pages(q[: n - c], k[: n - c], v[: n - c], one_sequence(0, n - c, table))
        alone.append(pages(q[n - c :], k[n - c :], v[n - c :], one_sequence(n - c, c, table)))
    step = several([(n - c, c, table) for n, c, table in zip(lengths, chunk, tables, strict=True)])
    first = [max(0, n - c - window + 1) // 64 for n, c in zip(lengths, chunk, strict=True)]
    left = [table[gone:] for table, gone in zip(tables, first, strict=True)]
    starts = i32(np.cumsum([0, *map(len, left)]))
    step = replace(step, windows=(WindowPages(i32([p for own in left for p in own]), starts, i32(first)),))
    together = [np.concatenate([d[i][-c:] for d, c in zip(data, chunk, strict=True)]) for i in range(3)]
    got = pages(together[0], together[1], together[2], step)
    pages.executor.close()
    assert first[2] == 2 and (got == np.concatenate(alone)).all()


@pytest.mark.parametrize(
    "pages, starts, first, why",
    [
        ([1, 2], [0, 2], [3], "first page lies after its begin"),
        ([1, 2], [0, 2], [-1], "first page lies after its begin"),
        ([1], [0, 1], [2], "beyond the window's pages"),
        ([1, 64], [0, 2], [2], "does not exist"),
        ([1, -1], [0, 2], [2], "does not exist"),
        ([1, 2], [0, 3], [2], "do not fit"),
        ([1, 2], [1, 2], [2], "do not fit"),
        ([1, 2], [0, 2], [2, 2], "has 2 elements"),
        ([1, 2], [0, 2, 2], [2], "has 3 elements"),
    ],
)
def test_pages_that_cannot_be(pages: list[int], starts: list[int], first: list[int], why: str) -> None:
    """The token at 200 attends to those from 151 on, which lie in the pages 2 and 3."""
    step, own = one_sequence(200, 1, TABLE), Pages(2, 1, 8, KvFormat.F32, Machine(usable_isas()[0], 1), window=50)
    with pytest.raises(ExecutionError, match=why):
        own.executor.run(replace(step, windows=(WindowPages(i32(pages), i32(starts), i32(first)),)))
    with pytest.raises(ExecutionError, match="of 2 windows, not of 1"):
        own.executor.run(replace(step, windows=(WindowPages(i32([1, 2]), i32([0, 2]), i32([2])),) * 2))
    own.executor.run(replace(step, windows=(WindowPages(i32([1, 2]), i32([0, 2]), i32([2])),)))
    own.executor.close()
