"""Compares a model's distributions with a reference's on a text, like `llama-perplexity --kl-divergence`."""

from dataclasses import dataclass

import msgspec
import numpy as np

from millrace.compile.settings import Progress
from millrace.errors import ConfigError
from millrace.evaluate.divergence import (
    DivergenceScore,
    Mean,
    StepRunner,
    Tokens,
    log_probabilities,
    log_probs_vs_reference,
    not_finite,
)
from millrace.evaluate.resumable_results import Key, ResumableResults
from millrace.evaluate.text_windows import Windows

_MAX_BYTES = 2 << 30  # limit for the log probabilities of one window, of both models
_DIGITS = 9  # stored decimals: far below the resolution of float32


class AgreementReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values of each scored token of a window; see `Tokens`."""

    number: int
    loss: list[float]
    reference_loss: list[float]
    divergence: list[float]
    same: list[bool]

    @property
    def key(self) -> Key:
        return "", self.number

    @property
    def tokens(self) -> Tokens:
        loss, reference, divergence = (np.asarray(v) for v in (self.loss, self.reference_loss, self.divergence))
        return Tokens(loss, reference, divergence, np.asarray(self.same, np.bool_))


@dataclass(frozen=True, slots=True)
class Agreement:
    """divergence: KL(reference || model) in nats; change: of the probability of the actual token.

    at: quantiles of the divergence, by share of tokens
    """

    n: int
    perplexity: Mean
    reference_perplexity: Mean
    ratio: Mean  # of the perplexities
    divergence: Mean
    at: dict[float, float]
    same: Mean  # share of positions with the same top-1 token
    change: Mean
    rms_change: Mean


_SHARES = (0.5, 0.99, 1.0)


def agreement(tokens: Tokens) -> Agreement:
    """Summarize tokens, at least one."""
    loss, reference, divergence, same = tokens
    change = np.exp(-loss) - np.exp(-reference)
    squares = Mean.from_values(np.square(change))
    rms = squares.value**0.5
    return Agreement(
        n=len(loss), perplexity=Mean.from_values(loss).exp(), reference_perplexity=Mean.from_values(reference).exp(),
        ratio=Mean.from_values(loss - reference).exp(), divergence=Mean.from_values(divergence),
        at={share: float(np.quantile(divergence, share)) for share in _SHARES},
        same=Mean.from_values(same.astype(np.float64)),
        change=Mean.from_values(change), rms_change=squares.through(rms, 0.5 / rms if rms else 0.0),
    )  # fmt: skip


def check_window(length: int, vocab_size: int) -> None:
    """Raise ConfigError if the scored half of a window takes too much memory."""
    row = 2 * 4 * vocab_size  # bytes per token, in float32
    row_bytes, fitting = (length - 1 - length // 2) * row, 2 * (_MAX_BYTES // row) + 2
    if row_bytes > _MAX_BYTES:
        raise ConfigError(
            f"a window of {length:,} tokens takes {row_bytes:,} bytes of log probabilities, of both models",
            f"at most {_MAX_BYTES:,} bytes: {fitting:,} tokens", f"choose a shorter one: --window {fitting}",
        )  # fmt: skip


def compare(
    executor: StepRunner,
    reference: StepRunner,
    text: Windows,
    limit: int | None,
    results: ResumableResults[AgreementReport],
    progress: Progress,
) -> Tokens:
    """Compare all tokens of the first `limit` windows; runs both models on the windows that the results lack.

    raises RequestError if an executor cannot process a window, MachineError if values are not finite
    """
    windows = text.ids[:limit]
    for number, ids in enumerate(windows):
        progress("reading windows, twice", number, len(windows))
        if ("", number) not in results.records:
            exact, result = (log_probabilities(one, ids, text.first) for one in (reference, executor))
            if not (np.isfinite(exact).all() and np.isfinite(result).all()):
                raise not_finite()
            results.add(_report(number, log_probs_vs_reference(result, exact, ids[text.first + 1 :])))
    progress("reading windows, twice", len(windows), len(windows))
    return DivergenceScore([results.records["", number].tokens for number in range(len(windows))]).tokens


def _report(number: int, tokens: Tokens) -> AgreementReport:
    loss, reference, divergence = (np.round(v, _DIGITS).tolist() for v in tokens[:3])
    return AgreementReport(number, loss, reference, divergence, tokens.same.tolist())
