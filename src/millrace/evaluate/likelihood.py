"""Likelihoods of given endings after a context, for multiple-choice tasks.

Common prefixes are computed once: all contexts of a call share the full KV pages of their common prefix, and the state
after it. A step may have any number of sequences, each with separate pages.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.engine.executor import ExecutorLimits, IntArray, StateSlots
from millrace.errors import RequestError
from millrace.evaluate.divergence import LogProbs, StepRunner, log_softmax, packed_step

_BEGIN_SLOT = 0  # the slot of the state after the common prefix


@dataclass(frozen=True, slots=True)
class LikelihoodQuestion:
    """A context of at least one token, and its possible endings of at least one token each."""

    context: Sequence[int]
    endings: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """logprob: natural, of the whole ending; greedy: whether each of its tokens is the top-1 token"""

    logprob: float
    greedy: bool


@dataclass(slots=True)
class _ScoredSequence:
    """A sequence to process; row i of its logits predicts the token after ids[first + i]."""

    ids: IntArray
    first: int
    targets: list[tuple[int, int, int]]  # (index of the ending, row, token)
    questions: int
    at: int = 0  # tokens done, including shared ones
    pages: list[int] = field(default_factory=list)  # its own pages, after the shared ones
    slot: int = -1  # of its state, while it runs; -1: none


def likelihoods(
    executor: StepRunner, questions: Sequence[LikelihoodQuestion]
) -> Iterator[tuple[int, list[Likelihood]]]:
    """Yield (index of a context, likelihoods of its endings) as each is known, in any order.

    raises RequestError, before anything runs, if one exceeds the executor's context or pages, or has an invalid token
    """
    sequences = list(_sequences(questions))
    _check(executor.limits, sequences)
    result = [[Likelihood(0.0, True) for _ in one.endings] for one in questions]
    n_open = Counter(s.questions for s in sequences)
    for ended, scored in _LikelihoodRun(executor, sequences).steps() if sequences else ():
        for s, first, logprobs in scored:
            for ending, row, token in s.targets:
                if first <= row < first + len(logprobs):
                    line, old = logprobs[row - first], result[s.questions][ending]
                    best = old.greedy and bool(line.argmax() == token)
                    result[s.questions][ending] = Likelihood(old.logprob + float(line[token]), best)
        for s in ended:
            n_open[s.questions] -= 1
            if not n_open[s.questions]:
                yield s.questions, result[s.questions]


def _sequences(questions: Sequence[LikelihoodQuestion]) -> Iterator[_ScoredSequence]:
    """Yield sequences: all endings of a single token share one row; each longer ending is a separate sequence."""
    for i, one in enumerate(questions):
        if not len(one.context) or not all(map(len, one.endings)):
            raise RequestError("a context or an ending is empty", "at least one token of each", "leave it out")
        first, short = len(one.context) - 1, [k for k, e in enumerate(one.endings) if len(e) == 1]
        if short:
            targets = [(k, 0, int(one.endings[k][0])) for k in short]
            yield _ScoredSequence(np.asarray(one.context, np.int32), first, targets, i)
        for k, ending in enumerate(one.endings):
            if len(ending) > 1:
                ids = np.asarray([*one.context, *ending[:-1]], np.int32)
                yield _ScoredSequence(ids, first, [(k, row, int(token)) for row, token in enumerate(ending)], i)


def _check(limits: ExecutorLimits, sequences: Sequence[_ScoredSequence]) -> None:
    room = limits.context_tokens
    for s in sequences:
        tokens = [int(s.ids.min()), int(s.ids.max()), *(token for _, _, token in s.targets)]
        if len(s.ids) > room or min(tokens) < 0 or max(tokens) >= limits.vocab_size:
            raise RequestError(
                f"a text of {len(s.ids)} tokens, which go from {min(tokens)} to {max(tokens)}",
                f"at most {room} tokens, of a vocabulary of {limits.vocab_size}",
                "shorten it, with this model's tokenizer",
            )


class _LikelihoodRun:
    """Runs all sequences: first their common prefix, then in each step as much of the next ones as fits."""

    def __init__(self, executor: StepRunner, sequences: Sequence[_ScoredSequence]) -> None:
        self._executor, self._limits, self._waiting = executor, executor.limits, deque(sequences)
        size = self._limits.page_tokens
        self._n_shared = _shared(sequences) // size * size
        self._free = list(range(self._n_shared // size, self._limits.n_pages))
        self._shared_pages = list(range(self._n_shared // size))
        self._slots = list(range(_BEGIN_SLOT + 1, self._limits.n_slots))
        self._begin = sequences[0].ids[: self._n_shared] if self._n_shared else np.zeros(0, np.int32)

    def steps(self) -> Iterator[tuple[list[_ScoredSequence], list[tuple[_ScoredSequence, int, LogProbs]]]]:
        """Yield per step: finished sequences, and (sequence, number of the first row, log probabilities)."""
        for at in range(0, self._n_shared, self._limits.max_step_tokens):
            end = min(self._n_shared, at + self._limits.max_step_tokens)
            states = self._states([_BEGIN_SLOT], [_BEGIN_SLOT])
            self._executor.run(packed_step([(self._begin[at:end], at, self._shared_pages)], [], states))
        for s in self._waiting:
            s.at = self._n_shared
        while self._waiting:
            parts = self._next()
            tokens, rows, targets = 0, list[int](), list[tuple[_ScoredSequence, int, int]]()
            for s, end in parts:
                first = max(s.at, s.first)
                rows += range(tokens + first - s.at, tokens + end - s.at)
                targets.append((s, first - s.first, max(0, end - first)))
                tokens += end - s.at
            pages = self._shared_pages
            read = [_BEGIN_SLOT if s.at == self._n_shared else s.slot for s, _ in parts]
            states = self._states(read, [s.slot for s, _ in parts])
            packed = [(s.ids[s.at : end], s.at, [*pages, *s.pages]) for s, end in parts]
            self._executor.run(packed_step(packed, rows, states))
            logits = log_softmax(self._executor.output("logits")) if rows else np.zeros((0, 0), np.float32)
            at, scored, done = 0, list[tuple[_ScoredSequence, int, LogProbs]](), list[_ScoredSequence]()
            for (s, row, n), (_, end) in zip(targets, parts, strict=True):
                if n:
                    scored.append((s, row, logits[at : at + n]))
                at, s.at = at + n, end
                if end == len(s.ids):
                    done.append(s)
                    self._free += s.pages
                    self._slots += [s.slot] if s.slot >= 0 else []
                    self._waiting.popleft()
            yield done, scored

    def _states(self, read: list[int], write: list[int]) -> StateSlots | None:
        return StateSlots(np.array(read, np.int32), np.array(write, np.int32)) if self._limits.n_slots else None

    def _next(self) -> list[tuple[_ScoredSequence, int]]:
        """Return (sequence, its end in this step) in order; all except the last one finish in this step."""
        limits, parts = self._limits, list[tuple[_ScoredSequence, int]]()
        tokens, rows = limits.max_step_tokens, min(limits.max_rows, limits.max_step_tokens)
        for s in list(self._waiting)[: limits.max_sequences]:
            end = min(len(s.ids), s.at + tokens, max(s.first, s.at) + rows)
            needed = -(-end // limits.page_tokens) - len(self._shared_pages) - len(s.pages)
            if end == s.at or needed > len(self._free):
                break
            s.pages += (self._free.pop() for _ in range(needed))
            if s.slot < 0 and self._slots:
                s.slot = self._slots.pop()
            parts.append((s, end))
            tokens -= end - s.at
            rows -= max(0, end - max(s.first, s.at))
            if end < len(s.ids):
                break
        return parts


def _shared(sequences: Sequence[_ScoredSequence]) -> int:
    """Return the length of the common prefix, without tokens whose logits are needed."""
    first, *rest = sequences
    n = min(s.first for s in sequences)
    for s in rest:
        differs = np.flatnonzero(s.ids[:n] != first.ids[:n])
        n = int(differs[0]) if len(differs) else n
    return n if rest else 0
