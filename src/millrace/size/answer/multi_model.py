"""Several models on shared systems: their instances are added, and systems are rounded up once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.size.answer.answer import SizingAnswer


@dataclass(frozen=True, slots=True)
class Shared:
    """devices: of all instances; systems: to buy for all models; apart: systems if each model had its own

    All models are assumed to peak at the same time, which is an upper bound.
    """

    device: str
    devices: int
    systems: int
    apart: int


def share_systems(answers: Sequence[SizingAnswer]) -> Shared:
    """Combine the answers of several models. raises ConfigError if their hardware or spares differ

    Instances use a power of two of a system's devices, so they fill systems without gaps.
    """
    points = [answer.plan.point for answer in answers]
    kinds = {(point.device, point.system) for point in points}
    if len(kinds) > 1:
        raise ConfigError(
            "the models are best on " + " and ".join(sorted(f"{n} x {name}" for name, n in kinds)),
            "one hardware for all", "name it: --hardware H100",
        )  # fmt: skip
    spares = {answer.question.hardware.spare for answer in answers}
    if len(spares) > 1:
        raise ConfigError("the models have different numbers of spare systems", "one for all", "say it as --spare")
    ((device, system),), (spare,) = kinds, spares
    devices = sum(answer.instances * answer.plan.point.devices for answer in answers)
    return Shared(device, devices, math.ceil(devices / system) + spare, sum(a.plan.systems for a in answers))
