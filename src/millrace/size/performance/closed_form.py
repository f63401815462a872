"""Closed-form model of an instance with N requests always in flight.

A request takes its prefill and, in a batch of B, its share of osl - 1 decode steps; the rest is Little's law.
Latencies also depend on the scheduler: TTFT is only estimated here (three quarters of a step full of prompts), and
simulated for chosen configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.machine.devices import GB
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.size.performance.fitted_devices import Profile
from millrace.size.performance.operating_point import FigureSource, OperatingPoint, Waits
from millrace.size.performance.roofline_cost import Constants, ModelInstance, decode_terms, prefill_terms
from millrace.size.performance.serving_overhead import Stack
from millrace.size.performance.step_time import step_time

USABLE, OVERHEAD_BYTES = 0.9, 3 * GB  # usable share of a device's memory; software and activations, out of that
CONCURRENCIES = (1, 2, 4, 5, 8, 10, 16, 25, 32, 50, 64, 100, 128, 150, 200, 250, 384, 512)


def kv_capacity(instance: ModelInstance) -> float:
    """Return the tokens that the KV cache holds. raises ConfigError if not even the weights fit"""
    stage = instance.stage
    memory = stage.tp * (USABLE * stage.device.memory_bytes - OVERHEAD_BYTES)
    left = memory - stage.weights_bytes
    if left <= 0:
        raise ConfigError(
            f"{instance.model.name} in {instance.precision} takes {instance.weights_bytes / GB:.0f} GB, and "
            f"{instance.devices} x {instance.device.name} have {max(0.0, memory) * instance.pp / GB:.0f} GB for it",
            "weights and some cache in memory",
            f"use more devices (--pp {2 * instance.pp}: layers in stages), larger ones, or fewer bits",
        )  # fmt: skip
    return left / stage.kv_token_bytes


@dataclass(frozen=True, slots=True)
class InstanceMemory:
    """Bytes of one instance. kv_in_use: KV cache of the requests in flight; free: KV cache for further requests"""

    total: float
    kept_back: float
    weights: float
    kv_in_use: float
    free: float


def memory(instance: ModelInstance, point: OperatingPoint) -> InstanceMemory:
    total = instance.devices * instance.device.memory_bytes
    back = total - instance.devices * (USABLE * instance.device.memory_bytes - OVERHEAD_BYTES)
    room = kv_capacity(instance) * instance.kv_token_bytes
    needed = point.concurrency * (point.input_tokens + point.output_tokens / 2) * instance.kv_token_bytes
    kv_bytes = min(room, needed)
    return InstanceMemory(total, back, instance.weights_bytes, kv_bytes, room - kv_bytes)


def check_fits(instance: ModelInstance, lengths: tuple[float, float]) -> None:
    """Refuse requests that exceed the model's context or the KV cache. raises ConfigError"""
    both = sum(lengths)
    if both > instance.model.max_context:
        raise ConfigError(
            f"requests of {both:,.0f} tokens", f"the context of {instance.model.name}, {instance.model.max_context:,}",
            "shorten them, or choose a model with a longer one",
        )  # fmt: skip
    if (room := kv_capacity(instance)) < both:
        raise ConfigError(
            f"a request of {both:,.0f} tokens does not fit beside {instance.model.name} on {instance.devices} x "
            f"{instance.device.name}",
            f"at most {room:,.0f} tokens", "use more devices, larger ones, or shorter requests",
        )  # fmt: skip


def estimate_point(
    instance: ModelInstance,
    profile: Profile,
    lengths: tuple[float, float],
    concurrency: float,
    stack: Stack | None = None,
) -> OperatingPoint:
    """Estimate the operating point at a concurrency. lengths: input and output tokens

    raises ConfigError if a single request does not fit
    """
    check_fits(instance, lengths)
    stack = stack or profile.stack
    n_in, n_out = lengths
    seconds = step_time(instance, profile.constants, stack)
    batch = _batch(instance, lengths, concurrency, stack)
    rate, waits = closed_form(seconds, stack.front_s, stack.step_tokens, lengths, concurrency, batch)
    return OperatingPoint(
        model=instance.model.name, device=instance.device.name, precision=instance.precision, tp=instance.tp,
        pp=instance.pp, system=instance.system, input_tokens=n_in, output_tokens=n_out, concurrency=concurrency,
        rate=rate, mean=waits, p95=None, source=FigureSource.ANALYTIC,
    )  # fmt: skip


def closed_form(
    seconds: StepTime, front_s: float, step_tokens: int, lengths: tuple[float, float], concurrency: float, batch: int
) -> tuple[float, Waits]:
    """Return requests/s and latencies. batch: how many of the requests in flight run at the same time

    A prompt in a running batch starts no step of its own. No request finishes faster than alone, and the host prepares
    requests one after another (`front_s` each), as in a simulation.
    """
    n_in, n_out = lengths
    step_s = seconds((), (), batch, n_in + n_out / 2)
    alone_s = front_s + seconds([n_in], [0], 0, 0.0)
    added_s = seconds([n_in], [0], batch, n_in) - seconds((), (), batch, n_in)
    together = min(batch, max(1, int(step_tokens // n_in)))
    ttft_s = alone_s + (together - 1) * 0.75 * added_s
    rate = 1 / max(front_s, (alone_s if batch == 1 else added_s) + (n_out - 1) * step_s / batch)
    e2e_s = max(concurrency / rate, alone_s + (n_out - 1) * seconds((), (), 1, n_in + n_out / 2))
    rate = concurrency / e2e_s
    ttft_s = min(e2e_s, ttft_s + max(0.0, concurrency - batch) / rate)
    return rate, Waits(ttft_s, (e2e_s - ttft_s) / max(1.0, n_out - 1), e2e_s)


def _batch(instance: ModelInstance, lengths: tuple[float, float], concurrency: float, stack: Stack) -> int:
    return max(1, int(min(concurrency, stack.sequences, kv_capacity(instance) / sum(lengths))))


def shares(
    instance: ModelInstance, profile: Profile, point: OperatingPoint, stack: Stack | None = None
) -> Mapping[str, float]:
    """Return the shares of an instance's time by activity; they add up to 1."""
    stack, constants = stack or profile.stack, profile.constants
    batch = _batch(instance, (point.input_tokens, point.output_tokens), max(1.0, point.concurrency), stack)
    seconds: dict[str, float] = {}
    for lengths in point.lengths:
        for name, took_s in _spent(instance, constants, stack, lengths, batch).items():
            seconds[name] = seconds.get(name, 0.0) + took_s
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def _spent(
    instance: ModelInstance, constants: Constants, stack: Stack, lengths: tuple[float, float], batch: int
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of an instance's time for one call in a batch, by activity."""
    stage, (n_in, n_out) = instance.stage, lengths
    context = n_in + n_out / 2
    prompt, step = prefill_terms(stage, [n_in]), decode_terms(stage, batch, context)
    parts = [part * constant for part, constant in zip(step, constants.decode, strict=True)]
    cached_s = constants.decode[0] * stage.cached_s(batch, context)
    steps = (n_out - 1) / batch
    of_steps, of_prompts = steps * stack.decode * constants.factor, stack.prefill * constants.factor
    links = sum(a * b for a, b in zip(prompt.rest[:3], constants.prefill[1:4], strict=True))
    seconds = {
        "prefill arithmetic": of_prompts * (prompt.arithmetic_s * constants.prefill[0] + prompt.attention_s),
        "reading weights": of_steps * (parts[0] - cached_s),
        "reading keys and values": steps * stack.cache * constants.factor * cached_s,
        "decode arithmetic": of_steps * parts[1],
        "links between devices": of_steps * sum(parts[2:5]) + of_prompts * links,
        "starting steps": of_steps * parts[5],
        "host": of_steps * parts[6] + steps * stack.host_s * batch,
    }
    if instance.pp > 1:
        together, alone = step_time(instance, constants, stack), step_time(stage, constants, stack)
        waited_s = together([n_in], [0], 0, 0.0) - alone([n_in], [0], 0, 0.0)
        waited_s += steps * (together((), (), batch, context) - alone((), (), batch, context))
        seconds["bubbles and links of stages"] = max(0.0, waited_s)
    return seconds
