"""Steps: their chunks, and packing these into the executor's arrays.

Python work per sequence, none per token.

T tokens, S sequences, R sampling rows; see StepInputs. The buffers are reused: inputs are valid until the next `build`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from millrace.engine.executor import SAMPLING, Executor, ExecutorLimits, IntArray, StepInputs, plain_rows
from millrace.runtime.adapters import step_adapters
from millrace.runtime.kv.cache_groups import CacheGroups, step_states, step_windows
from millrace.runtime.kv.pages import PagePool
from millrace.runtime.request.prompt_embeds import Rows
from millrace.runtime.request.request import Request, Sequence, Stage
from millrace.runtime.step_history import PART, Parts
from millrace.runtime.structured_output.grammar import GrammarCompiler

_NO_IDS = np.empty(0, dtype=np.int32)
_NO_VALUES = np.empty(0, dtype=np.float32)
_UNKNOWN = np.zeros(1, dtype=np.int32)  # a token that is drawn on the device and not known here


class Chunk(Struct):
    """Tokens `start` .. `start + n - 1` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    n: int
    draws: bool  # the chunk reaches the sequence's last token: draw the next one
    n_scored: int = 0  # prompt tokens to score, from `request.n_scored` on


@dataclass(slots=True)
class Step:
    """The chunks of a step, those of running answers first. n_tokens: of all chunks"""

    chunks: list[Chunk]
    n_tokens: int
    n_prefill: int
    n_scored: int = 0

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step can be launched before this one has finished, and be undone.

        That is so if this step copies no page, and fewer than half of its drawing sequences must skip the next step
        because their masks depend on the drawn token.
        """
        n_drawing = n_held = 0
        for chunk in self.chunks:
            if chunk.sequence.source is not None:
                return False
            n_drawing += chunk.draws
            n_held += chunk.draws and chunk.sequence.matcher is not None
        return not n_held or 2 * n_held < n_drawing

    def by_request(self) -> list["Step"]:
        """Return a step for each request of this one."""
        groups: dict[Request, list[Chunk]] = {}
        for chunk in self.chunks:
            groups.setdefault(chunk.sequence.request, []).append(chunk)
        return [Step._from_chunks(chunks) for chunks in groups.values()]

    def without_ended(self) -> "Step":
        """Return the step without the sequences that have ended since it was scheduled."""
        return Step._from_chunks([chunk for chunk in self.chunks if chunk.sequence.stage is not Stage.GONE])

    @staticmethod
    def _from_chunks(chunks: list[Chunk]) -> "Step":
        n = sum(chunk.n for chunk in chunks)
        n_prefill = sum(chunk.n for chunk in chunks if chunk.n > 1)
        return Step(chunks, n, n_prefill, sum(chunk.n_scored for chunk in chunks))

    def rows(self) -> Iterator[tuple[Chunk, int, int]]:
        """Yield each chunk with its first sampling row and the one after its last: scored tokens, then its draw."""
        row = 0
        for chunk in self.chunks:
            first, row = row, row + chunk.n_scored + chunk.draws
            yield chunk, first, row

    def to_history(self) -> tuple[Parts, tuple[str, ...]]:
        """Return the chunks as step history records, and the ids of their requests."""
        chunks, sequences = self.chunks, [chunk.sequence for chunk in self.chunks]
        parts = np.empty(len(chunks), PART)
        parts["request"] = [seq.request.order for seq in sequences]
        parts["choice"] = [seq.request.first + seq.index for seq in sequences]
        parts["start"], parts["n"], parts["draws"] = zip(*[(c.start, c.n, c.draws) for c in chunks], strict=True)
        in_prompt = np.array([seq.n_prompt for seq in sequences], np.int32) - parts["start"]
        parts["n_prompt"] = np.minimum(np.maximum(in_prompt, 0), parts["n"])
        return parts, tuple([seq.request.id for seq in sequences])


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step. can_run_ahead: the next one may be launched before this one is waited for"""

    step: Step
    started_s: float
    can_run_ahead: bool


class BatchBuilder:
    """Packs steps into the executor's arrays. It owns these buffers, sized for the largest step."""

    def __init__(self, limits: ExecutorLimits, grammars: GrammarCompiler) -> None:
        self._grammars, self._all_cores = grammars, limits.on_all_cores
        S, T, R = limits.max_sequences, limits.max_step_tokens, limits.max_rows
        self._page_tokens, self._has_groups = limits.page_tokens, bool(limits.windows or limits.n_slots)
        self._has_adapters = limits.n_adapters > 0
        self._offsets = np.arange(max(T, limits.max_context), dtype=np.int32)  # slices of it are positions
        self._tokens = np.empty(T, dtype=np.int32)
        self._positions = np.empty(T, dtype=np.int32)
        self._starts = np.zeros(S + 1, dtype=np.int32)
        self._pages = np.empty(S * -(-limits.max_context // limits.page_tokens), dtype=np.int32)
        self._page_starts = np.zeros(S + 1, dtype=np.int32)
        self._sampling = np.zeros(R, dtype=SAMPLING)
        self._sampling_bytes = self._sampling.view(np.uint8).reshape(R, SAMPLING.itemsize)  # faster to copy

    def build(self, step: Step, previous: Step | None = None) -> StepInputs:
        """Pack the step's chunks in order, and the sampling rows of each chunk in the same order.

        previous: the step in flight, which draws the last tokens of some chunks
        """
        chunks, size = step.chunks, self._page_tokens
        starts = [0, *accumulate([chunk.n for chunk in chunks])]
        n_own = [-(-(chunk.start + chunk.n) // size) for chunk in chunks]
        page_starts = [0, *accumulate(n_own)]
        S, n_tokens, n_pages = len(chunks), starts[-1], page_starts[-1]
        row_before = {c.sequence: row - 1 for c, _, row in previous.rows() if c.draws} if previous else {}
        tokens: list[IntArray] = []  # of each chunk, concatenated at once
        pending: list[tuple[int, int]] = []  # (token of the step, row of the previous step)
        for chunk, at in zip(chunks, starts, strict=False):
            seq, start, end = chunk.sequence, chunk.start, chunk.start + chunk.n
            if end <= len(seq.tokens):
                tokens.append(seq.tokens.part(start, end))
            else:
                tokens += [seq.tokens.part(start, end - 1), _UNKNOWN] if chunk.n > 1 else [_UNKNOWN]
                pending.append((at + chunk.n - 1, row_before[seq]))
        np.concatenate(tokens, out=self._tokens[:n_tokens])
        embeddings = self._embeddings(chunks, starts)
        pages = [chunk.sequence.pages.part(0, n) for chunk, n in zip(chunks, n_own, strict=True)]
        np.concatenate(pages, out=self._pages[:n_pages])
        self._starts[: S + 1], self._page_starts[: S + 1] = starts, page_starts
        firsts = np.array([chunk.start for chunk in chunks], np.int32) - self._starts[:S]
        if n_tokens > S:
            firsts = np.repeat(firsts, np.diff(self._starts[: S + 1]))
        np.add(firsts, self._offsets[:n_tokens], out=self._positions[:n_tokens])
        rows = [row - 1 for chunk, _, row in step.rows() if chunk.draws]
        drawing = [chunk.sequence for chunk in chunks if chunk.draws]
        R = len(rows) + step.n_scored
        sampling = self._sampling[:R]
        for (chunk, first, _), at in zip(step.rows(), starts, strict=False) if step.n_scored else ():
            if chunk.n_scored:
                _score(sampling[first : first + chunk.n_scored], chunk, at)
        if rows:
            own = np.frombuffer(b"".join([seq.row for seq in drawing]), np.uint8)
            where = rows if step.n_scored else slice(R)
            self._sampling_bytes[:R][where] = own.reshape(-1, SAMPLING.itemsize)
            last = [end - 1 for chunk, end in zip(chunks, starts[1:], strict=True) if chunk.draws]
            sampling["token"][where] = last
            sampling["position"][where] = self._positions[last] + 1
        bias_ids, bias_values = _fill_bias(sampling, rows, drawing)
        masks, masks_ready = self._fill_masks(sampling, rows, drawing)
        history, drawn_history = _fill_history(sampling, rows, drawing, row_before)
        sequences = [chunk.sequence.caches for chunk in chunks] if self._has_groups else []
        return StepInputs(
            tokens=self._tokens[:n_tokens], positions=self._positions[:n_tokens], starts=self._starts[: S + 1],
            pages=self._pages[:n_pages], page_starts=self._page_starts[: S + 1], sampling=sampling, history=history,
            bias_ids=bias_ids, bias_values=bias_values, masks=masks, masks_ready=masks_ready,
            copies=self._copies(chunks), pending_tokens=_pairs(pending), pending_history=_pairs(drawn_history),
            windows=step_windows(sequences, [chunk.start for chunk in chunks], size) if self._has_groups else (),
            states=step_states(sequences) if self._has_groups else None, embeddings=embeddings,
            adapters=step_adapters([chunk.sequence for chunk in chunks]) if self._has_adapters else None,
        )  # fmt: skip

    def _embeddings(self, chunks: list[Chunk], starts: list[int]) -> Rows | None:
        """Return the embedding rows of the step, if any, and number them in its tokens. starts: of the chunks"""
        parts, n = list[Rows](), 0
        for chunk, at in zip(chunks, starts, strict=False):
            rows = chunk.sequence.request.rows
            if rows is not None and chunk.start < len(rows):
                parts.append(rows[chunk.start : chunk.start + chunk.n])
                end = n + len(parts[-1])
                self._tokens[at : at + end - n] = -1 - self._offsets[n:end]
                n = end
        return np.concatenate(parts) if parts else None

    def _copies(self, chunks: list[Chunk]) -> IntArray | None:
        taking = [(chunk, chunk.sequence.source) for chunk in chunks if chunk.sequence.source is not None]
        return _pairs([(s, int(c.sequence.pages.array[c.start // self._page_tokens])) for c, s in taking])

    def _fill_masks(
        self, sampling: NDArray[np.void], rows: list[int], drawing: list[Sequence]
    ) -> tuple[NDArray[np.uint32] | None, IntArray | None]:
        """Return the token masks of structured output.

        They are filled while the step runs; if the step uses all cores, before it, also with all cores.
        """
        constrained = [(r, seq.matcher) for r, seq in zip(rows, drawing, strict=True) if seq.matcher is not None]
        if not constrained:
            return None, None
        sampling["mask"][[r for r, _ in constrained]] = np.arange(len(constrained)) + 1
        matchers = [matcher for _, matcher in constrained]
        return (
            (self._grammars.masks(matchers), None) if self._all_cores else self._grammars.masks_in_background(matchers)
        )


def check(executor: Executor, pool: PagePool, groups: CacheGroups) -> None:
    """Compute a step of token 0 alone. Do nothing if no page or slot is free.

    raises RuntimeError, MillraceError if it fails
    """
    if not groups.has_room(1):
        return
    if pages := pool.reserve(1):
        caches = groups.start((), 1)
        groups.advance(caches, 0, 1, lambda number: None)
        starts, first = np.array([0, 1], np.int32), np.zeros(1, np.int32)
        own, rows = np.array(pages, np.int32), plain_rows(1)
        rows["position"] = 1
        windows, states = step_windows([caches], [0], executor.limits.page_tokens), step_states([caches])
        step = StepInputs(first, first, starts, own, starts, rows, _NO_IDS, _NO_IDS, _NO_VALUES)
        try:
            executor.run(replace(step, windows=windows, states=states))
        finally:
            groups.release(caches)
            pool.release(pages)


def _score(rows: NDArray[np.void], chunk: Chunk, start: int) -> None:
    """Fill the rows that score the next prompt tokens of a chunk. start: of the chunk in the step"""
    request = chunk.sequence.request
    first = request.n_scored
    rows[:] = plain_rows(len(rows))
    rows["n_top"] = request.resolved.prompt_top
    rows["token"] = np.arange(len(rows)) + (start + first - 1 - chunk.start)
    rows["target"] = request.prompt[first : first + len(rows)]


def _pairs(pairs: list[tuple[int, int]]) -> IntArray | None:
    return np.array(pairs, dtype=np.int32) if pairs else None


def _fill_history(
    sampling: NDArray[np.void], rows: list[int], drawing: list[Sequence], row_before: Mapping[Sequence, int]
) -> tuple[IntArray, list[tuple[int, int]]]:
    """Return prompt and output of each sequence with a penalty, concatenated, and the tokens that are not known yet.

    row_before: rows of the previous step by sequence
    """
    parts: list[IntArray] = []
    pending: list[tuple[int, int]] = []
    at = 0
    for r, seq in zip(rows, drawing, strict=True):
        if seq.request.resolved.needs_history:
            n_output, window = seq.n_output + seq.n_ahead, seq.request.resolved.penalty_window
            cut = 0 if window is None else max(0, seq.n_prompt + n_output - window)
            if seq.request.rows is not None:  # they have no token ids to penalise
                cut = max(cut, seq.n_prompt)
            sampling["history_start"][r] = at
            sampling["history_prompt"][r] = max(0, seq.n_prompt - cut)
            sampling["history_output"][r] = n_output - max(0, cut - seq.n_prompt)
            parts.append(seq.tokens.array[cut:])
            at += seq.n_tokens - cut
            if seq.n_ahead:
                parts.append(_UNKNOWN)
                pending.append((at, row_before[seq]))
                at += 1
    return (np.concatenate(parts) if parts else _NO_IDS), pending


def _fill_bias(
    sampling: NDArray[np.void], rows: list[int], drawing: list[Sequence]
) -> tuple[IntArray, NDArray[np.float32]]:
    biased, at = [], 0
    for r, seq in zip(rows, drawing, strict=True):
        resolved = seq.request.resolved
        if n := resolved.bias_ids.size:
            sampling["bias_start"][r] = at
            biased.append(resolved)
            at += n
    if not biased:
        return _NO_IDS, _NO_VALUES
    return np.concatenate([own.bias_ids for own in biased]), np.concatenate([own.bias_values for own in biased])
