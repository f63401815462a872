"""Memory breakdown of an instance."""

from dataclasses import dataclass

from millrace.size.performance.closed_form import OVERHEAD_BYTES, USABLE, kv_capacity
from millrace.size.performance.operating_point import OperatingPoint
from millrace.size.performance.roofline_cost import ModelInstance


@dataclass(frozen=True, slots=True)
class InstanceMemory:
    """Bytes of one instance. held: KV cache of the requests in flight; free: KV cache for further requests"""

    total: float
    kept_back: float
    weights: float
    held: float
    free: float


def memory(instance: ModelInstance, point: OperatingPoint) -> InstanceMemory:
    total = instance.devices * instance.device.memory_bytes
    back = total - instance.devices * (USABLE * instance.device.memory_bytes - OVERHEAD_BYTES)
    room = kv_capacity(instance) * instance.kv_token_bytes
    needed = point.concurrency * (point.input_tokens + point.output_tokens / 2) * instance.kv_token_bytes
    kv_bytes = min(room, needed)
    return InstanceMemory(total, back, instance.weights_bytes, kv_bytes, room - kv_bytes)
