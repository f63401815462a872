"""Operating points: how many requests an instance serves at a concurrency, and what users wait for meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from millrace.errors import ConfigError
from millrace.report.format_numbers import exact, format_4_digits

SYSTEM = 8  # devices of the machines that are bought, where nobody says
_MOST_S = 1e7  # that a limit allows: settings take 1e6, of which twice as much is looked at, too
# Of calls in a row that were measured apart, for as long as waits are not those of a few outliers in each call.
P95_OF_CALLS = "the p95 of calls in a row is the sum of each call's p95: as a rule an upper bound, not measured"


def named_parallel(tp: int, pp: int) -> str:
    return f"TP{tp}" + (f" PP{pp}" if pp > 1 else "")


class Source(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    ANALYTIC = "analytic"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds to the first token, between tokens, to the last."""

    ttft_s: float
    itl_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of a simulated point. mean_within, p95_within: half of their 95 % intervals

    counted: requests; dropped: those of the transients; how: arrivals and scheduler, in words
    beyond: limits that the next higher rate breaks, where a capacity was sought; nothing: it falls behind there
    cut: time was up before that was known, so that it may serve more
    """

    p99: Waits
    mean_within: Waits
    p95_within: Waits
    counted: int
    dropped: int
    preemptions: int
    how: str
    beyond: tuple[str, ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One instance of tp x pp devices with so many requests in flight. rate: requests a second; p95: where it is known

    input_tokens, output_tokens: of what is in flight, on average; calls: of each, where a request has several in a row
    system: devices of the machines that are bought; sampled: where it was simulated
    """

    model: str
    device: str
    precision: str
    tp: int
    system: int = SYSTEM
    input_tokens: float
    output_tokens: float
    concurrency: float
    rate: float
    mean: Waits
    p95: Waits | None
    source: Source
    sampled: Sampled | None = None
    pp: int = 1
    calls: tuple[tuple[float, float], ...] = ()

    @property
    def lengths(self) -> tuple[tuple[float, float], ...]:
        """Tokens in and out of each call; of one, where there is no other."""
        return self.calls or ((self.input_tokens, self.output_tokens),)

    @property
    def p95_is_a_sum(self) -> bool:
        """Of calls in a row that were measured each by itself: who is slow in one need not be slow in all of them."""
        return self.source == Source.MEASURED and len(self.calls) > 1 and self.p95 is not None

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    @property
    def systems(self) -> int:
        """That an instance takes: several, where it has more devices than one."""
        return max(1, self.devices // self.system)

    @property
    def rate_of_system(self) -> float:
        """Of a machine that is full of such instances, or of its share of one that takes several."""
        return self.rate * self.system / self.devices

    @property
    def configuration(self) -> str:
        return f"{self.precision} {self.parallel} on {self.device}"

    @property
    def parallel(self) -> str:
        return named_parallel(self.tp, self.pp)


@dataclass(frozen=True, slots=True)
class Limits:
    """What users may wait for at most, in seconds; None: as long as it takes. of: "mean" or "p95", which they are on"""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    of: str = "mean"

    def __post_init__(self) -> None:
        if self.of not in ("mean", "p95"):
            raise ConfigError(f"limits on the {self.of}", "the mean, or the p95", "choose one of them")
        for name, value in (("ttft", self.ttft_s), ("itl", self.itl_s), ("e2e", self.e2e_s)):
            if value is not None and not 0 < value < _MOST_S:
                raise ConfigError(
                    f"a limit of {exact(value)} s on {name}",
                    f"above 0 and below {exact(_MOST_S)}, in seconds",
                    "correct it",
                )

    def scaled(self, times: float) -> "Limits":
        """So many times as long; what is not limited stays so."""

        def of(limit: float | None) -> float | None:
            return None if limit is None else limit * times

        return Limits(of(self.ttft_s), of(self.itl_s), of(self.e2e_s), self.of)

    def broken(self, point: Point) -> tuple[str, ...]:
        """Which ones that point breaks; all where its p95 is asked for and not known."""
        waits = point.mean if self.of == "mean" else point.p95
        if waits is None:
            return (f"no {self.of} is known",)
        asked = (
            ("TTFT", self.ttft_s, waits.ttft_s),
            ("ITL", self.itl_s, waits.itl_s),
            ("E2E", self.e2e_s, waits.e2e_s),
        )
        return tuple(name for name, limit, waited in asked if limit is not None and waited > limit)


def best(points: Sequence[Point], limits: Limits) -> Point:
    """The most requests a second for each device within the limits.

    raises ConfigError where none is within them: which limit binds, and who comes closest
    """
    within = [point for point in points if not limits.broken(point)]
    if within:
        return max(within, key=lambda point: (point.rate_of_system, -point.devices))
    if not points:
        raise ConfigError("no operating point is known", "one at least", "give measurements, or choose a device")
    closest = min(points, key=lambda point: (len(limits.broken(point)), point.mean.ttft_s))
    waits = closest.mean if limits.of == "mean" or closest.p95 is None else closest.p95
    raise ConfigError(
        f"nothing here keeps the limit on {' and '.join(limits.broken(closest))} ({limits.of})",
        f"the closest is {closest.configuration} with {format_4_digits(closest.concurrency)} in flight: TTFT "
        f"{waits.ttft_s * 1e3:.0f} ms, ITL {waits.itl_s * 1e3:.1f} ms, E2E {waits.e2e_s:.2f} s",
        "allow more, ask for less, or choose faster devices",
    )  # fmt: skip


def latency_optimal(points: Sequence[Point]) -> Point:
    """Of several that are as quick but for the last digits of a float, the one with the fewest in flight."""
    return min(points, key=lambda point: (float(f"{point.mean.e2e_s:.9g}"), point.devices, point.concurrency))


def throughput_optimal(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: (point.rate_of_system, -point.devices))
