"""Where the memory of an instance goes."""

from dataclasses import dataclass

from millrace.size.performance.closed_form import OVERHEAD_BYTES, USABLE, kv_capacity
from millrace.size.performance.operating_point import Point
from millrace.size.performance.roofline_cost import Instance


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one instance. held: of keys and values, by requests in flight; free: what more of them could have"""

    total: float
    kept_back: float
    weights: float
    held: float
    free: float


def memory(instance: Instance, point: Point) -> Memory:
    total = instance.devices * instance.device.memory_bytes
    back = total - instance.devices * (USABLE * instance.device.memory_bytes - OVERHEAD_BYTES)
    room = kv_capacity(instance) * instance.kv_token_bytes
    wanted = point.concurrency * (point.input_tokens + point.output_tokens / 2) * instance.kv_token_bytes
    held = min(room, wanted)
    return Memory(total, back, instance.weights_bytes, held, room - held)
