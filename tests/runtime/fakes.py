"""Stand-ins for what the runtime is given: an executor that sees only pages, a tokenizer of bytes, a clock by hand.

The fake executor's next token is a hash of the whole history *as read through the page table*, so that a page that is
lost, shared wrongly or stale, or a token that was skipped, changes the answer.
"""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.api.offline_generate import CompletionOutput
from millrace.checkpoint.config.generation_config import GenerationDefaults
from millrace.checkpoint.tokenizer.tokenizer import SpecialTokens, Tokenizer
from millrace.engine.executor import (
    Executor,
    ExecutorLimits,
    IntArray,
    SampleError,
    StepInputs,
    StepOutputs,
)
from millrace.errors import MillraceError
from millrace.kernels.sample.ref import unpacked
from millrace.runtime.kv.kv_offload import HEADER, RECORD, KvOffloadStore, PageMemory
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.queue_options import DEFAULT_QUEUE_OPTIONS, QueueOptions
from millrace.runtime.request.request import AnswerText, Request, RequestOptions, StopTables, Timings
from millrace.runtime.request.sampling_params import SEED_MASK, SamplingParams, check_prompt, resolve
from millrace.runtime.scheduling.admission_policy import Policy, fcfs
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.runtime.structured_output.grammar_process import GrammarProcess
from tests.runtime.window_memory import WindowMemory

VOCAB = 97
EOS = 0
POISON = 96  # a sequence that begins with it gets no finite logits
LIMITS = ExecutorLimits(
    max_step_tokens=32, max_sequences=8, max_rows=12, max_context=128, page_tokens=4, n_pages=256, vocab_size=VOCAB
)


def limits(**changes: Any) -> ExecutorLimits:
    """Four rows for scores beside one for each sequence, unless said otherwise."""
    rows = {"max_rows": changes.get("max_sequences", LIMITS.max_sequences) + 4}
    return replace(LIMITS, **rows | changes)


class FakeTokenizer(Tokenizer):
    """Token 0 is end-of-text; the others are letters, pairs of letters, and the single bytes of "é" and "界"."""

    def __init__(self) -> None:
        specials = SpecialTokens(named={"eos_token": "</s>"}, bos_token_id=None, eos_token_id=EOS, ids=frozenset({EOS}))
        super().__init__(VOCAB, specials)
        letters = [bytes([c]) for c in b"abcdefgh \n"]
        pieces = [b"</s>", *letters, b"\xc3", b"\xa9", *(bytes([b]) for b in "界".encode())]
        pairs = [a + b for a in letters[:9] for b in letters[:9]]
        self.pieces = (pieces + pairs)[:VOCAB]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self.pieces.index(bytes([b])) if bytes([b]) in self.pieces else 1 for b in text.encode()]

    def _token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def _first_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


class FakeClock:
    """Moves only when told, or by `tick_s` per reading."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def next_token(history: Sequence[int] | NDArray[np.int64], greedy: bool, seed: int, choice: int) -> int:
    """The fake model: what follows `history`, a pure function."""
    key = b"" if greedy else f"{seed & SEED_MASK},{choice}".encode()
    digest = hashlib.blake2b(np.asarray(history, dtype=np.int32).tobytes() + key, digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def score(history: Sequence[int] | NDArray[np.int64], token: int) -> float:
    """The fake model: the log probability of `token` behind `history`, a pure function."""
    return -next_token([*history, token], greedy=True, seed=0, choice=0) / 8


@dataclass
class FakeExecutor(Executor):
    """Keeps tokens and positions by (page, slot), checks every promise of StepInputs, and reads histories back."""

    limits: ExecutorLimits
    before_run: Callable[[StepInputs], None] | None = None  # raises to fail, advances a clock, sleeps
    depth: int = 1
    fails_at_launch: bool = False  # before_run comes there, not where a step is waited for
    n_steps: int = 0
    n_tokens: int = 0

    def __post_init__(self) -> None:
        self._tokens = np.full((self.limits.n_pages, self.limits.page_tokens), -1, dtype=np.int64)
        self._positions = np.full_like(self._tokens, -1)

        self._states: dict[int, list[int]] = {}  # slot -> all tokens so far
        self._windows = [WindowMemory(w, self.limits.page_tokens) for w in self.limits.windows]

        # launched; as a device does, read when it is their turn; None: was launched behind one that failed
        self._steps: deque[StepInputs | None] = deque()
        self._drawn: list[int] = []  # by the step before

    _tokens: NDArray[np.int64] = None  # type: ignore[assignment]  # set above
    _positions: NDArray[np.int64] = None  # type: ignore[assignment]
    _windows: "list[WindowMemory]" = None  # type: ignore[assignment]
    _states: dict[int, list[int]] = None  # type: ignore[assignment]

    def launch(self, step: StepInputs) -> None:
        if step.embeddings is not None:  # the first number of a row is the token that it stands for
            rows = np.flatnonzero(step.tokens < 0)
            step.tokens[rows] = step.embeddings[-1 - step.tokens[rows], 0]
        if step.adapters is not None:  # told apart by their tokens: no id is as large
            assert 0 < step.adapters.max() <= self.limits.n_adapters and step.adapters.min() >= 0
            step.tokens[:] += 1000 * np.repeat(step.adapters, np.diff(step.starts))
        assert len(self._steps) < self.depth, "too many steps at a time"
        if self.before_run is not None and self.fails_at_launch:
            self.before_run(step)
        self._steps.append(step)

    def wait(self) -> StepOutputs:
        assert self._steps, "nothing was launched"
        step = self._steps.popleft()
        if step is None:
            raise RuntimeError("the step before has failed")
        for token, row in () if step.pending_tokens is None else step.pending_tokens.tolist():
            step.tokens[token] = max(self._drawn[row], 0)
        for place, row in () if step.pending_history is None else step.pending_history.tolist():
            step.history[place] = max(self._drawn[row], 0)
        if self.before_run is not None and not self.fails_at_launch:
            try:
                self.before_run(step)
            except (RuntimeError, MillraceError):
                self._steps = deque(None for _ in self._steps)
                raise
        S = len(step.starts) - 1
        assert 1 <= S <= self.limits.max_sequences, S
        assert len(step.tokens) == len(step.positions) == step.starts[-1] <= self.limits.max_step_tokens
        assert len(step.pages) == step.page_starts[-1]
        self._store(step)
        for memory, window in zip(self._windows, step.windows, strict=True):
            memory.store(step, window)
        if self.limits.n_slots:
            self._store_states(step)
        self.n_steps += 1
        self.n_tokens += len(step.tokens)
        assert len(step.sampling) <= self.limits.max_rows
        assert len({int(r["token"]) for r in step.sampling if r["target"] < 0}) == (step.sampling["target"] < 0).sum()
        histories = [self._history(step, int(r["token"])) for r in step.sampling]
        out = _outputs(step, [self._draw(step, r, h) for r, h in zip(step.sampling, histories, strict=True)])
        for i, (row, history) in enumerate(zip(step.sampling, histories, strict=True)):
            if row["target"] >= 0:
                out.logprobs[i] = score(history, int(row["target"]))
        self._drawn = out.tokens.tolist()
        return out

    def close(self) -> None:
        pass

    def kept(self) -> list[NDArray[np.uint8]]:
        """As of a native executor: its memory of each page, (1, pages, bytes) for tokens and positions."""
        return [a.view(np.uint8)[None] for a in (self._tokens, self._positions)]

    def _store(self, step: StepInputs) -> None:
        self._copy(step)
        holders: dict[int, int] = {}
        for page in step.pages.tolist():
            assert 0 <= page < self.limits.n_pages
            holders[page] = holders.get(page, 0) + 1
        starts, size = step.starts.tolist(), self.limits.page_tokens
        for s, (lo, hi) in enumerate(pairwise(starts)):
            pages, positions = self._table(step, s).tolist(), step.positions[lo:hi].tolist()
            assert hi > lo, "a sequence without tokens"
            first, end = positions[0], positions[0] + hi - lo
            assert positions == list(range(first, end)) and first >= 0 and end <= self.limits.max_context
            assert len(set(pages)) == len(pages) > (end - 1) // size
            for n in range(first // size, (end - 1) // size + 1):
                page, begin = pages[n], max(first, n * size)
                assert holders[page] == 1, "writing a page that others hold"
                if begin == n * size:  # a fresh page: what it held is somebody else's
                    self._positions[page] = -1
                slots = slice(begin - n * size, min(end - n * size, size))
                assert max(self._positions[page, slots].tolist()) == -1, "a position is written once"
                behind = slice(lo + begin - first, lo + begin - first + slots.stop - slots.start)
                self._tokens[page, slots], self._positions[page, slots] = step.tokens[behind], step.positions[behind]

    def _store_states(self, step: StepInputs) -> None:
        assert step.states is not None
        before, behind = step.states.read.tolist(), step.states.write.tolist()
        assert len(set(behind)) == len(behind) and all(0 <= slot < self.limits.n_slots for slot in behind)
        for s, (lo, hi) in enumerate(pairwise(step.starts.tolist())):
            first = int(step.positions[lo])
            others = [slot for other, slot in enumerate(behind) if other != s]
            assert not first or before[s] not in others, "a slot is read that another sequence writes"
            past = list(self._states[before[s]]) if first else []
            assert len(past) == first, "a state of another number of tokens"
            self._states[behind[s]] = past + step.tokens[lo:hi].tolist()

    def _copy(self, step: StepInputs) -> None:
        """Whole pages, what is behind the shared tokens included: it is there to be written over."""
        begun = {}  # page -> the slot at which its sequence writes it
        for s in range(len(step.starts) - 1):
            at = int(step.positions[step.starts[s]])
            begun[int(self._table(step, s)[at // self.limits.page_tokens])] = at % self.limits.page_tokens
        for source, target in () if step.copies is None else step.copies.tolist():
            assert source != target and source not in begun, "a page that is being written is no source"
            held = self._positions[source]
            assert begun[target] > 0, "all of the copied page is written over"
            shared = held[: begun[target]]
            assert (np.diff(shared) == 1).all() and shared[0] % self.limits.page_tokens == 0, (
                "a source has what is read"
            )
            self._tokens[target], self._positions[target] = self._tokens[source], held
            self._positions[target, begun[target] :] = -1

    def _table(self, step: StepInputs, s: int) -> IntArray:
        return step.pages[step.page_starts[s] : step.page_starts[s + 1]]

    def _history(self, step: StepInputs, token: int) -> NDArray[np.int64]:
        """Up to a token of the step."""
        s = int(np.searchsorted(step.starts, token, side="right")) - 1
        n = int(step.positions[token]) + 1
        pages = self._table(step, s)[: -(-n // self.limits.page_tokens)]
        assert self._positions[pages].ravel()[:n].tolist() == list(range(n)), (
            "a position was never computed, or by another sequence"
        )
        history: NDArray[np.int64] = self._tokens[pages].ravel()[:n]
        for memory, window in zip(self._windows, step.windows, strict=True):
            memory.check(window, s, history)
        if self.limits.n_slots and n == int(step.positions[step.starts[s + 1] - 1]) + 1:
            assert step.states is not None
            assert self._states[int(step.states.write[s])] == history.tolist(), "a state of other tokens"
        return history

    def _draw(self, step: StepInputs, row: np.void, history: NDArray[np.int64]) -> int:
        if row["target"] >= 0:
            return -1 if history[0] == POISON else int(row["target"])
        assert row["position"] == len(history)
        n = int(row["history_prompt"] + row["history_output"])
        wants_history = bool(row["presence_penalty"] or row["frequency_penalty"] or row["repetition_penalty"] != 1)
        is_told = wants_history and ((step.embeddings is None and not self.limits.embedding_width) or n > 0)
        assert 0 < n <= len(history) if is_told else n == 0
        if n:
            start = int(row["history_start"])
            assert (step.history[start : start + n] == history[len(history) - n :]).all()
        if history[0] == POISON:
            return -1
        start, count = int(row["bias_start"]), int(row["bias_count"])
        if count:
            token = int(step.bias_ids[start : start + count][np.argmax(step.bias_values[start : start + count])])
        else:
            token = next_token(history, row["temperature"] == 0, int(row["seed"]), int(row["choice"]))
        if not row["mask"]:
            return token
        allowed = np.flatnonzero(unpacked(step.filled_masks()[row["mask"] - 1], self.limits.vocab_size))
        return (
            int(allowed[np.searchsorted(allowed, token) % len(allowed)])
            if len(allowed)
            else SampleError.NOTHING_ALLOWED
        )


def _outputs(step: StepInputs, tokens: list[int]) -> StepOutputs:
    drawn = np.array(tokens, dtype=np.int32)
    n_top = max([0, *step.sampling["n_top"].tolist()])
    top = (drawn[:, None] + np.arange(n_top)) % VOCAB
    return StepOutputs(
        tokens=drawn,
        logprobs=(drawn * -0.125).astype(np.float32),
        ranks=np.ones(len(drawn), dtype=np.int32),
        top_ids=top.astype(np.int32).reshape(len(drawn), n_top),
        top_logprobs=np.full((len(drawn), n_top), -0.5, dtype=np.float32),
    )


class RandomBudget(TokenBudget):
    """Any chunking gives the same answers; so choose any."""

    def __init__(self, max_step_tokens: int, rng: random.Random) -> None:
        super().__init__(max_step_tokens)
        self.rng = rng

    def prefill_tokens(self, n_decode: int, n_pending: int = 1) -> int:
        room = self.max_step_tokens - n_decode
        return self.rng.randint(1, room) if room else 0


def make_loop(
    of: ExecutorLimits = LIMITS,
    before_run: Callable[[StepInputs], None] | None = None,
    clock: Callable[[], float] | None = None,
    budget: TokenBudget | None = None,
    prefix_cache: bool = True,
    policy: Policy = fcfs,
    tier: Path | None = None,
    depth: int = 1,
) -> EngineLoop:
    """tier: the KV offload file; depth: steps under way at a time"""
    defaults, clock = GenerationDefaults(eos_token_ids=(EOS,)), clock or FakeClock(0.001)
    executor = FakeExecutor(of, before_run, depth)
    found = None if tier is None else fake_tier(executor, tier)
    loop = EngineLoop(executor, FakeTokenizer(), defaults, clock, budget, prefix_cache, policy, found)
    loop.grammars._process = compiling()
    return loop


@cache
def compiling() -> GrammarProcess:
    """The process in which grammars are compiled, one for all loops: it starts with the first grammar."""
    return GrammarProcess(VOCAB, {EOS: FakeTokenizer().token_bytes(EOS)}, [EOS], FakeTokenizer().bos_token_id)


def fake_tier(executor: FakeExecutor, path: Path) -> KvOffloadStore:
    """With room for 1,000 pages."""
    memory = PageMemory(executor.kept())
    return KvOffloadStore(path, "a fake", memory, 2 * HEADER.size + 1000 * (RECORD.size + memory.page_bytes))


def expected_choice(prompt: Sequence[int], params: SamplingParams, choice: int, of: ExecutorLimits) -> CompletionOutput:
    """One answer, the plain way: whole histories, whole texts, no pages. Without min_tokens and stop strings."""
    assert params.seed is not None and not params.stop
    history, out, reason, stop = list(prompt), [], "length", None
    bias = max(params.logit_bias, key=lambda i: params.logit_bias[i]) if params.logit_bias else None
    for _ in range(params.max_tokens or of.max_context - len(prompt)):
        token = bias if bias is not None else next_token(history, params.temperature == 0, params.seed, choice)
        history.append(token)
        out.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            reason, stop = "stop", token if token != EOS or params.ignore_eos else None
            break
    shown = out[:-1] if reason == "stop" else out
    data = b"".join(FakeTokenizer().pieces[t] for t in shown if t != EOS)
    text = data.decode("utf-8", "replace")
    return CompletionOutput(choice, text, out, None, None, reason, stop)  # type: ignore[arg-type]  # a str enum


def new_request(
    prompt: Sequence[int],
    params: SamplingParams,
    of: ExecutorLimits,
    defaults: GenerationDefaults | None = None,
    queue_options: QueueOptions = DEFAULT_QUEUE_OPTIONS,
    queued_s: float = 0.0,
) -> Request:
    """As the loop makes one."""
    new_text = partial(AnswerText.for_choice, FakeTokenizer(), list(prompt), params, StopTables(params.stop))
    resolved = resolve(params, defaults or GenerationDefaults(), of, len(prompt))
    timings = Timings(queued_s)
    return Request(
        "r",
        check_prompt(prompt, of),
        resolved,
        lambda deltas: None,
        timings,
        new_text,
        options=RequestOptions(queue_options=queue_options),
    )
