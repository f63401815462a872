"""Compares engines with a reference on the same text: perplexity, KL divergence, and top-1 agreement."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.engine.cache_specs import PAGE_TOKENS
from millrace.engine.executor import ExecutorLimits, IntArray, StateSlots, StepInputs, plain_rows
from millrace.errors import MachineError, RequestError

LogProbs = NDArray[np.float32]  # (predicted tokens, vocabulary), natural logarithms
Values = NDArray[np.float64]
Reader = Callable[[NDArray[np.int32], int], LogProbs]  # (ids, first) -> `log_probabilities` of some engine
Progress = Callable[[int, int], None]  # sequences done, total


class StepRunner(Protocol):
    """Runs steps of a language model and keeps the logits of the last one: an executor, or a model's last piece."""

    limits: ExecutorLimits

    def run(self, step: StepInputs) -> object: ...

    def output(self, name: str) -> NDArray[np.generic]: ...


BLOCK = 1 << 22  # elements of log probabilities to convert to float64 at a time


class Tokens(NamedTuple):
    """Values of predicted tokens, (n,) each.

    They are the loss in nats of the model and of the reference, KL(reference || model) of the distributions at that
    position, and whether their top-1 tokens agree.
    """

    loss: Values
    reference_loss: Values
    divergence: Values
    same: NDArray[np.bool_]


class Mean(NamedTuple):
    """A mean. error: standard error, assuming independent values like llama-perplexity; None for a single value"""

    value: float
    error: float | None

    @classmethod
    def from_values(cls, values: Values) -> "Mean":
        n = len(values)
        return cls(float(values.mean()), float(values.std(ddof=1)) / n**0.5 if n > 1 else None)

    def through(self, value: float, slope: float) -> "Mean":
        """Propagate to a function of the mean. value: the function's; slope: its derivative there"""
        return Mean(value, None if self.error is None else abs(slope) * self.error)

    def exp(self) -> "Mean":
        """Return the exponential; infinite if it overflows, as for words that are pages long."""
        with np.errstate(over="ignore"):
            value = float(np.exp(self.value))
        return self.through(value, value)


@dataclass(slots=True)
class DivergenceScore:
    """Comparison of predicted tokens with the reference's, extended by `add`. Uses about 25 bytes per token."""

    parts: list[Tokens] = field(default_factory=list)

    def add(self, log_probs: LogProbs, reference: LogProbs, targets: NDArray[np.int32]) -> None:
        self.parts.append(log_probs_vs_reference(log_probs, reference, targets))

    @property
    def tokens(self) -> Tokens:
        """Return the values of all tokens."""
        return Tokens(*map(np.concatenate, zip(*self.parts, strict=True)))

    @property
    def n(self) -> int:
        return sum(len(part.loss) for part in self.parts)

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.tokens.loss.mean()))

    @property
    def ratio(self) -> float:
        """Return the ratio of the perplexities, the model's to the reference's."""
        return float(np.exp((self.tokens.loss - self.tokens.reference_loss).mean()))

    @property
    def mean_kl(self) -> float:
        """Return the mean KL(reference || model) in nats per token."""
        return float(self.tokens.divergence.mean())

    @property
    def agreement(self) -> float:
        """Return the share of positions with the same top-1 token as the reference."""
        return float(self.tokens.same.mean())


def log_probs_vs_reference(log_probs: LogProbs, reference: LogProbs, targets: NDArray[np.int32]) -> Tokens:
    """Compare log probabilities (n, vocabulary) with the reference's. targets: (n,) tokens that actually follow"""
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
    """Compare each candidate with the reference, which may be one of them. Memory: the results of one sequence.

    first: tokens after this position are predicted. raises the readers' errors
    """
    scores = {name: DivergenceScore() for name in candidates}
    for done, ids in enumerate(sequences):
        exact = reference(ids, first)
        for name, read in candidates.items():
            scores[name].add(exact if read is reference else read(ids, first), exact, ids[first + 1 :])
        if progress is not None:
            progress(done + 1, len(sequences))
    return scores


def log_probabilities(executor: StepRunner, ids: NDArray[np.int32], first: int) -> LogProbs:
    """Return log probabilities of the tokens after position `first`: (n - 1 - first, vocabulary).

    raises RequestError if the executor's context, pages or vocabulary are too small
    """
    log_probs = np.empty((len(ids) - 1 - first, executor.limits.vocab_size), np.float32)
    for at, rows in _steps(executor, ids, first):
        log_probs[at : at + len(rows)] = rows
    return log_probs


def losses(executor: StepRunner, ids: NDArray[np.int32], first: int) -> Values:
    """Return the loss in nats of each token after position `first`: (n - 1 - first,). Memory: one step's rows.

    raises as `log_probabilities`, and MachineError if a loss is not finite
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


def _steps(executor: StepRunner, ids: NDArray[np.int32], first: int) -> Iterator[tuple[int, LogProbs]]:
    """Yield (number of the first row, rows) of each step that has rows. raises RequestError"""
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
    """Return log probabilities, (rows, vocabulary); sums are float64."""
    x = logits.astype(np.float32)
    x -= x.max(axis=1, keepdims=True)
    total = np.exp(x).sum(axis=1, dtype=np.float64)
    x -= np.log(total).astype(np.float32)[:, None]
    return x


def step_of(ids: NDArray[np.int32], at: int, end: int, rows: Sequence[int]) -> StepInputs:
    """Return a step with tokens at .. end of a single sequence. rows: tokens whose logits are needed"""
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
