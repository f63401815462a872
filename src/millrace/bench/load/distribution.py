"""Distributions given as flags: `100`, `normal:100,20`, `lognormal:100,50`, `exponential:100`."""

import math
import random
from dataclasses import dataclass

from millrace.errors import ConfigError

KINDS = ("constant", "normal", "lognormal", "exponential")
_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution with a mean and standard deviation; negative samples of a normal one become 0."""

    mean: float
    deviation: float = 0.0
    kind: str = "constant"

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        for name, value in (("mean", self.mean), ("deviation", self.deviation)):
            if not 0 <= value <= _LARGEST:
                raise ConfigError(f"a {name} of {value:g}", f"a number from 0 to {_LARGEST:g}", "write one")

    @classmethod
    def normal(cls, mean: float, deviation: float) -> "Spread":
        return cls(mean, deviation, "normal" if deviation else "constant")

    @classmethod
    def parse(cls, text: str, flag: str) -> "Spread":
        """Parse a distribution. raises ConfigError that names `flag`"""
        kind, colon, numbers = text.partition(":")
        if not colon:
            kind, numbers = "constant", text
        n_expected = 2 if kind in ("normal", "lognormal") else 1
        try:
            values = [float(part) for part in numbers.split(",")]
        except ValueError:
            values = []
        if kind not in KINDS or len(values) != n_expected:
            raise ConfigError(
                f'{flag} is "{text}"', "100, normal:100,20, lognormal:100,20 or exponential:100 (mean, deviation)",
                "write it so",
            )  # fmt: skip
        return cls(values[0], values[1] if n_expected == 2 else values[0] * (kind == "exponential"), kind)

    def draw(self, rng: random.Random) -> float:
        match self.kind:
            case "normal":
                return max(0.0, rng.gauss(self.mean, self.deviation))
            case "lognormal" if self.mean:
                variance = math.log1p((self.deviation / self.mean) ** 2)
                return rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
            case "exponential" if self.mean:
                return rng.expovariate(1 / self.mean)
        return self.mean
