"""Why so many: from what the datasheet would need to what is bought, memory, other TPs, and the question reversed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.machine.devices import Device
from millrace.size.capacity import Lengths, Replica
from millrace.size.constants import profile
from millrace.size.cost import Constants, Instance
from millrace.size.models import ModelShape
from millrace.size.plan import TPS, Fleet, Plan, instance_of
from millrace.size.points import SYSTEM, Limits, Point
from millrace.size.served import OVERHEAD_BYTES, USABLE, kv_capacity

_IDEAL = Constants((1.0, 0, 0, 0, 0), (1.0, 1.0, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Step:
    """Systems that are needed once this counts, too; before rounding, but for the last two."""

    what: str
    systems: float


def waterfall(found: Plan, instance: Instance, fleet: Fleet) -> list[Step]:
    """From the ideal to what is bought; no step needs fewer than the one before. instance: of the plan's point"""
    known = profile(instance.device, instance.precision)
    lengths = Lengths(round(found.point.input_tokens), round(found.point.output_tokens))
    alone = replace(known.stack, prefill=1.0, decode=1.0, cache=1.0, host_s=0.0)
    ideal = Replica(instance, replace(known, constants=_IDEAL), lengths, alone)
    engine = Replica(instance, known, lengths, alone)
    served = Replica(instance, known, lengths)
    rates = [
        ("all arithmetic and bandwidth of the datasheet", ideal.bound(Limits())),
        ("what engines reach of it", engine.bound(Limits())),
        ("what serving adds", served.bound(Limits())),
        ("steps as they are scheduled", served.full.rate),
        ("limits, and arrivals that come as they like", found.point.rate),
    ]
    steps: list[Step] = []
    for what, rate in rates:
        systems = found.rate / (rate * SYSTEM / instance.tp)
        steps.append(Step(what, max(systems, steps[-1].systems if steps else 0.0)))
    last = steps[-1].systems
    steps.append(Step(f"used to {fleet.utilisation:.0%}", last / fleet.utilisation))
    steps.append(Step("whole systems", float(found.systems - fleet.spare)))
    steps.append(Step(f"{fleet.spare} spare", float(found.systems)))
    return steps


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one instance. held: of keys and values, by requests in flight; free: what more of them could have"""

    total: float
    kept_back: float
    weights: float
    held: float
    free: float


def memory(instance: Instance, point: Point) -> Memory:
    total = instance.tp * instance.device.memory_bytes
    back = total - instance.tp * (USABLE * instance.device.memory_bytes - OVERHEAD_BYTES)
    room = kv_capacity(instance) * instance.kv_token_bytes
    wanted = point.concurrency * (point.input_tokens + point.output_tokens / 2) * instance.kv_token_bytes
    held = min(room, wanted)
    return Memory(total, back, instance.weights_bytes, held, room - held)


@dataclass(frozen=True, slots=True)
class Row:
    """Of a capacity table. point: None where nothing keeps the limits, or fits: why"""

    tp: int
    point: Point | None
    why: str


def capacity_table(
    model: ModelShape, device: Device, precision: str, lengths: Lengths, limits: Limits, tps: Sequence[int] = TPS
) -> list[Row]:
    """Each TP's capacity within the limits; `Point.rate_of_system` is for 8 devices."""
    rows = []
    for tp in tps:
        try:
            replica = Replica(instance_of(model, device, precision, tp), profile(device, precision), lengths)
        except ConfigError as error:
            rows.append(Row(tp, None, error.what))
            continue
        point = replica.most(limits)
        broken = replica.alone_breaks(limits) or limits.broken(replica.alone)
        rows.append(Row(tp, point, "" if point else f"the limit on {' and '.join(broken) or 'waits'}"))
    return rows


@dataclass(frozen=True, slots=True)
class Reach:
    """What given systems serve. rate: requests/s at the peak; users: that ask so often on a day"""

    rate: float
    requests_a_day: float
    users: float
    tokens_a_day: float


def reach(systems: int, point: Point, fleet: Fleet, hours: float = 8.0, requests_a_user: float = 3.0) -> Reach:
    """The reverse question. hours: of a day at that rate; requests_a_user: on a day. raises ConfigError"""
    if not fleet.spare < systems <= 10_000_000:
        raise ConfigError(f"{systems} systems, {fleet.spare} of them spare", "one that serves at least", "add systems")
    if not (0 < hours <= 24 and 0 < requests_a_user <= 1e6):
        raise ConfigError(
            f"{hours:g} hours a day, {requests_a_user:g} requests a user", "up to 24, and above 0", "correct them"
        )
    rate = (systems - fleet.spare) * point.rate_of_system * fleet.utilisation
    a_day = rate * hours * 3600
    return Reach(rate, a_day, a_day / requests_a_user, a_day * (point.input_tokens + point.output_tokens))
