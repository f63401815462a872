"""Step times of a server: the engine on one group of devices, serving overhead, and pipeline parallelism (PP).

A step of p stages is cut into m micro-batches, as in GPipe (arXiv:1811.06965): while one stage works on a part, the
next one works on the previous part. So it takes

    (p - 1) x (stage + hop) + the last stage + (m - 1) x the slower one of both

where each stage idles in p - 1 of m + p - 1 slots (the bubble). Each part starts a step in each stage and reads that
stage's weights; the fastest m is used. A hop is a call plus the activations of a part over a link, for which both
stages wait. Engines that start the next step in the bubble of this one are faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from millrace.machine.devices import Device, Link
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.size.performance.roofline_cost import Constants, ModelInstance
from millrace.size.performance.serving_overhead import ENGINE, Stack

_CACHE_SIZE = 4096  # cached times of steps with prompts, which often repeat
_CUTS = (1, 2, 4, 8, 16, 32)  # micro-batches of a step
_HOP_S = 10e-6  # latency of a call from one stage to the next
_ACTIVATION_BYTES = 2.0
# Bytes/s in one direction: PCIe 4.0 x16 beyond a bridge; one 400 Gbit/s port per device between systems.
_PCIE_RATE, _NODE_RATE = 32e9, 50e9

# A StepTime by parts: prompt chunks; decoding without the KV cache; reading the KV cache.
StepParts = Callable[[Sequence[float], Sequence[float], int, float], tuple[float, float, float]]


def step_parts(instance: ModelInstance, constants: Constants) -> StepParts:
    """Return a function for the parts of a step of the engine alone."""

    @lru_cache(_CACHE_SIZE)
    def chunk_time(prompts: tuple[float, ...], starts: tuple[float, ...], with_decode: bool) -> float:
        return constants.chunks_s(instance, prompts, starts, with_decode)

    @cache
    def decoding(n: int) -> tuple[float, float]:
        return constants.decode_s(instance, n, 0.0), constants.cached_s(instance, n, 1.0)

    def parts(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> tuple[float, float, float]:
        chunks_s = chunk_time(tuple(prompts), tuple(starts), n > 0) if prompts else 0.0
        if not n:
            return chunks_s, 0.0, 0.0
        rest_s, a_token_s = decoding(n)
        return chunks_s, rest_s, a_token_s * instance.model.attended_tokens(context)

    return parts


def step_time(instance: ModelInstance, constants: Constants, stack: Stack = ENGINE) -> StepTime:
    """Return a function for the time of a step, serving overhead included."""
    return (
        _pipeline_step_time(instance, constants, stack)
        if instance.pp > 1
        else _single_stage_step_time(instance, constants, stack)
    )


def least_time(instance: ModelInstance, constants: Constants, stack: Stack = ENGINE) -> StepTime:
    """Return a lower bound of the step time for any number of micro-batches: the slowest stage without bubbles."""
    return _single_stage_step_time(instance.stage, constants, stack)


def _single_stage_step_time(instance: ModelInstance, constants: Constants, stack: Stack) -> StepTime:
    parts = step_parts(instance, constants)

    def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
        chunks_s, rest_s, cached_s = parts(prompts, starts, n, context)
        return stack.prefill * chunks_s + stack.decode * rest_s + stack.cache * cached_s + stack.host_s * n

    return seconds


def _pipeline_step_time(instance: ModelInstance, constants: Constants, stack: Stack) -> StepTime:
    """Return the step time with pipeline stages; host time counts once per step, not per stage."""
    *device, host_s = constants.decode
    quiet, n_hops = replace(constants, decode=(*device, 0.0)), instance.pp - 1
    stages = instance.within, instance.stage  # any but the last, and the last
    host_s = stack.decode * constants.factor * host_s + stack.host_s
    a_token_s = instance.model.hidden * _ACTIVATION_BYTES / hop_rate(instance)

    @lru_cache(_CACHE_SIZE)
    def of_prompts(
        prompts: tuple[float, ...], starts: tuple[float, ...], with_decode: bool, cut: int
    ) -> tuple[float, ...]:  # fmt: skip
        return tuple(stack.prefill * quiet.chunks_s(stage, prompts, starts, with_decode, cut) for stage in stages)

    @cache
    def of_answers(n: int, cut: int) -> tuple[tuple[float, float], ...]:
        """Return for each stage the decode time without the KV cache, and the KV time per token of context."""
        return tuple((stack.decode * quiet.decode_s(stage, n / cut, 0.0),
                      stack.cache * quiet.cached_s(stage, n / cut, 1.0)) for stage in stages)  # fmt: skip

    def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
        n_tokens, chunks, begun = sum(prompts) + n, tuple(prompts), tuple(starts)
        reached, found_s = instance.model.attended_tokens(context), []
        for cut in _CUTS:
            if cut > max(1, n_tokens):
                break
            within_s = _HOP_S + n_tokens / cut * a_token_s
            last_s = 0.0
            if chunks:
                before_s, at_end_s = of_prompts(chunks, begun, n > 0, cut)
                within_s, last_s = within_s + before_s, at_end_s
            if n:
                (before_s, a_read_s), (at_end_s, a_last_read_s) = of_answers(n, cut)
                within_s += before_s + a_read_s * reached
                last_s += at_end_s + a_last_read_s * reached
            found_s.append(n_hops * within_s + last_s + (cut - 1) * max(within_s, last_s))
        return min(found_s) + host_s * n

    return seconds


def hop_rate(instance: ModelInstance) -> float:
    """Return the bytes/s from one stage to the next over the slowest link; `link_rate` counts both directions."""
    device: Device = instance.device
    own = device.link_rate / 2
    if device.link == Link.BRIDGE and instance.devices > 2:
        own = min(own, _PCIE_RATE)
    return min(own, _NODE_RATE) if instance.devices > instance.system else own
