"""Sampling on a device: all rows at once, in the order of kernels/sample/ref.py, with its counter-based draws."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.executor import NOT_FINITE, NOTHING_ALLOWED, IntArray, StepInputs, StepOutputs

GREEDY_BELOW = 1e-5  # a temperature
_ROUNDS, _MASK = 10, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Rows:
    """What R rows ask for, as columns (R, 1) on the device."""

    of: NDArray[np.void]
    device: torch.device

    def column(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(self.of[name].astype(np.int64 if dtype == torch.int64 else np.float32)).to(
            self.device, dtype
        )[:, None]


def sample(logits: Tensor, step: StepInputs) -> StepOutputs:
    """logits (R, V) float32, one row for each of the step's sampling rows"""
    rows, of = Rows(step.sampling, logits.device), step.sampling
    V = logits.shape[1]
    finite = logits.isfinite().all(1)
    seen = logits if step.masks is None else logits.masked_fill(~allowed(step, rows, V), -torch.inf)
    possible = seen.isfinite().any(1)
    logp = seen.double().log_softmax(1)
    adjusted = _adjusted(seen, step, rows)
    tokens = adjusted.argmax(1)
    if (of["temperature"] >= GREEDY_BELOW).any():
        drawn = draw(adjusted, rows)
        tokens = torch.where(rows.column("temperature")[:, 0] >= GREEDY_BELOW, drawn, tokens)
    target = rows.column("target", torch.int64)[:, 0]
    tokens = torch.where(target >= 0, target, tokens)
    chosen = seen.gather(1, tokens[:, None])
    top = max(int(of["n_top"].max(initial=0)), 0)
    best_logits, best = seen.sort(dim=1, descending=True, stable=True)
    best_logits, best = best_logits[:, :top], best[:, :top]
    n_top = rows.column("n_top", torch.int64).clamp(min=0)
    asked = (torch.arange(top, device=logits.device)[None] < n_top) & (finite & possible)[:, None]
    told = asked & best_logits.isfinite()
    wrong = torch.where(finite, torch.full_like(tokens, NOTHING_ALLOWED), torch.full_like(tokens, NOT_FINITE))
    good = finite & possible
    return StepOutputs(
        tokens=_integers(torch.where(good, tokens, wrong)),
        logprobs=_floats(torch.where(good, logp.gather(1, tokens[:, None])[:, 0], 0)),
        ranks=_integers(torch.where(good, 1 + (seen > chosen).sum(1), 0)),
        top_ids=_integers(torch.where(told, best, torch.where(asked, -1, 0))),
        top_logprobs=_floats(torch.where(told, logp.gather(1, best), 0)),
    )


def _integers(x: Tensor) -> IntArray:
    return x.cpu().numpy().astype(np.int32)  # type: ignore[no-any-return]


def _floats(x: Tensor) -> NDArray[np.float32]:
    return x.cpu().numpy().astype(np.float32)  # type: ignore[no-any-return]


def allowed(step: StepInputs, rows: Rows, vocab: int) -> Tensor:
    """(R, V): of a row without a mask everything."""
    masks = torch.from_numpy(step.filled_masks().view(np.int32)).to(rows.device)
    tokens, number = torch.arange(vocab, device=rows.device), rows.column("mask", torch.int64)
    words = masks[(number[:, 0] - 1).clamp(min=0)][:, tokens // 32]
    return ((words >> (tokens % 32)) & 1).bool() | (number == 0)


def _adjusted(logits: Tensor, step: StepInputs, rows: Rows) -> Tensor:
    """Biases, then penalties; float64."""
    of, found = step.sampling, logits.double()
    if of["bias_count"].any():
        index, at = _ranges(of["bias_start"], of["bias_count"])
        ids, values = (torch.from_numpy(x[at]).to(rows.device) for x in (step.bias_ids, step.bias_values))
        found = found.index_put((index.to(rows.device), ids.long()), values.double(), accumulate=True)
    neutral = (of["repetition_penalty"] == 1) & (of["presence_penalty"] == 0) & (of["frequency_penalty"] == 0)
    if neutral.all():
        return found
    counts = [torch.zeros(found.shape, dtype=torch.float64, device=rows.device) for _ in range(2)]
    starts = of["history_start"], of["history_start"] + of["history_prompt"]
    for count, start, n in zip(counts, starts, (of["history_prompt"], of["history_output"]), strict=True):
        index, at = _ranges(start, n)
        ids = torch.from_numpy(step.history[at]).to(rows.device).long()
        count.index_put_((index.to(rows.device), ids), torch.ones((), dtype=torch.float64), accumulate=True)
    prompt, output = counts
    repetition = rows.column("repetition_penalty").double()
    penalised = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(prompt + output > 0, penalised, found)
    return found - rows.column("presence_penalty") * (output > 0) - rows.column("frequency_penalty") * output


def _ranges(starts: NDArray[np.int32], counts: NDArray[np.int32]) -> tuple[Tensor, NDArray[np.int64]]:
    """Of R ranges: for each of their elements whose it is, and where it is."""
    row = np.repeat(np.arange(len(counts)), counts)
    at = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
    return torch.from_numpy(row), at.astype(np.int64)


def draw(logits: Tensor, rows: Rows) -> Tensor:
    """(R,) tokens: temperature, min_p, top_k, top_p, then that in whose share of [0, 1) the row's number falls."""
    V = logits.shape[1]
    temperature = rows.column("temperature").double().clamp(min=GREEDY_BELOW)
    p = ((logits - logits.amax(1, keepdim=True)) / temperature).exp()
    sorted_p, order = p.sort(dim=1, descending=True, stable=True)
    place = torch.arange(V, device=rows.device)[None]
    top_k = rows.column("top_k", torch.int64)
    kept = (sorted_p >= rows.column("min_p").double()) & ((top_k <= 0) | (place < top_k))
    mass = (sorted_p * kept).cumsum(1)
    before = (mass - sorted_p * kept) / mass[:, -1:]
    top_p = rows.column("top_p").double()
    kept &= (before < top_p - 1e-12) | (top_p >= 1) | (place == 0)
    left = torch.zeros_like(p).scatter(1, order, sorted_p * kept)
    share = (left / left.sum(1, keepdim=True)).cumsum(1)
    falls = torch.searchsorted(share, uniform(rows)[:, None], right=True)[:, 0]
    last = V - 1 - (left > 0).flip(1).int().argmax(1)
    return torch.minimum(falls, last)


def uniform(rows: Rows) -> Tensor:
    """(R,) in [0, 1), 53 bits: Philox 4x32-10 (Salmon et al., SC 2011), key = seed, counter = (position, choice, 0, 0).

    Words of 32 bits in int64: products wrap, and their upper halves come back by a shift and a mask.
    """
    seed = torch.from_numpy(rows.of["seed"].view(np.int64).copy()).to(rows.device)
    position, choice = (rows.column(name, torch.int64)[:, 0] & _MASK for name in ("position", "choice"))
    zero = torch.zeros_like(position)
    c, key = [position, choice, zero, zero], [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) & _MASK ^ c[1] ^ key[0], b & _MASK, (a >> 32) & _MASK ^ c[3] ^ key[1], a & _MASK]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return ((c[0] << 21) | (c[1] >> 11)).double() * 2.0**-53
