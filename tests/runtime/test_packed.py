"""Drawn steps, read back as `StepInputs` says it is read: token by token, row by row, and nothing else is told."""

import random
from collections.abc import Sequence as Ordered
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, IntArray, StepInputs, plain_rows
from millrace.runtime.request.request import Sequence
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.scheduling.step import BatchBuilder, Chunk, Step
from millrace.runtime.structured_output.grammar import GrammarCompiler, Matcher
from tests.runtime.fakes import LIMITS, VOCAB, limits, new_request

SIZE, CONTEXT, SEQUENCES = LIMITS.page_tokens, 40, 6
OF = limits(max_step_tokens=SEQUENCES * CONTEXT, max_sequences=SEQUENCES, max_rows=60, max_context=CONTEXT)
COUNTS = "token", "position", "history_start", "history_prompt", "history_output", "bias_start", "mask"


class Numbered(GrammarCompiler):
    """A mask is the number that stands for its matcher."""

    def __init__(self) -> None:
        pass

    def masks_in_background(self, matchers: Ordered[Matcher]) -> tuple[NDArray[np.uint32], IntArray]:
        return np.array(matchers, np.uint32)[:, None], np.ones(1, np.int32)


def drawn_params(rng: random.Random) -> SamplingParams:
    bias = {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.choice([0, 0, 1, 4]))}
    return SamplingParams(
        n=rng.choice([1, 3]), seed=rng.getrandbits(40), temperature=rng.choice([0, 0.5]), logit_bias=bias,
        frequency_penalty=rng.choice([0, 0.5]), repeat_last_n=rng.choice([None, -1, 0, 1, 3, 99]),
        logprobs=rng.choice([None, 2]), prompt_logprobs=rng.choice([None, 1]),
    )  # fmt: skip


def drawn_chunk(rng: random.Random, rows: int) -> Chunk:
    """Of a sequence of its own, its last token known or not. rows: for scores, at most"""
    prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 20))]
    request = new_request(prompt, drawn_params(rng), OF)
    seq = rng.choice(request.choices)
    for _ in range(rng.choice([0, 1, 9])):
        seq.tokens.append(rng.randrange(1, VOCAB))
    seq.n_ahead = rng.choice([0, 1])
    n_all = len(seq.tokens) + seq.n_ahead
    end = rng.choice([n_all, rng.randint(1, len(seq.tokens))])
    start = max(0, end - rng.choice([1, 2, 20]))
    seq.pages.extend(tuple(rng.sample(range(OF.n_pages), -(-n_all // SIZE))))
    seq.source = rng.choice([None, None, 7])
    seq.matcher = cast(Matcher, rng.randrange(1000)) if rng.random() < 0.3 else None
    n_scored = 0
    if seq.index == 0 and request.resolved.prompt_top is not None and start + 1 < min(end, len(prompt)):
        request.n_scored = rng.randint(start + 1, min(end, len(prompt) - 1))
        n_scored = rng.randint(0, min(rows, end + 1 - request.n_scored, len(prompt) - request.n_scored))
    return Chunk(seq, start, end - start, end == n_all, n_scored)


def ahead_of(rng: random.Random, chunks: list[Chunk]) -> list[Chunk]:
    """The step under way: it draws the last tokens that are not known."""
    ahead = [Chunk(c.sequence, 0, 1, True, rng.choice([0, 2])) for c in chunks if c.sequence.n_ahead]
    rng.shuffle(ahead)
    return ahead


def step_of(chunks: list[Chunk]) -> Step:
    return Step(chunks, sum(c.n for c in chunks), 0, sum(c.n_scored for c in chunks))


def whole(seq: Sequence, row: int) -> list[tuple[str, int]]:
    """Its tokens: those that are known, and the row that draws the last one."""
    return [("known", token) for token in seq.tokens.array.tolist()] + [("drawn", row)] * seq.n_ahead


def told(tokens: IntArray, drawn: IntArray | None, first: int, end: int) -> list[tuple[str, int]]:
    rows = dict([] if drawn is None else drawn.tolist())
    return [("drawn", rows[i]) if i in rows else ("known", int(tokens[i])) for i in range(first, end)]


def check_row(got: StepInputs, row: np.void, seq: Sequence, token: int, row_before: int) -> None:
    """That draws what follows `token`."""
    resolved = seq.request.resolved
    expected = resolved.row[0].copy()
    expected["choice"] = seq.index
    assert all(row[name] == expected[name] for name in SAMPLING.names or () if name not in COUNTS)
    assert row["token"] == token and row["position"] == got.positions[token] + 1
    first, n = row["history_start"], row["history_prompt"] + row["history_output"]
    marked = list(enumerate(whole(seq, row_before) if resolved.needs_history else []))
    seen = marked if resolved.penalty_window is None else marked[-resolved.penalty_window :]
    assert told(got.history, got.pending_history, first, first + n) == [token for _, token in seen]
    assert row["history_prompt"] == sum(i < seq.n_prompt for i, _ in seen)
    bias = slice(row["bias_start"], row["bias_start"] + row["bias_count"])
    assert got.bias_ids[bias].tolist() == resolved.bias_ids.tolist()
    assert got.bias_values[bias].tolist() == resolved.bias_values.tolist()
    assert (got.filled_masks()[row["mask"] - 1, 0] if row["mask"] else None) == seq.matcher


@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_read_as_it_was_meant(seed: int) -> None:
    rng = random.Random(seed)
    builder = BatchBuilder(OF, Numbered())
    other = [drawn_chunk(rng, 8) for _ in range(SEQUENCES)]
    builder.build(step_of(other), step_of(ahead_of(rng, other)))  # nothing of it is left
    chunks = [drawn_chunk(rng, 8) for _ in range(rng.randint(1, SEQUENCES))]
    ahead = ahead_of(rng, chunks)
    before = {c.sequence: sum(b.n_scored + b.draws for b in ahead[: i + 1]) - 1 for i, c in enumerate(ahead)}
    got = builder.build(step_of(chunks), step_of(ahead))
    rows = iter(got.sampling)
    for s, chunk in enumerate(chunks):
        seq, start, end, row_before = chunk.sequence, chunk.start, chunk.start + chunk.n, before.get(chunk.sequence, -1)
        lo, hi = got.starts[s : s + 2].tolist()
        assert told(got.tokens, got.pending_tokens, lo, hi) == whole(seq, row_before)[start:end]
        assert got.positions[lo:hi].tolist() == list(range(start, end))
        own = got.pages[slice(*got.page_starts[s : s + 2])]
        assert own.tolist() == seq.pages.array[: -(-end // SIZE)].tolist()
        for i in range(chunk.n_scored):
            row, at, plain = next(rows), seq.request.n_scored + i, plain_rows(1)
            plain["token"], plain["target"], plain["n_top"] = lo + at - 1 - start, seq.request.prompt[at], 1
            assert row == plain[0]
        if chunk.draws:
            check_row(got, next(rows), seq, hi - 1, row_before)
    assert next(rows, None) is None and len(got.tokens) == hi and len(got.pages) == got.page_starts[-1]
    copies = [(c.sequence.source, c.sequence.pages.array[c.start // SIZE]) for c in chunks if c.sequence.source]
    assert ([] if got.copies is None else got.copies.tolist()) == [list(pair) for pair in copies]
    n_ahead = sum(c.sequence.n_ahead for c in chunks if c.start + c.n > c.sequence.n_tokens)
    assert (0 if got.pending_tokens is None else len(got.pending_tokens)) == n_ahead
