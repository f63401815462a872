"""Sampling on a device: all rows at once, in the order of kernels/sample/ref.py, with its counter-based generator."""

from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.cuda.host_device_copy import on_device
from millrace.engine.executor import SAMPLING, SampleError, StepInputs

GREEDY_BELOW = 1e-5  # a temperature
_ROUNDS, _MASK = 10, 0xFFFFFFFF


class SampledTokens(NamedTuple):
    """The fields of StepOutputs, on the device, or on the host if they are empty."""

    tokens: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Draw(Protocol):
    """A kernel that draws tokens: kernels/sample/cuda.py."""

    def __call__(self, p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor, /) -> Tensor: ...


class ArgmaxFn(Protocol):
    """A kernel that finds the most likely token: kernels/sample/cuda.py."""

    def __call__(self, logits: Tensor, wrong: int, /) -> Tensor: ...


class SamplingMode(Enum):
    """How all rows of a step are drawn that need nothing else."""

    LIKELIEST = auto()
    RANDOM = auto()  # for rows with a temperature


def sampling_mode(step: StepInputs) -> SamplingMode | None:
    """Return the mode of a step; None if a row needs log probabilities, a mask, a bias or penalties."""
    rows = step.sampling
    plain = (
        (rows["n_top"] < 0) & (rows["target"] < 0) & (rows["mask"] == 0) & (rows["bias_count"] == 0) & _neutral(rows)
    )
    if not plain.all():
        return None
    return SamplingMode.RANDOM if (rows["temperature"] >= GREEDY_BELOW).any() else SamplingMode.LIKELIEST


def _neutral(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which rows have no penalties."""
    result: NDArray[np.bool_] = (
        (rows["repetition_penalty"] == 1) & (rows["presence_penalty"] == 0) & (rows["frequency_penalty"] == 0)
    )
    return result


FIELDS = SAMPLING.names or ()


def as_lines(rows: NDArray[np.void], target: NDArray[np.float64]) -> None:
    """Write each field into a line of `target` (FIELDS, R); float64 represents int32, float32 and a seed's bits."""
    for line, name in zip(target, FIELDS, strict=True):
        line[:] = rows[name].copy().view(np.float64) if name == "seed" else rows[name]


class Rows:
    """The sampling parameters of R rows on the device: (FIELDS, R) float64."""

    def __init__(self, table: Tensor) -> None:
        self.device, self._lines = table.device, dict(zip(FIELDS, table, strict=True))

    @classmethod
    def copy_to_device(cls, rows: NDArray[np.void], device: torch.device) -> "Rows":
        """Copy rows to the device at once."""
        table = np.empty((len(FIELDS), len(rows)), np.float64)
        as_lines(rows, table)
        return cls(on_device(table, device))

    def column(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a field (R, 1)."""
        return self._lines[name].to(dtype)[:, None]

    @property
    def seeds(self) -> Tensor:
        """Return the bits of the seeds (R,) as int64."""
        return self._lines["seed"].view(torch.int64)


def tokens_alone(tokens: Tensor) -> SampledTokens:
    """Return outputs with tokens (R,) int32 only; the other fields are on the host."""
    n = len(tokens)
    none, no_ids = torch.zeros(n, dtype=torch.int32), torch.zeros((n, 0), dtype=torch.int32)
    return SampledTokens(tokens, torch.zeros(n), none, no_ids, torch.zeros((n, 0)))


def draw_tokens(logits: Tensor, rows: Rows, mode: SamplingMode, draw: Draw, best: ArgmaxFn) -> Tensor:
    """Return the tokens (R,) int32 of logits (R, V), in any float type, for rows of a `SamplingMode`.

    Does not synchronize, and its shapes do not depend on data.
    """
    tokens = best(logits, SampleError.NOT_FINITE.value)
    if mode is SamplingMode.RANDOM:
        sampled = _draw(logits.double(), rows, draw).int()
        is_drawn = (rows.column("temperature")[:, 0] >= GREEDY_BELOW) & (tokens != SampleError.NOT_FINITE)
        tokens = torch.where(is_drawn, sampled, tokens)
    return tokens


def sample(logits: Tensor, step: StepInputs, draw: Draw, history: Tensor) -> SampledTokens:
    """Return the tokens of logits (R, V) float32, one row per sampling row of the step, with any parameters.

    history: (tokens,) int32 that penalties count

    Log probabilities are computed only if a row needs them, and random draws only if a row has a temperature.
    """
    rows, params = Rows.copy_to_device(step.sampling, logits.device), step.sampling
    V = logits.shape[1]
    finite = logits.isfinite().all(1)
    masked = logits if step.masks is None else logits.masked_fill(~allowed(step, rows, V), -torch.inf)
    good = finite & masked.isfinite().any(1)
    tokens = _tokens(masked, step, rows, draw, history)
    wrong = torch.where(
        finite, torch.full_like(tokens, SampleError.NOTHING_ALLOWED), torch.full_like(tokens, SampleError.NOT_FINITE)
    )
    sampled = torch.where(good, tokens, wrong).int()
    if (params["n_top"] < 0).all():
        return tokens_alone(sampled)
    return _with_logprobs(sampled, tokens, masked, good, rows, max(int(params["n_top"].max()), 0))


def _tokens(masked: Tensor, step: StepInputs, rows: Rows, draw: Draw, history: Tensor) -> Tensor:
    """Return the drawn or scored tokens (R,); arbitrary for rows that fail."""
    parameters, adjusted = step.sampling, _adjusted(masked, step, rows, history)
    tokens = adjusted.argmax(1)
    if (parameters["temperature"] >= GREEDY_BELOW).any():
        sampled = _draw(adjusted.double(), rows, draw)
        tokens = torch.where(rows.column("temperature")[:, 0] >= GREEDY_BELOW, sampled, tokens)
    target = rows.column("target", torch.int64)[:, 0]
    return torch.where(target >= 0, target, tokens)


def _with_logprobs(
    sampled: Tensor, tokens: Tensor, masked: Tensor, good: Tensor, rows: Rows, top: int
) -> SampledTokens:
    """Add log probabilities. top: most alternatives of any row"""
    logp = masked.double().log_softmax(1)
    chosen = masked.gather(1, tokens[:, None])
    best_logits, best = top_values(masked, top)
    n_top = rows.column("n_top", torch.int64).clamp(min=0)
    requested = (torch.arange(top, device=rows.device)[None] < n_top) & good[:, None]
    reported = requested & best_logits.isfinite()
    return SampledTokens(
        sampled,
        torch.where(good, logp.gather(1, tokens[:, None])[:, 0], 0).float(),
        torch.where(good, 1 + (masked > chosen).sum(1), 0).int(),
        torch.where(reported, best, torch.where(requested, -1, 0)).int(),
        torch.where(reported, logp.gather(1, best), 0).float(),
    )


def top_values(masked: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the `top` largest values of each row and their ids; among equals the lower id first, unlike `topk`."""
    V = masked.shape[1]
    if not top:
        return masked[:, :0], masked[:, :0].long()
    values, ids = masked.topk(min(top, V), dim=1)
    least = values[:, -1:]
    above = values > least  # these all belong; the rest are the first ids whose value equals `least`
    order = torch.where(masked == least, torch.arange(V, 0, -1, device=masked.device)[None], 0)
    ties = order.topk(values.shape[1], dim=1).indices
    n = above.sum(1, keepdim=True)
    place = torch.arange(values.shape[1], device=masked.device)[None]
    ids = torch.where(above, ids, ties.gather(1, (place - n).clamp(min=0)))
    by_ids = ids.sort(dim=1).values
    result, at = masked.gather(1, by_ids).sort(dim=1, descending=True, stable=True)
    return result, by_ids.gather(1, at)


def allowed(step: StepInputs, rows: Rows, vocab: int) -> Tensor:
    """Return the mask (R, V); all true for a row without one."""
    masks = on_device(step.filled_masks().view(np.int32), rows.device)
    tokens, number = torch.arange(vocab, device=rows.device), rows.column("mask", torch.int64)
    words = masks[(number[:, 0] - 1).clamp(min=0)][:, tokens // 32]
    return ((words >> (tokens % 32)) & 1).bool() | (number == 0)


def _adjusted(logits: Tensor, step: StepInputs, rows: Rows, history: Tensor) -> Tensor:
    """Apply biases, then penalties; in float64, if there are any."""
    parameters, result = step.sampling, logits
    if parameters["bias_count"].any():
        index, at = _ranges(parameters["bias_start"], parameters["bias_count"], rows.device)
        ids, values = (on_device(x[at], rows.device) for x in (step.bias_ids, step.bias_values))
        result = result.double().index_put((index, ids.long()), values.double(), accumulate=True)
    if _neutral(parameters).all():
        return result
    result = result.double()
    counts = [torch.zeros(result.shape, dtype=torch.float64, device=rows.device) for _ in range(2)]
    starts = parameters["history_start"], parameters["history_start"] + parameters["history_prompt"]
    for count, start, n in zip(
        counts, starts, (parameters["history_prompt"], parameters["history_output"]), strict=True
    ):
        index, at = _ranges(start, n, rows.device)
        ids = history[on_device(at, rows.device)].long()
        count.index_put_((index, ids), torch.ones_like(ids, dtype=torch.float64), accumulate=True)
    prompt, output = counts
    repetition = rows.column("repetition_penalty").double()
    penalised = torch.where(result > 0, result / repetition, result * repetition)
    result = torch.where(prompt + output > 0, penalised, result)
    return result - rows.column("presence_penalty") * (output > 0) - rows.column("frequency_penalty") * output


def _ranges(
    starts: NDArray[np.int32], counts: NDArray[np.int32], device: torch.device
) -> tuple[Tensor, NDArray[np.int64]]:
    """Return for each element of R ranges its row, and its position."""
    row = np.repeat(np.arange(len(counts)), counts)
    at = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
    return on_device(row, device), at.astype(np.int64)


def _draw(logits: Tensor, rows: Rows, draw: Draw) -> Tensor:
    """Return drawn tokens (R,) of logits (R, V) float64."""
    temperature = rows.column("temperature").double().clamp(min=GREEDY_BELOW)
    p = logits.sub(logits.amax(1, keepdim=True)).div_(temperature).exp_()
    top_p, min_p = (rows.column(name)[:, 0].double() for name in ("top_p", "min_p"))
    return draw(p, rows.column("top_k", torch.int64)[:, 0], top_p, min_p, uniform(rows))


def uniform(rows: Rows) -> Tensor:
    """(R,) in [0, 1), 53 bits: Philox 4x32-10 (Salmon et al., SC 2011), key = seed, counter = (position, choice, 0, 0).

    Words of 32 bits in int64: products wrap, and their upper halves come back by a shift and a mask.
    """
    seed = rows.seeds
    position, choice = (rows.column(name, torch.int64)[:, 0] & _MASK for name in ("position", "choice"))
    zero = torch.zeros_like(position)
    c, key = [position, choice, zero, zero], [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) & _MASK ^ c[1] ^ key[0], b & _MASK, (a >> 32) & _MASK ^ c[3] ^ key[1], a & _MASK]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return ((c[0] << 21) | (c[1] >> 11)).double() * 2.0**-53
