"""What steps take: an engine's on one group of devices, what serving adds, and layers in stages one after another (PP).

A step of p stages is cut into m micro-batches, as GPipe does (arXiv:1811.06965): while one stage works on a part, the
next one works on the part before. So it takes

    (p - 1) x (stage + hop) + the last stage + (m - 1) x the slower one of both

of which p - 1 of m + p - 1 turns are a bubble in each stage. Each part starts a step in each stage, and reads that
stage's weights: the m that takes least is taken. A hop is a call and the activations of a part over a link, for which
the stage behind and the one before it wait. Engines that begin the next step in the bubble of this one do better.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from millrace.machine.devices import Device, Link
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.size.performance.roofline_cost import Constants, Instance
from millrace.size.performance.serving_overhead import ENGINE, Stack

_KEPT = 4096  # times of steps with prompts, which are often alike
_CUTS = (1, 2, 4, 8, 16, 32)  # micro-batches of a step
_HOP_S = 10e-6  # a call from one stage to the next
_ACTIVATION_BYTES = 2.0
# Bytes a second, one way: PCIe 4.0 x16, past a bridge; and one port of 400 Gbit/s for each device, between systems.
_PCIE_RATE, _NODE_RATE = 32e9, 50e9

# The same, as its parts: chunks of prompts; running answers without their keys and values; these.
StepParts = Callable[[Sequence[float], Sequence[float], int, float], tuple[float, float, float]]


def step_parts(instance: Instance, constants: Constants) -> StepParts:
    """Of the engine alone."""

    @lru_cache(_KEPT)
    def chunked(prompts: tuple[float, ...], starts: tuple[float, ...], beside: bool) -> float:
        return constants.chunks_s(instance, prompts, starts, beside)

    @cache
    def decoding(n: int) -> tuple[float, float]:
        return constants.decode_s(instance, n, 0.0), constants.cached_s(instance, n, 1.0)

    def parts(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> tuple[float, float, float]:
        chunks_s = chunked(tuple(prompts), tuple(starts), n > 0) if prompts else 0.0
        if not n:
            return chunks_s, 0.0, 0.0
        rest_s, a_token_s = decoding(n)
        return chunks_s, rest_s, a_token_s * instance.model.reached(context)

    return parts


def step_time(instance: Instance, constants: Constants, stack: Stack = ENGINE) -> StepTime:
    """Of the engine's steps, and what serving adds to them."""
    return _staged(instance, constants, stack) if instance.pp > 1 else _overlap(instance, constants, stack)


def least_time(instance: Instance, constants: Constants, stack: Stack = ENGINE) -> StepTime:
    """What no step is quicker than, however it is cut: all of it in one stage, the slowest, without any bubble."""
    return _overlap(instance.stage, constants, stack)


def _overlap(instance: Instance, constants: Constants, stack: Stack) -> StepTime:
    parts = step_parts(instance, constants)

    def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
        chunks_s, rest_s, cached_s = parts(prompts, starts, n, context)
        return stack.prefill * chunks_s + stack.decode * rest_s + stack.cache * cached_s + stack.host_s * n

    return seconds


def _staged(instance: Instance, constants: Constants, stack: Stack) -> StepTime:
    """The host has a sequence once a step, not once a stage."""
    *device, host_s = constants.decode
    quiet, n_hops = replace(constants, decode=(*device, 0.0)), instance.pp - 1
    stages = instance.within, instance.stage  # any but the last, and the last
    host_s = stack.decode * constants.factor * host_s + stack.host_s
    a_token_s = instance.model.hidden * _ACTIVATION_BYTES / hop_rate(instance)

    @lru_cache(_KEPT)
    def of_prompts(
        prompts: tuple[float, ...], starts: tuple[float, ...], beside: bool, cut: int
    ) -> tuple[float, ...]:  # fmt: skip
        return tuple(stack.prefill * quiet.chunks_s(stage, prompts, starts, beside, cut) for stage in stages)

    @cache
    def of_answers(n: int, cut: int) -> tuple[tuple[float, float], ...]:
        """Of each: without keys and values, and these of a token of each sequence."""
        return tuple((stack.decode * quiet.decode_s(stage, n / cut, 0.0),
                      stack.cache * quiet.cached_s(stage, n / cut, 1.0)) for stage in stages)  # fmt: skip

    def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
        n_tokens, chunks, begun = sum(prompts) + n, tuple(prompts), tuple(starts)
        reached, found_s = instance.model.reached(context), []
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


def hop_rate(instance: Instance) -> float:
    """Bytes a second from one stage to the next: by the slowest link on the way. link_rate: both ways together"""
    device: Device = instance.device
    own = device.link_rate / 2
    if device.link == Link.BRIDGE and instance.devices > 2:
        own = min(own, _PCIE_RATE)
    return min(own, _NODE_RATE) if instance.devices > instance.system else own
