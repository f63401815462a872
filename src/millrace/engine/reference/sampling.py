"""Sampling of a step in NumPy, from logits that any executor has computed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import SampleError, StepInputs, StepOutputs
from millrace.kernels.operators import Rows
from millrace.kernels.sample.ref import draw, penalised, probabilities, uniform, unpacked


def sample_step(step: StepInputs, logits: Sequence[Rows] | Rows) -> StepOutputs:
    """Draw or score a token for each row of `step.sampling`. logits: (R, V), float64"""
    rows = step.sampling
    top = max(int(rows["n_top"].max()), 0) if len(rows) else 0
    out = StepOutputs(
        tokens=np.zeros(len(rows), np.int32), logprobs=np.zeros(len(rows), np.float32),
        ranks=np.zeros(len(rows), np.int32), top_ids=np.zeros((len(rows), top), np.int32),
        top_logprobs=np.zeros((len(rows), top), np.float32),
    )  # fmt: skip
    for r in range(len(rows)):
        _sample_row(r, logits[r], step, out)
    return out


def _sample_row(r: int, logits: Rows, step: StepInputs, out: StepOutputs) -> None:
    row: NDArray[np.void] = step.sampling[r]
    if not np.isfinite(logits).all():
        out.tokens[r] = SampleError.NOT_FINITE
        return
    if row["mask"]:
        logits = np.where(unpacked(step.filled_masks()[row["mask"] - 1], len(logits)), logits, -np.inf)
    if not np.isfinite(logits).any():
        out.tokens[r] = SampleError.NOTHING_ALLOWED
        return
    logp = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    adjusted = logits.copy()
    biases = slice(row["bias_start"], row["bias_start"] + row["bias_count"])
    adjusted[step.bias_ids[biases]] += step.bias_values[biases]
    start, prompt, output = (int(row[n]) for n in ("history_start", "history_prompt", "history_output"))
    history = step.history[start : start + prompt + output]
    adjusted = penalised(
        adjusted, history[:prompt], history[prompt:], float(row["repetition_penalty"]),
        float(row["presence_penalty"]), float(row["frequency_penalty"]),
    )  # fmt: skip
    token = int(adjusted.argmax() if row["target"] < 0 else row["target"])
    if row["target"] < 0 and row["temperature"] >= 1e-5:
        p = probabilities(
            adjusted, float(row["temperature"]), int(row["top_k"]), float(row["top_p"]), float(row["min_p"])
        )
        token = draw(p, uniform(int(row["seed"]), int(row["choice"]), int(row["position"])))
    out.tokens[r], out.logprobs[r] = token, logp[token]
    out.ranks[r] = 1 + int((logits > logits[token]).sum())
    best = np.lexsort((np.arange(len(logits)), -logits))[: max(int(row["n_top"]), 0)]
    best = best[np.isfinite(logits[best])]
    out.top_ids[r, : max(int(row["n_top"]), 0)] = -1
    out.top_ids[r, : len(best)], out.top_logprobs[r, : len(best)] = best, logp[best]
