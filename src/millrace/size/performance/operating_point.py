"""Operating points of an instance: requests/s and latencies at a concurrency; latency limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from millrace.errors import ConfigError
from millrace.report.format_numbers import format_4_digits, format_exact

SYSTEM = 8  # default number of devices of a system
_MAX_S = 1e7  # largest limit: settings take 1e6, and the sensitivity analysis doubles it
# An upper bound unless the latencies are dominated by a few outliers in each call.
P95_OF_CALLS = "the p95 of calls in a row is the sum of each call's p95: as a rule an upper bound, not measured"


def named_parallel(tp: int, pp: int) -> str:
    return f"TP{tp}" + (f" PP{pp}" if pp > 1 else "")


class FigureSource(StrEnum):
    """The origin of a figure."""

    MEASURED = "measured"
    ANALYTIC = "analytic"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Waits:
    """Latencies in seconds: to the first token, between tokens, to the last token."""

    ttft_s: float
    itl_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """Details of a simulated point. mean_within, p95_within: half widths of the 95 % confidence intervals

    counted: requests in the statistics; dropped: those of the warm-up and drain; how: arrivals and scheduler, for
    people
    beyond: limits that the next higher tried rate breaks; (): the instance falls behind there
    cut: the search ended early, so the instance may serve more
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
class OperatingPoint:
    """One instance of tp x pp devices at a concurrency. rate: requests/s; p95: None if unknown

    input_tokens, output_tokens: mean of the calls in flight; calls: lengths of each if a request has several
    system: devices of a system; sampled: None unless simulated
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
    source: FigureSource
    sampled: Sampled | None = None
    pp: int = 1
    calls: tuple[tuple[float, float], ...] = ()

    @property
    def lengths(self) -> tuple[tuple[float, float], ...]:
        """Return input and output tokens of each call."""
        return self.calls or ((self.input_tokens, self.output_tokens),)

    @property
    def p95_is_a_sum(self) -> bool:
        """Whether the p95 adds up the p95 of calls that were measured separately, which overestimates it."""
        return self.source == FigureSource.MEASURED and len(self.calls) > 1 and self.p95 is not None

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    @property
    def systems(self) -> int:
        """Return the number of systems that one instance takes, at least 1."""
        return max(1, self.devices // self.system)

    @property
    def rate_of_system(self) -> float:
        """Return the requests/s of a system full of such instances, or of its share of a larger instance."""
        return self.rate * self.system / self.devices

    @property
    def configuration(self) -> str:
        return f"{self.precision} {self.parallel} on {self.device}"

    @property
    def parallel(self) -> str:
        return named_parallel(self.tp, self.pp)


@dataclass(frozen=True, slots=True)
class Limits:
    """Latency limits in seconds; None: unlimited. statistic: "mean" or "p95", to which the limits apply"""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    statistic: str = "mean"

    def __post_init__(self) -> None:
        if self.statistic not in ("mean", "p95"):
            raise ConfigError(f"limits on the {self.statistic}", "the mean, or the p95", "choose one of them")
        for name, value in (("ttft", self.ttft_s), ("itl", self.itl_s), ("e2e", self.e2e_s)):
            if value is not None and not 0 < value < _MAX_S:
                raise ConfigError(
                    f"a limit of {format_exact(value)} s on {name}",
                    f"above 0 and below {format_exact(_MAX_S)}, in seconds",
                    "correct it",
                )

    def scale(self, times: float) -> "Limits":
        """Return limits that are `times` as long; unlimited latencies stay unlimited."""

        def scale(limit: float | None) -> float | None:
            return None if limit is None else limit * times

        return Limits(scale(self.ttft_s), scale(self.itl_s), scale(self.e2e_s), self.statistic)

    def broken(self, point: OperatingPoint) -> tuple[str, ...]:
        """Return the limits that a point breaks, or that the statistic is unknown."""
        waits = point.mean if self.statistic == "mean" else point.p95
        if waits is None:
            return (f"no {self.statistic} is known",)
        checks = (
            ("TTFT", self.ttft_s, waits.ttft_s),
            ("ITL", self.itl_s, waits.itl_s),
            ("E2E", self.e2e_s, waits.e2e_s),
        )
        return tuple(name for name, limit, waited in checks if limit is not None and waited > limit)


def best(points: Sequence[OperatingPoint], limits: Limits) -> OperatingPoint:
    """Return the point with the most requests/s of a system within the limits; ties: the fewest devices.

    raises ConfigError if none is within them, with the limit that binds and the closest point
    """
    within = [point for point in points if not limits.broken(point)]
    if within:
        return max(within, key=lambda point: (point.rate_of_system, -point.devices))
    if not points:
        raise ConfigError("no operating point is known", "one at least", "give measurements, or choose a device")
    closest = min(points, key=lambda point: (len(limits.broken(point)), point.mean.ttft_s))
    waits = closest.mean if limits.statistic == "mean" or closest.p95 is None else closest.p95
    raise ConfigError(
        f"nothing here keeps the limit on {' and '.join(limits.broken(closest))} ({limits.statistic})",
        f"the closest is {closest.configuration} with {format_4_digits(closest.concurrency)} in flight: TTFT "
        f"{waits.ttft_s * 1e3:.0f} ms, ITL {waits.itl_s * 1e3:.1f} ms, E2E {waits.e2e_s:.2f} s",
        "allow more, ask for less, or choose faster devices",
    )  # fmt: skip


def latency_optimal(points: Sequence[OperatingPoint]) -> OperatingPoint:
    """Return the point with the lowest E2E latency; ties up to rounding: fewest devices, then lowest concurrency."""
    return min(points, key=lambda point: (float(f"{point.mean.e2e_s:.9g}"), point.devices, point.concurrency))


def throughput_optimal(points: Sequence[OperatingPoint]) -> OperatingPoint:
    return max(points, key=lambda point: (point.rate_of_system, -point.devices))
