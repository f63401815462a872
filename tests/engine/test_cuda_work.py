"""How attention's work is cut: all of it once, in parts that leave nobody waiting for the longest context."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.engine.cuda.attention_partition import (
    ALIGNED,
    FEW_ROWS,
    ITEM,
    MANY_ROWS,
    MAX_PARTS,
    SOME_ROWS,
    AttentionKind,
    Sequences,
    SmGeometry,
    SplitPlan,
    aligned,
    bounds,
    bucket_parts,
    pack_arrays,
    room,
    split_attention,
)  # fmt: skip
from millrace.engine.executor import IntArray
from tests.support.one_step import i32

PAGE = 64


def sequences(at: IntArray, lengths: IntArray) -> Sequences:
    pages = -(-(at + lengths) // PAGE)
    starts = [np.concatenate([[0], np.cumsum(x)[:-1]]) for x in (lengths, pages)]
    return Sequences(i32(starts[0]), i32(lengths), i32(at), i32(starts[1]))


def check(found: SplitPlan, of: Sequences, rows: int, group: int, most: int, window: int = 0) -> None:
    """Against a walk over all rows, one by one."""
    wanted = {
        (s, first): (
            max(0, int(of.at[s]) + first // group - window + 1) // PAGE if window else 0,
            (int(of.at[s]) + min((first + rows - 1) // group, int(of.lengths[s]) - 1)) // PAGE + 1,
        )
        for s in range(len(of.lengths))
        for first in range(0, int(of.lengths[s]) * group, rows)
    }
    by_begin = {int(b): s for s, b in reversed(list(enumerate(of.begins)))}
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for table, here, end, part, begin, n, at, first in found.items.tolist():
        s = by_begin[begin]
        assert (table, n, at) == (of.tables[s], of.lengths[s], of.at[s]) and here < end
        parts.setdefault((s, first), []).append((here, end, part))
    assert parts.keys() == wanted.keys()
    merges = {(by_begin[begin], first): (part, n) for part, n, begin, _, first in found.merges.tolist()}
    taken = []
    counts = [end - begin for begin, end in wanted.values()]
    longest = max(1, -(-sum(counts) // most), -(-max(counts) // MAX_PARTS))
    for block, (gone, pages) in wanted.items():
        own = sorted(parts[block])
        assert [here for here, _, _ in own] + [pages] == [gone] + [end for _, end, _ in own], "each page once"
        assert max(end - here for here, end, _ in own) <= longest and len(own) <= MAX_PARTS
        if len(own) == 1:
            assert own[0][2] == -1 and block not in merges
        else:
            assert merges.pop(block) == (own[0][2], len(own))
            taken += [part for _, _, part in own]
    assert not merges and sorted(taken) == list(range(found.parts))
    items, merged, held = bounds(len(wanted), most)
    assert len(found.items) <= items and len(found.merges) <= merged and found.parts <= held
    sizes = found.items[:, 2] - found.items[:, 1]
    assert (np.diff(sizes) <= 0).all(), "the longest first"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 200)), min_size=1, max_size=9),
    st.sampled_from([FEW_ROWS, SOME_ROWS, MANY_ROWS]), st.integers(1, 40), st.integers(1, 600),
    st.sampled_from([0, 0, 1, 33, 64, 65, 700]),
)  # fmt: skip
@example([(0, 1)], FEW_ROWS, 1, 1, 0)
@example([(64 * 900, 1)], FEW_ROWS, 4, 600, 0)
@example([(64 * 900, 1)], FEW_ROWS, 4, 600, 4096)
def test_each_page_of_each_row_is_attended_to_once(
    drawn: list[tuple[int, int]], rows: int, group: int, most: int, window: int
) -> None:
    of = sequences(*(i32(x) for x in zip(*drawn, strict=True)))
    check(split_attention(of, rows, group, PAGE, most, window), of, rows, group, most, window)


H200, GROUP, KV_HEADS = SmGeometry.from_device(132, (9, 0), 2 * 128), 4, 8


@pytest.mark.parametrize(("contexts", "programs", "longest"), [
    ([128], 16, 1), ([700], 88, 1), ([4096], 256, 2), ([32768], 376, 11), ([1000] * 8, 384, 3),
    ([16000] + [300] * 63, 672, 12),
])  # fmt: skip
def test_few_contexts_have_work_for_all_of_a_gpu(contexts: list[int], programs: int, longest: int) -> None:
    """Of Llama-3.1-8B, on an H200: programs, and pages of the longest."""
    at = i32(contexts) - 1
    found = split_attention(
        sequences(at, np.ones_like(at)), FEW_ROWS, GROUP, PAGE, room(FEW_ROWS, KV_HEADS, H200.number)
    )
    sizes = found.items[:, 2] - found.items[:, 1]
    assert (len(found.items) * KV_HEADS, int(sizes.max())) == (programs, longest)


def test_many_contexts_are_whole() -> None:
    """512 of 128 to 2,176 tokens are 4,096 programs: nothing to merge. What a bucket adds to them does nothing."""
    at = i32(np.random.default_rng(1).integers(127, 2176, 512))
    most = room(FEW_ROWS, KV_HEADS, H200.number)
    found = split_attention(sequences(at, np.ones_like(at)), FEW_ROWS, GROUP, PAGE, most)
    assert len(found.items) == 512 and not len(found.merges)
    captured = bucket_parts(512, 65, [AttentionKind(GROUP, KV_HEADS)], H200.number, PAGE)[9] // ITEM
    assert captured == 512 + most and most <= 66


def test_a_step_without_rows_has_no_work() -> None:
    found = split_attention(sequences(i32([5]), i32([0])), FEW_ROWS, 4, PAGE, 9)
    assert not len(found.items) and not len(found.merges) and not found.parts


@pytest.mark.parametrize("sizes", [(1, 4, 5, 0, 3), (8,), ()])
def test_parts_begin_aligned(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    parts = [i32(rng.integers(1, 99, n)) for n in sizes]
    whole, places = pack_arrays(parts)
    assert all(place.start % ALIGNED == 0 for place in places) and aligned(sizes)[1] == len(whole)
    assert all((whole[place] == part).all() for place, part in zip(places, parts, strict=True))
    assert whole.sum() == sum(part.sum() for part in parts)


@pytest.mark.parametrize(("capability", "head_bytes", "rows"), [
    ((8, 0), 128, 64), ((8, 9), 256, 64), ((9, 0), 256, 128), ((10, 0), 128, 128), ((9, 0), 512, 64),
])  # fmt: skip
def test_rows_of_a_prompts_block(capability: tuple[int, int], head_bytes: int, rows: int) -> None:
    assert SmGeometry.from_device(7, capability, head_bytes) == (7, rows)


def test_prompts_in_float32_go_in_small_blocks() -> None:
    """On every GPU and of every head: what one thread sums of 64 rows it has no registers for."""
    assert [SmGeometry.from_device(7, c, n, 4) for c in ((8, 0), (9, 0)) for n in (256, 512)] == [(7, 32)] * 4
