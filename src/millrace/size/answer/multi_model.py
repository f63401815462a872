"""Several models on the same systems: instances side by side, rounded up once for all of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.size.answer.answer import Answer


@dataclass(frozen=True, slots=True)
class Shared:
    """devices: of all instances; systems: to buy for all; apart: were each bought for itself

    All peaks are taken to come at once: they may not, and then less is needed.
    """

    device: str
    devices: int
    systems: int
    apart: int


def shared(answers: Sequence[Answer]) -> Shared:
    """Instances are powers of two of a system's devices, so that they fit without gaps. raises ConfigError"""
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
