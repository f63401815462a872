"""Engines beside a reference on the same text: perplexity, KL divergence, and how often the likeliest token agrees."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import ExecutorLimits, IntArray, StepInputs, plain_rows
from millrace.engine.kv import PAGE_TOKENS
from millrace.errors import RequestError

LogProbs = NDArray[np.float32]  # (predicted tokens, vocabulary), natural
Reader = Callable[[NDArray[np.int32], int], LogProbs]  # of ids and `first`: `log_probabilities` of some engine
Progress = Callable[[int, int], None]  # sequences done, of so many


class Runs(Protocol):
    """What runs steps of a language model, and keeps the logits of the last one: an executor, or a last piece."""

    limits: ExecutorLimits

    def run(self, step: StepInputs) -> object: ...

    def output(self, name: str) -> NDArray[np.generic]: ...


_BLOCK = 1 << 22  # elements of log probabilities that are held in float64 at a time


@dataclass(slots=True)
class Score:
    """Sums over predicted tokens; `add` takes more of them."""

    n: int = 0
    loss: float = 0.0  # nats
    reference_loss: float = 0.0
    divergence: float = 0.0
    same: int = 0

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss / self.n))

    @property
    def ratio(self) -> float:
        """Of the perplexities, this to the reference's."""
        return float(np.exp((self.loss - self.reference_loss) / self.n))

    @property
    def mean_kl(self) -> float:
        """KL(reference || this) in nats a token."""
        return self.divergence / self.n

    @property
    def agreement(self) -> float:
        """Share of positions where the likeliest token is the reference's."""
        return self.same / self.n

    def add(self, found: LogProbs, reference: LogProbs, targets: NDArray[np.int32]) -> None:
        at = np.arange(len(targets))
        self.n += len(targets)
        self.loss -= float(found[at, targets].sum(dtype=np.float64))
        self.reference_loss -= float(reference[at, targets].sum(dtype=np.float64))
        self.same += int((found.argmax(axis=1) == reference.argmax(axis=1)).sum())
        rows = max(1, _BLOCK // found.shape[1])
        for begin in range(0, len(targets), rows):
            p, q = (x[begin : begin + rows].astype(np.float64) for x in (reference, found))
            self.divergence += float((np.exp(p) * (p - q)).sum())


def compared(
    reference: Reader, others: Mapping[str, Reader], sequences: Sequence[NDArray[np.int32]], first: int,
    progress: Progress | None = None,
) -> dict[str, Score]:  # fmt: skip
    """Each of the others beside the reference, which may be one of them: memory holds what is read of one sequence.

    first: tokens behind this position are predicted. raises what the readers raise
    """
    scores = {name: Score() for name in others}
    for done, ids in enumerate(sequences):
        exact = reference(ids, first)
        for name, read in others.items():
            scores[name].add(exact if read is reference else read(ids, first), exact, ids[first + 1 :])
        if progress is not None:
            progress(done + 1, len(sequences))
    return scores


def log_probabilities(executor: Runs, ids: NDArray[np.int32], first: int) -> LogProbs:
    """Of what follows each token of a sequence from position `first` on, but for the last: (n - 1 - first, vocabulary).

    raises RequestError where the executor's context, pages or vocabulary are too small
    """
    limits = executor.limits
    n, room = len(ids), limits.context_tokens
    if n > room or ids.max() >= limits.vocab_size:
        raise RequestError(
            f"a window of {n} tokens, the largest of them {ids.max()}",
            f"at most {room} tokens, of a vocabulary of {limits.vocab_size}",
            "cut shorter windows, with this model's tokenizer",
        )  # fmt: skip
    found = np.empty((n - 1 - first, limits.vocab_size), np.float32)
    at = 0
    while at < n - 1:
        scored = at >= first
        end = min(n - 1, at + (min(limits.max_rows, limits.max_step_tokens) if scored else limits.max_step_tokens))
        end = end if scored else min(end, first)
        executor.run(step_of(ids, at, end, range(end - at) if scored else ()))
        if scored:
            found[at - first : end - first] = log_softmax(executor.output("logits"))
        at = end
    return found


def log_softmax(logits: NDArray[np.generic]) -> LogProbs:
    """(rows, vocabulary); sums in float64."""
    x = logits.astype(np.float32)
    x -= x.max(axis=1, keepdims=True)
    total = np.exp(x).sum(axis=1, dtype=np.float64)
    x -= np.log(total).astype(np.float32)[:, None]
    return x


def step_of(ids: NDArray[np.int32], at: int, end: int, rows: Sequence[int]) -> StepInputs:
    """Tokens at .. end of the one sequence that there is. rows: those whose logits are wanted"""
    return packed_step([(ids[at:end], at, range(-(-end // PAGE_TOKENS)))], rows)


def packed_step(parts: Sequence[tuple[IntArray, int, Sequence[int]]], rows: Sequence[int]) -> StepInputs:
    """parts: of each sequence (its tokens, position of the first, its pages); rows: tokens whose logits are wanted"""
    sampling = plain_rows(len(rows))
    sampling["token"] = rows
    empty = np.zeros(0, np.int32)
    return StepInputs(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(at, at + len(tokens), dtype=np.int32) for tokens, at, _ in parts]),
        starts=_sums(len(tokens) for tokens, _, _ in parts),
        pages=np.concatenate([np.asarray(pages, np.int32) for _, _, pages in parts]),
        page_starts=_sums(len(pages) for _, _, pages in parts), sampling=sampling, history=empty, bias_ids=empty,
        bias_values=np.zeros(0, np.float32),
    )  # fmt: skip


def _sums(counts: Iterable[int]) -> IntArray:
    return np.cumsum([0, *counts]).astype(np.int32)
