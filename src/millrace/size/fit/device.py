"""Fits the constants of a device to measured steps, and computes their residuals.

Minimises absolute relative errors (iteratively reweighted least squares) within physical bounds: no efficiency above
1, no time below 0. Constants that the data do not determine (links, if all runs used one device) stay near priors
from separate measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.errors import ConfigError
from millrace.machine.devices import Device, Link
from millrace.size.performance.roofline_cost import (
    Constants,
    Floats,
    ModelInstance,
    PrefillTerms,
    decode_terms,
    prefill_terms,
)

# All-reduces measured alone (Vidur's profiles of A100 and H100 nodes: calls of 11 to 45 us; 190 GB/s at 8 MB and 300 at
# 64 MB by switches, 22 to 54 GB/s between bridged pairs, 20 over PCIe), and usual shares of a roofline.
_CALL_S, _FAR = 20e-6, 1 / 30e9
_NEAR = {Link.SWITCH: (1 / 300e9, 1 / 190e9), Link.BRIDGE: (1 / 300e9, 1 / 190e9), Link.PCIE: (1 / 20e9, 1 / 20e9)}
_BELIEF = 0.05  # weight of a prior, relative to the square root of the number of rows
_GOOD = 0.02  # relative errors below this count as equal
_ROUNDS = 25
_PREFILL_LEAST = np.array([1.0, 0, 0, 0, 0])
_DECODE_LEAST = np.array([1 / 0.95, 1.0, 0, 0, 0, 0, 0])


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """A static batch: prompts prefilled together, answers decoded together.

    context: mean tokens of a sequence during decoding
    """

    instance: ModelInstance
    n: int
    prompt: int
    context: float
    prefill_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True)
class Residual:
    """Relative errors of predictions: mean, median and 90th percentile of the absolute values; bias: signed mean"""

    mape: float
    p90: float
    bias: float
    n: int
    median: float = float("nan")


def fit(steps: Sequence[MeasuredBatch]) -> Constants:
    """Fit steps of one device and precision. raises ConfigError if they are too few, or faster than possible"""
    (device,) = {step.instance.device.name: step.instance.device for step in steps}.values()
    check_possible(steps)
    return Constants(_fit_prefill(device, steps), _fit_decode(device, steps))


def residuals(constants: Constants, steps: Sequence[MeasuredBatch]) -> tuple[Residual, Residual]:
    """Return the residuals of prefill and of decoding."""
    prefill = [
        constants.prefill_s(s.instance, [s.prompt] * s.n) / s.prefill_s - 1 for s in steps if s.prefill_s is not None
    ]
    decode = [constants.decode_s(s.instance, s.n, s.context) / s.decode_s - 1 for s in steps if s.decode_s is not None]
    return residual(prefill), residual(decode)


def check_possible(steps: Sequence[MeasuredBatch]) -> None:
    """Refuse steps that read or compute faster than the datasheet allows. raises ConfigError"""
    for step in steps:
        where = f"{step.instance.model.name} on {step.instance.tp} x {step.instance.device.name}, {step.n} at once"
        if step.prefill_s is not None:
            least = prefill_terms(step.instance, [step.prompt] * step.n).arithmetic_s
            _check(least, step.prefill_s, f"{where}: prefill", "arithmetic")
        if step.decode_s is not None:
            reading, arithmetic, *_ = decode_terms(step.instance, step.n, step.context)
            _check(reading, step.decode_s, f"{where}: a decode step", "reading")
            _check(arithmetic, step.decode_s, f"{where}: a decode step", "arithmetic")


def _check(least_s: float, measured_s: float, label: str, resource: str) -> None:
    if measured_s < least_s:
        raise ConfigError(
            f"{label} of {measured_s * 1e3:.3g} ms would be {least_s / measured_s:.2f} of the peak of {resource}",
            f"at least {least_s * 1e3:.3g} ms",
            "leave the row out; is it of more devices, a smaller model, or sparse peaks?",
        )


def residual(errors: Sequence[float]) -> Residual:
    """Summarise relative errors; nan if there are none."""
    if not errors:
        return Residual(float("nan"), float("nan"), float("nan"), 0)
    e = np.array(errors)
    return Residual(
        float(np.abs(e).mean()),
        float(np.quantile(np.abs(e), 0.9)),
        float(e.mean()),
        len(e),
        float(np.median(np.abs(e))),
    )


def _fit_prefill(device: Device, steps: Sequence[MeasuredBatch]) -> tuple[float, ...]:
    measured = np.array([s.prefill_s for s in steps if s.prefill_s is not None])
    terms = [prefill_terms(s.instance, [s.prompt] * s.n) for s in steps if s.prefill_s is not None]
    _check_enough(len(terms), "prompts")
    guess = np.array([1 / 0.6, _CALL_S, _NEAR[device.link][0], _FAR, 5e-3])
    solution = guess
    for _ in range(_ROUNDS):  # which steps are memory-bound depends on the solution
        multiplies = np.array([t.arithmetic_s * solution[0] > t.streaming_s for t in terms])
        columns = np.array([[t.arithmetic_s * m, *t.rest] for t, m in zip(terms, multiplies, strict=True)])
        unfitted_s = np.array([_unfitted_s(t, m) for t, m in zip(terms, multiplies, strict=True)])
        before, solution = solution, _solve(columns, unfitted_s, measured, guess, _PREFILL_LEAST)
        if np.allclose(before, solution, rtol=1e-9):
            break
    return tuple(solution.tolist())


def _unfitted_s(terms: PrefillTerms, multiplies: bool) -> float:
    return terms.attention_s + (0.0 if multiplies else terms.streaming_s)


def _fit_decode(device: Device, steps: Sequence[MeasuredBatch]) -> tuple[float, ...]:
    of_decode = [s for s in steps if s.decode_s is not None]
    _check_enough(len(of_decode), "decode steps")
    columns = np.array([decode_terms(s.instance, s.n, s.context) for s in of_decode])
    measured = np.array([s.decode_s for s in of_decode])
    guess = np.array([1 / 0.8, 1 / 0.6, _CALL_S, _NEAR[device.link][1], _FAR, 2e-3, 10e-6])
    return tuple(_solve(columns, np.zeros(len(measured)), measured, guess, _DECODE_LEAST).tolist())


def _check_enough(n: int, noun: str) -> None:
    if n < 3:
        raise ConfigError(f"{n} measured {noun} of one device and precision", "3 at least", "measure more of them")


def _solve(columns: Floats, unfitted_s: Floats, measured: Floats, guess: Floats, least: Floats) -> Floats:
    """x >= least with columns @ x + known near measured, in relative terms; columns (N, K)

    The prior adds one row of low weight for each constant.
    """
    n = len(measured)
    belief = np.diag(_BELIEF * np.sqrt(n) / guess)
    rows = np.vstack([columns / measured[:, None], belief])
    targets = np.concatenate(
        [(measured - unfitted_s) / measured - columns / measured[:, None] @ least, belief @ (guess - least)]
    )
    weights = np.ones(len(targets))
    x = np.zeros(len(least))
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        x = least_squares(rows * root[:, None], targets * root)
        weights[:n] = 1 / np.maximum(np.abs(rows @ x - targets)[:n], _GOOD)
        weights[n:] = 0.2 / _GOOD
    return least + x


def least_squares(rows: Floats, targets: Floats) -> Floats:
    """Solve least squares with x >= 0 by setting negative components to 0, the worst first."""
    free = np.ones(rows.shape[1], bool)
    while free.any():
        x = np.zeros(rows.shape[1])
        x[free] = np.linalg.lstsq(rows[:, free], targets, rcond=None)[0]
        weighed = x * np.linalg.norm(rows, axis=0)
        if (weighed >= 0).all():
            return x
        free[int(np.argmin(weighed))] = False
    return np.zeros(rows.shape[1])
