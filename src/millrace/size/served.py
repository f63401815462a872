"""An instance under a closed loop, in closed form: N requests are always in flight.

A request takes its prefill and, with B others beside it, its share of osl - 1 decode steps; the rest is Little's law.
What a user waits for depends on the scheduler as well: TTFT is only estimated here (a queue before prefill), and
simulated where it matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.machine.devices import GB
from millrace.size.constants import Profile
from millrace.size.cost import Instance, decode_terms, prefill_terms
from millrace.size.points import Point, Source, Waits

USABLE, OVERHEAD_BYTES = 0.9, 3 * GB  # of a device's memory; what its software and activations take of that
CONCURRENCIES = (1, 2, 4, 5, 8, 10, 16, 25, 32, 50, 64, 100, 128, 150, 200, 250, 384, 512)


@dataclass(frozen=True, slots=True)
class Serving:
    """What serving adds to steps: fitted to runs of NVIDIA NIM on A100 and H100 (median error of requests/s 10 %)"""

    prefill: float = 1.1
    decode: float = 1.07
    host_s: float = 30e-6  # a sequence and step: sampling, streaming


def kv_capacity(instance: Instance) -> float:
    """Tokens that the cache holds. raises ConfigError where not even the weights fit"""
    memory = instance.tp * (USABLE * instance.device.memory_bytes - OVERHEAD_BYTES)
    left = memory - instance.weights_bytes
    if left <= 0:
        raise ConfigError(
            f"{instance.model.name} in {instance.precision} takes {instance.weights_bytes / GB:.0f} GB, and "
            f"{instance.tp} x {instance.device.name} have {memory / GB:.0f} GB for it",
            "weights and some cache in memory", "use more devices, larger ones, or fewer bits",
        )  # fmt: skip
    return left / instance.kv_token_bytes


def served(
    instance: Instance,
    profile: Profile,
    lengths: tuple[float, float],
    concurrency: float,
    serving: Serving | None = None,
) -> Point:
    """lengths: tokens in and out. raises ConfigError where a single request does not fit"""
    serving = serving or Serving()
    n_in, n_out = lengths
    room = kv_capacity(instance) / (n_in + n_out)
    if room < 1:
        raise ConfigError(
            f"a request of {n_in + n_out:g} tokens does not fit beside {instance.model.name} on {instance.tp} x "
            f"{instance.device.name}",
            f"at most {room * (n_in + n_out):.0f} tokens",
            "use more devices, or shorter requests",
        )
    batch = min(concurrency, room)
    prefill_s = serving.prefill * profile.constants.prefill_s(instance, [n_in])
    step_s = serving.decode * profile.constants.decode_s(instance, batch, n_in + n_out / 2) + serving.host_s * batch
    rate = 1 / (prefill_s + (n_out - 1) * step_s / batch)
    e2e_s = concurrency / rate
    busy = min(0.95, rate * prefill_s)
    queue_s = max(0.0, concurrency - batch) / rate + (busy * prefill_s / (2 * (1 - busy)) if concurrency > 1 else 0.0)
    ttft_s = min(e2e_s, queue_s + prefill_s + (step_s / 2 if concurrency > 1 else 0.0))
    waits = Waits(ttft_s, (e2e_s - ttft_s) / max(1.0, n_out - 1), e2e_s)
    return Point(
        model=instance.model.name, device=instance.device.name, precision=instance.precision, tp=instance.tp,
        input_tokens=n_in, output_tokens=n_out, concurrency=concurrency, rate=rate, mean=waits, p95=None,
        source=Source.ANALYTIC,
    )  # fmt: skip


def static_batch(instance: Instance, profile: Profile, lengths: tuple[float, float], batch: int) -> Point:
    """All requests start and end together, as engines are benchmarked without a server."""
    n_in, n_out = lengths
    prefill_s = profile.constants.prefill_s(instance, [n_in] * batch)
    step_s = profile.constants.decode_s(instance, batch, n_in + n_out / 2)
    e2e_s = prefill_s + n_out * step_s
    return Point(
        model=instance.model.name, device=instance.device.name, precision=instance.precision, tp=instance.tp,
        input_tokens=n_in, output_tokens=n_out, concurrency=batch, rate=batch / e2e_s,
        mean=Waits(prefill_s, step_s, e2e_s), p95=None, source=Source.ANALYTIC,
    )  # fmt: skip


def shares(instance: Instance, profile: Profile, point: Point, serving: Serving | None = None) -> Mapping[str, float]:
    """Of an instance's time at that point, what goes where; together 1."""
    serving, constants = serving or Serving(), profile.constants
    batch = min(point.concurrency, kv_capacity(instance) / (point.input_tokens + point.output_tokens))
    prompt = prefill_terms(instance, [point.input_tokens])
    step = decode_terms(instance, batch, point.input_tokens + point.output_tokens / 2)
    parts = [part * constant for part, constant in zip(step, constants.decode, strict=True)]
    steps = serving.decode * constants.factor * (point.output_tokens - 1) / batch
    first = serving.prefill * constants.factor
    host_s = serving.host_s * batch * (point.output_tokens - 1) / batch
    seconds = {
        "prefill arithmetic": first * (prompt.arithmetic_s * constants.prefill[0] + prompt.attention_s),
        "decode bandwidth": steps * parts[0],
        "decode arithmetic": steps * parts[1],
        "links between devices": steps * sum(parts[2:5])
        + first * sum(a * b for a, b in zip(prompt.rest[:3], constants.prefill[1:4], strict=True)),
        "starting steps": steps * parts[5] + first * constants.prefill[4],
        "host": steps * parts[6] + host_s,
    }
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}
