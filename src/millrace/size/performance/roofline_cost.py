"""Step times from a roofline model whose efficiencies are fitted to measured steps.

Times are linear in the fitted constants: `prefill_terms` and `decode_terms` return what each constant is multiplied
by, for the prediction here and for the fit in `device.py`.

    prefill   max(2 P T / (tp F MFU), W / (tp BW 0.8)) + 2 L q sum(n^2) / (tp F16 0.35) + all-reduces + fixed
    decode    (W + KV) / (tp BW MBU) + 2 P B / (tp F MFU) + all-reduces + fixed + host B

P parameters that a token is multiplied by, W bytes of weights, T tokens, B sequences, n tokens of a prompt, L layers,
q = heads x head size, F peak operations, BW bandwidth of one device. An all-reduce of b bytes takes
call (1 + log2 tp) / 2 + 2 (tp - 1) / tp b / rate, twice a layer. The sum of both fits decoding better than the greater.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np
from numpy.typing import NDArray

from millrace.machine.devices import Device, Link
from millrace.size.performance.models import ModelShape

WEIGHTS_MBU, ATTENTION_MFU = 0.8, 0.35  # in prefill
WEIGHT_BYTES = {"fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}
HEAD_BYTES = 2.0  # engines keep it in 16 bits
_PAIR = 2  # devices that a bridge joins
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ModelInstance:
    """A model on tp x pp devices: groups of tp, each with the layers of a stage (step_time.py has what stages take).

    precision: of weights and matmuls; kv_bytes: of a KV-cache element; system: devices of a system
    """

    model: ModelShape
    device: Device
    precision: str
    tp: int = 1
    kv_bytes: float = 2.0
    pp: int = 1
    system: int = 8

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    @property
    def stage(self) -> "ModelInstance":
        """Return the slowest stage: the most layers, and the head; the instance itself if it has one stage."""
        return self if self.pp == 1 else self._with(n_layers=-(-self.model.n_layers // self.pp), tied=True)

    @property
    def within(self) -> "ModelInstance":
        """Return a stage other than the last, without the head."""
        return self.stage._with(vocab=1)

    def _with(self, **model: int) -> "ModelInstance":
        return replace(self, model=replace(self.model, **model), pp=1)  # type: ignore[arg-type]

    @property
    def peak(self) -> float:
        """Return the peak operations/s of all devices; 4-bit integer weights are multiplied in 16 bits."""
        precision = "fp16" if self.precision == "int4" else self.precision
        peaks = self.device.peaks
        return self.tp * (peaks["bf16"] if precision == "fp16" and "fp16" not in peaks else self.device.peak(precision))

    @property
    def peak_16(self) -> float:
        peaks = self.device.peaks
        return self.tp * max(peaks.get("fp16", 0.0), peaks.get("bf16", 0.0))

    @property
    def bandwidth(self) -> float:
        return self.tp * self.device.bandwidth

    @property
    def weights_bytes(self) -> float:
        """Return the bytes of all weights in memory."""
        head = self.model.stored_parameters - self.model.parameters
        return self.model.parameters * WEIGHT_BYTES[self.precision] + head * HEAD_BYTES

    @property
    def kv_token_bytes(self) -> float:
        return self.model.kv_values * self.kv_bytes

    def cached_s(self, n: float, context: float) -> float:
        """Return the seconds to read the KV cache of n sequences at peak bandwidth."""
        return n * self.kv_token_bytes * self.model.attended_tokens(context) / self.bandwidth

    def read_bytes(self, n_tokens: float) -> float:
        """Return the bytes of weights that a step of n tokens reads."""
        touched = self.model.touched_parameters(n_tokens)
        return touched * WEIGHT_BYTES[self.precision] + self.model.head_parameters * HEAD_BYTES

    def reduces(self, n_tokens: float) -> tuple[float, float, float]:
        """Return the all-reduces of a step: calls, and bytes sent per device within and beyond a bridge.

        Calls among more than two devices count half a call more per doubling.
        """
        if self.tp == 1:
            return 0.0, 0.0, 0.0
        n = 2.0 * self.model.n_layers
        calls = n * (1 + log2(self.tp)) / 2
        sent = n * 2 * (self.tp - 1) / self.tp * n_tokens * self.model.hidden * 2
        far = self.device.link == Link.BRIDGE and self.tp > _PAIR
        return calls, 0.0 if far else sent, sent if far else 0.0


@dataclass(frozen=True, slots=True)
class PrefillTerms:
    """Seconds at peak rates. streaming_s: reading the weights, which overlaps with arithmetic; rest: terms of
    all-reduce calls, bytes near, bytes far, and the fixed time of a step"""

    arithmetic_s: float
    streaming_s: float
    attention_s: float
    rest: tuple[float, float, float, float]

    def part(self, cut: int) -> "PrefillTerms":
        """Return the terms of one of `cut` micro-batches: it reads all weights and makes as many calls."""
        if cut == 1:
            return self
        calls, near, far, fixed = self.rest
        return PrefillTerms(
            self.arithmetic_s / cut, self.streaming_s, self.attention_s / cut, (calls, near / cut, far / cut, fixed)
        )


def prefill_terms(instance: ModelInstance, prompts: Sequence[float], starts: Sequence[float] = ()) -> PrefillTerms:
    """Return the terms of a prefill step. prompts: tokens computed of each; starts: tokens computed earlier, if any"""
    model, n_tokens = instance.model, float(sum(prompts))
    operations = 2 * (model.active_parameters * n_tokens + model.head_parameters * len(prompts))
    pairs = (
        sum(map(model.pairs, prompts))
        if not starts
        else sum(model.pairs(start + n) - model.pairs(start) for n, start in zip(prompts, starts, strict=True))
    )
    return PrefillTerms(
        operations / instance.peak,
        instance.read_bytes(n_tokens) / (instance.bandwidth * WEIGHTS_MBU),
        2 * model.n_layers * model.n_heads * model.head_dim * pairs / (instance.peak_16 * ATTENTION_MFU),
        (*instance.reduces(n_tokens), 1.0),
    )


def decode_terms(instance: ModelInstance, n: float, context: float) -> tuple[float, ...]:
    """Return the terms that `Constants.decode` is multiplied by. n: sequences; context: their mean tokens"""
    model = instance.model
    reading_s = instance.read_bytes(n) / instance.bandwidth + instance.cached_s(n, context)
    operations = 2 * n * (model.active_parameters + model.head_parameters)
    return (reading_s, operations / instance.peak, *instance.reduces(n), 1.0, n)


@dataclass(frozen=True, slots=True)
class Constants:
    """Achieved efficiencies of a device.

    prefill: (5,) 1/MFU; s per all-reduce; s per byte near, and far; s per step
    decode: (7,) 1/MBU; 1/MFU; s per all-reduce; s per byte near, and far; s per step; host s per sequence
    factor: on every time, for a faster or slower software stack
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    factor: float = 1.0

    def prefill_s(self, instance: ModelInstance, prompts: Sequence[float]) -> float:
        return self.factor * prefill_time(prefill_terms(instance, prompts), self.prefill)

    def decode_s(self, instance: ModelInstance, n: float, context: float) -> float:
        return self.factor * float(np.dot(decode_terms(instance, n, context), self.decode))

    def cached_s(self, instance: ModelInstance, n: float, context: float) -> float:
        """Return the part of a decode step that reads the KV cache."""
        return self.factor * self.decode[0] * instance.cached_s(n, context)

    def chunks_s(
        self,
        instance: ModelInstance,
        prompts: Sequence[float],
        starts: Sequence[float],
        with_decode: bool,
        cut: int = 1,
    ) -> float:
        """Return the seconds of prompt chunks in a step, of one of `cut` equal micro-batches.

        with_decode: decoding sequences share the step, and account for reading weights and for calls
        """
        terms = prefill_terms(instance, prompts, starts).part(cut)
        if not with_decode:
            return self.factor * prefill_time(terms, self.prefill)
        _, near, far, _ = terms.rest
        sent_s = near * self.prefill[2] + far * self.prefill[3]
        return self.factor * (terms.arithmetic_s * self.prefill[0] + terms.attention_s + sent_s)


def prefill_time(terms: PrefillTerms, constants: Sequence[float]) -> float:
    """Return the seconds of a prefill step, without the factor of the software stack."""
    bound = max(terms.arithmetic_s * constants[0], terms.streaming_s)
    return bound + terms.attention_s + float(np.dot(terms.rest, constants[1:]))
