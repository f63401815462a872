"""What a step takes on some devices: a roofline, with what is reached of it fitted to measured steps.

A time is linear in what is fitted: `prefill_terms` and `decode_terms` give what each constant is multiplied by, for the
prediction here and for `device.py` alike.

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
class Instance:
    """A model on tp x pp devices: groups of tp, each with the layers of a stage (step_time.py has what stages take).

    precision: of weights and products; kv_bytes: of a number in the cache; system: devices of a machine
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
    def stage(self) -> "Instance":
        """The slowest one, with as many layers as any and the head; all of it where there is one."""
        return self if self.pp == 1 else self._with(n_layers=-(-self.model.n_layers // self.pp), tied=True)

    @property
    def within(self) -> "Instance":
        """A stage that is not the last, and has no head."""
        return self.stage._with(vocab=1)

    def _with(self, **model: int) -> "Instance":
        return replace(self, model=replace(self.model, **model), pp=1)  # type: ignore[arg-type]

    @property
    def peak(self) -> float:
        """Operations a second of all devices; weights of 4 bits are multiplied in 16."""
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
        """That lie in memory."""
        head = self.model.stored_parameters - self.model.parameters
        return self.model.parameters * WEIGHT_BYTES[self.precision] + head * HEAD_BYTES

    @property
    def kv_token_bytes(self) -> float:
        return self.model.kv_values * self.kv_bytes

    def cached_s(self, n: float, context: float) -> float:
        """Of reading keys and values of n sequences at the peak."""
        return n * self.kv_token_bytes * self.model.reached(context) / self.bandwidth

    def read_bytes(self, n_tokens: float) -> float:
        """Of weights, in a step of so many tokens."""
        touched = self.model.touched_parameters(n_tokens)
        return touched * WEIGHT_BYTES[self.precision] + self.model.head_parameters * HEAD_BYTES

    def reduces(self, n_tokens: float) -> tuple[float, float, float]:
        """All-reduces of a step: how many, and bytes that each device sends near and far (beyond its bridge).

        Those among more than two devices count for more: half a call by each doubling.
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
    """arithmetic_s: at the peak; streaming_s: the weights, which arithmetic may hide; rest: call, near, far, fixed"""

    arithmetic_s: float
    streaming_s: float
    attention_s: float
    rest: tuple[float, float, float, float]

    def part(self, cut: int) -> "PrefillTerms":
        """One of so many: it reads all weights, and makes as many calls."""
        if cut == 1:
            return self
        calls, near, far, fixed = self.rest
        return PrefillTerms(
            self.arithmetic_s / cut, self.streaming_s, self.attention_s / cut, (calls, near / cut, far / cut, fixed)
        )


def prefill_terms(instance: Instance, prompts: Sequence[float], starts: Sequence[float] = ()) -> PrefillTerms:
    """prompts: tokens of each that are computed in this step; starts: how many of each were before, if not all 0"""
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


def decode_terms(instance: Instance, n: float, context: float) -> tuple[float, ...]:
    """What `Constants.decode` is multiplied by. n: sequences; context: tokens of each, on average"""
    model = instance.model
    reading_s = instance.read_bytes(n) / instance.bandwidth + instance.cached_s(n, context)
    operations = 2 * n * (model.active_parameters + model.head_parameters)
    return (reading_s, operations / instance.peak, *instance.reduces(n), 1.0, n)


@dataclass(frozen=True, slots=True)
class Constants:
    """What is reached of a device's datasheet.

    prefill: (5,) 1/MFU; s an all-reduce; s a byte near, and far; s a step
    decode: (7,) 1/MBU; 1/MFU; s an all-reduce; s a byte near, and far; s a step; s of the host for a sequence
    factor: of a newer or slower stack of software, on every time
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    factor: float = 1.0

    def prefill_s(self, instance: Instance, prompts: Sequence[float]) -> float:
        return self.factor * prefill_time(prefill_terms(instance, prompts), self.prefill)

    def decode_s(self, instance: Instance, n: float, context: float) -> float:
        return self.factor * float(np.dot(decode_terms(instance, n, context), self.decode))

    def cached_s(self, instance: Instance, n: float, context: float) -> float:
        """Of a decode step, the part that keys and values take."""
        return self.factor * self.decode[0] * instance.cached_s(n, context)

    def chunks_s(
        self, instance: Instance, prompts: Sequence[float], starts: Sequence[float], beside: bool, cut: int = 1
    ) -> float:  # fmt: skip
        """Of chunks of prompts in a step; beside running answers weights are read and calls are made once, by those.

        cut: of so many parts of them alike, one
        """
        terms = prefill_terms(instance, prompts, starts).part(cut)
        if not beside:
            return self.factor * prefill_time(terms, self.prefill)
        _, near, far, _ = terms.rest
        sent_s = near * self.prefill[2] + far * self.prefill[3]
        return self.factor * (terms.arithmetic_s * self.prefill[0] + terms.attention_s + sent_s)


def prefill_time(terms: PrefillTerms, constants: Sequence[float]) -> float:
    """Without a stack's factor."""
    bound = max(terms.arithmetic_s * constants[0], terms.streaming_s)
    return bound + terms.attention_s + float(np.dot(terms.rest, constants[1:]))
