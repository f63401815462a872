"""Engines beside a reference on the same text: perplexity, KL divergence, and how often the likeliest token agrees."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.executor import ExecutorLimits, IntArray, StateSlots, StepInputs, plain_rows
from millrace.errors import MachineError, RequestError

LogProbs = NDArray[np.float32]  # (predicted tokens, vocabulary), natural
Values = NDArray[np.float64]
Reader = Callable[[NDArray[np.int32], int], LogProbs]  # of ids and `first`: `log_probabilities` of some engine
Progress = Callable[[int, int], None]  # sequences done, of so many


class Runs(Protocol):
    """What runs steps of a language model, and keeps the logits of the last one: an executor, or a last piece."""

    limits: ExecutorLimits

    def run(self, step: StepInputs) -> object: ...

    def output(self, name: str) -> NDArray[np.generic]: ...


BLOCK = 1 << 22  # elements of log probabilities that are held in float64 at a time


class Tokens(NamedTuple):
    """Of predicted tokens, (n,) each: the nats that it costs, here and by the reference; KL(reference || this) of the
    distributions at its place; whether their likeliest token is the same."""

    loss: Values
    reference_loss: Values
    divergence: Values
    same: NDArray[np.bool_]


class Mean(NamedTuple):
    """error: standard, as if all values were independent, which llama-perplexity takes them for; None of one value"""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: Values) -> "Mean":
        n = len(values)
        return cls(float(values.mean()), float(values.std(ddof=1)) / n**0.5 if n > 1 else None)

    def through(self, value: float, slope: float) -> "Mean":
        """Of a function of it. value: the function's; slope: its derivative there"""
        return Mean(value, None if self.error is None else abs(slope) * self.error)

    def exp(self) -> "Mean":
        """Infinite where no float64 holds it, as of words that are pages long."""
        with np.errstate(over="ignore"):
            value = float(np.exp(self.value))
        return self.through(value, value)


@dataclass(slots=True)
class DivergenceScore:
    """Predicted tokens beside the reference's; `add` takes more of them. Some 25 bytes a token."""

    parts: list[Tokens] = field(default_factory=list)

    def add(self, log_probs: LogProbs, reference: LogProbs, targets: NDArray[np.int32]) -> None:
        self.parts.append(log_probs_vs_reference(log_probs, reference, targets))

    @property
    def tokens(self) -> Tokens:
        """All of them."""
        return Tokens(*map(np.concatenate, zip(*self.parts, strict=True)))

    @property
    def n(self) -> int:
        return sum(len(part.loss) for part in self.parts)

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.tokens.loss.mean()))

    @property
    def ratio(self) -> float:
        """Of the perplexities, this to the reference's."""
        return float(np.exp((self.tokens.loss - self.tokens.reference_loss).mean()))

    @property
    def mean_kl(self) -> float:
        """KL(reference || this) in nats a token."""
        return float(self.tokens.divergence.mean())

    @property
    def agreement(self) -> float:
        """Share of positions where the likeliest token is the reference's."""
        return float(self.tokens.same.mean())


def log_probs_vs_reference(log_probs: LogProbs, reference: LogProbs, targets: NDArray[np.int32]) -> Tokens:
    """found, reference: (n, vocabulary); targets: the tokens that came"""
    at, divergence = np.arange(len(targets)), np.empty(len(targets))
    rows = max(1, BLOCK // log_probs.shape[1])
    for begin in range(0, len(targets), rows):
        p, q = (x[begin : begin + rows].astype(np.float64) for x in (reference, log_probs))
        divergence[begin : begin + rows] = (np.exp(p) * (p - q)).sum(axis=1)
    same = log_probs.argmax(axis=1) == reference.argmax(axis=1)
    loss, reference_loss = (-x[at, targets].astype(np.float64) for x in (log_probs, reference))
    return Tokens(loss, reference_loss, divergence, same)


def compared(
    reference: Reader, candidates: Mapping[str, Reader], sequences: Sequence[NDArray[np.int32]], first: int,
    progress: Progress | None = None,
) -> dict[str, DivergenceScore]:  # fmt: skip
    """Each of the others beside the reference, which may be one of them: memory holds what is read of one sequence.

    first: tokens behind this position are predicted. raises what the readers raise
    """
    scores = {name: DivergenceScore() for name in candidates}
    for done, ids in enumerate(sequences):
        exact = reference(ids, first)
        for name, read in candidates.items():
            scores[name].add(exact if read is reference else read(ids, first), exact, ids[first + 1 :])
        if progress is not None:
            progress(done + 1, len(sequences))
    return scores


def log_probabilities(executor: Runs, ids: NDArray[np.int32], first: int) -> LogProbs:
    """Of what follows each token of a sequence from position `first` on, but for the last: (n - 1 - first, vocabulary).

    raises RequestError where the executor's context, pages or vocabulary are too small
    """
    log_probs = np.empty((len(ids) - 1 - first, executor.limits.vocab_size), np.float32)
    for at, rows in _steps(executor, ids, first):
        log_probs[at : at + len(rows)] = rows
    return log_probs


def losses(executor: Runs, ids: NDArray[np.int32], first: int) -> Values:
    """The nats that each token behind position `first` costs: (n - 1 - first,), with one step's rows in memory.

    raises as `log_probabilities`, and MachineError where one is not finite
    """
    log_probs, targets = np.empty(len(ids) - 1 - first), ids[first + 1 :]
    for at, rows in _steps(executor, ids, first):
        log_probs[at : at + len(rows)] = -rows[np.arange(len(rows)), targets[at : at + len(rows)]]
    if not np.isfinite(log_probs).all():
        raise not_finite()
    return log_probs


def not_finite() -> MachineError:
    return MachineError(
        "the model's logits are not finite: there is nothing to measure", "finite logits",
        "measure in another --precision, or check the checkpoint",
    )  # fmt: skip


def _steps(executor: Runs, ids: NDArray[np.int32], first: int) -> Iterator[tuple[int, LogProbs]]:
    """(number of the first row, rows) of each step that has some. raises RequestError"""
    limits = executor.limits
    n, room = len(ids), limits.context_tokens
    if n - 1 > room or ids.max() >= limits.vocab_size:
        raise RequestError(
            f"a window of {n} tokens, the largest of them {ids.max()}",
            f"at most {room} tokens, of a vocabulary of {limits.vocab_size}",
            "cut shorter windows, with this model's tokenizer",
        )  # fmt: skip
    at = 0
    while at < n - 1:
        scored = at >= first
        end = min(n - 1, at + (min(limits.max_rows, limits.max_step_tokens) if scored else limits.max_step_tokens))
        end = end if scored else min(end, first)
        executor.run(step_of(ids, at, end, range(end - at) if scored else ()))
        if scored:
            yield at - first, log_softmax(executor.output("logits"))
        at = end


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


def packed_step(
    parts: Sequence[tuple[IntArray, int, Sequence[int]]], rows: Sequence[int], states: StateSlots | None = None
) -> StepInputs:
    """Return a step whose page numbers are the same in all cache groups.

    parts: of each sequence (its tokens, position of the first, its pages); rows: tokens whose logits are wanted
    """
    sampling = plain_rows(len(rows))
    sampling["token"] = rows
    empty = np.zeros(0, np.int32)
    return StepInputs(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(at, at + len(tokens), dtype=np.int32) for tokens, at, _ in parts]),
        starts=_sums(len(tokens) for tokens, _, _ in parts),
        pages=np.concatenate([np.asarray(pages, np.int32) for _, _, pages in parts]),
        page_starts=_sums(len(pages) for _, _, pages in parts), sampling=sampling, history=empty, bias_ids=empty,
        bias_values=np.zeros(0, np.float32), states=states,
    )  # fmt: skip


def _sums(counts: Iterable[int]) -> IntArray:
    return np.cumsum([0, *counts]).astype(np.int32)
