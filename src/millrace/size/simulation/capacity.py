"""Capacity of an instance within latency limits, by simulation with the server's scheduler.

Latencies depend on the scheduler and on the arrivals, so each result names both.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from millrace.size.load.arrivals import ArrivalStream, Gaps, Traffic, arrival
from millrace.size.load.sequential_calls import in_flight
from millrace.size.performance.operating_point import (
    FigureSource,
    Limits,
    OperatingPoint,
    Sampled,
    Waits,
    named_parallel,
)
from millrace.size.performance.roofline_cost import Floats
from millrace.size.simulation.replicas import merge_routed, router, simulate
from millrace.size.simulation.search_budget import SearchBudget, SearchTimeoutError
from millrace.size.simulation.serving_model import Serving
from millrace.size.simulation.simulator import Simulation, SimulationResult
from millrace.size.simulation.virtual_clock import Arrival, RequestOutcome

_LEAST, _REQUESTS_PER_SYSTEM = (
    1000,
    4,
)  # requests per point: at least this many, and this multiple of the requests in flight
_TOKENS, _FEWEST = 1 << 20, 200  # output tokens that bound _LEAST; the minimum number of requests
_TRANSIENT = 0.25  # share of requests at the start that is not counted
_STEADY = 0.95  # highest load relative to a full instance
_ROUNDS = 5  # of a closed loop; the first and the last are not counted
_OCTAVES, _CLOSE = 10, 0.02  # capacities are searched down to 2^-10 of the upper bound, to 2 %
_BATCHES, _T = 10, 2.262  # batch means; Student's t for 95 % and nine degrees of freedom
_MAX_ROUTED, _MAX_REQUESTS = 16, 8192  # instances and requests of a simulation with a router


class Replica:
    """One instance under load. search: the time budget of its simulations; gaps: between requests"""

    def __init__(self, serving: Serving, search: SearchBudget | None = None, gaps: Gaps | None = None) -> None:
        self.serving, self.lengths, self._search = serving, serving.lengths, search or SearchBudget()
        self._room, self._seconds, self._gaps = serving.room, serving.seconds, gaps or Gaps()
        self._points: dict[float, OperatingPoint | None] = {}
        self._full: OperatingPoint | None = None
        self._loops: dict[int, OperatingPoint] = {}

    @property
    def name(self) -> str:
        serving = self.serving
        return f"{serving.precision} {named_parallel(serving.tp, serving.pp)} on {serving.device}"

    def run(self, arrivals: Iterable[Arrival], closed: int | None = None) -> SimulationResult:
        return self._simulation().run(arrivals, closed)

    def _simulation(self, seed: int = 0, of_any: bool = False) -> Simulation:
        """Create a simulation. seed: of step-time noise; of_any: requests of any lengths, with a prefix cache"""
        factory = self.serving.any_lengths if of_any else self.serving.simulation
        return replace(factory(seed), tick=self._search.tick)

    def run_closed(self, concurrency: int) -> OperatingPoint:
        """Simulate a closed loop: a constant number of requests in flight."""
        n = concurrency * _ROUNDS
        result = self.run([arrival(self.lengths, 0)] * n, concurrency)
        counted = result.requests[concurrency : n - concurrency]
        rate = concurrency / float(np.mean([request.e2e_s for request in counted]))
        return self._point(counted, n, rate, concurrency, result, f"{concurrency} always in flight")

    @property
    def _n_requests(self) -> int:
        """Return the number of requests to simulate; fewer if answers are long, because each takes many steps."""
        n_out = sum(call.n_output for call in self.lengths.calls)
        return max(_REQUESTS_PER_SYSTEM * self._room, min(_LEAST, max(_FEWEST, _TOKENS // n_out)))

    @property
    def full(self) -> OperatingPoint:
        """Return the point at the highest concurrency that fits, which is the highest throughput."""
        if self._full is None:
            self._full = self.run_closed(self._room)
        return self._full

    def at(self, rate: float, seed: int = 0) -> OperatingPoint | None:
        """Simulate a rate in requests/s; None above 95 % of a full instance, where queues would grow for longer than
        is simulated.

        The same seed gives the same gaps, scaled by the rate.
        """
        if rate > _STEADY * self.full.rate:
            return None
        n = self._n_requests
        times = self._gaps.times(rate, n, seed)
        result = self.run(arrival(self.lengths, float(t)) for t in times)
        counted = result.requests[int(n * _TRANSIENT) :]
        concurrency = rate * float(np.mean([request.e2e_s for request in counted]))
        return self._point(counted, n, rate, concurrency, result, str(self._gaps))

    def behind(self, traffic: Traffic, instances: int, rate: float, seed: int = 0) -> OperatingPoint | None:
        """Simulate instances behind a router at a mean rate per instance; None as in `at`.

        At most 16 instances are simulated: a router hardly benefits from more.
        raises ConfigError if no request of a trace fits
        """
        if rate > _STEADY * self.full.rate:
            return None
        many = min(instances, _MAX_ROUTED)
        most = min(self._n_requests * many, _MAX_REQUESTS)
        coming = traffic.stream(self.lengths, self.serving.context, rate * many, most, seed)
        simulations = [self._simulation(i, traffic.recorded is not None or traffic.is_cached) for i in range(many)]
        result = merge_routed(simulate(simulations, coming.arrivals, router(traffic.routing, seed)))
        n = len(coming.arrivals)
        counted = result.requests[int(n * _TRANSIENT) :]
        if traffic.recorded is not None:
            span_s = counted[-1].arrival.at_s - counted[0].arrival.at_s
            if span_s <= 0:
                return None  # a few requests at the same instant
            rate = (len(counted) - 1) / span_s / many
        concurrency = rate * float(np.mean([request.e2e_s for request in counted]))
        how = f"{_arrivals_text(traffic, coming)} at {many} instances behind a router ({traffic.routing})"
        if traffic.is_cached:
            tokens = sum(request.n_input for request in coming.arrivals)
            how += f", {result.prefix_hits / tokens:.0%} of prompts' tokens were in a cache"
        return self._point(counted, n, rate, concurrency, result, how)

    def best_within(self, limits: Limits, above: float = 0.0) -> OperatingPoint | None:
        """Return the highest rate within the limits, with the limits that the next higher tried rate breaks.

        None: not even 2^-10 of the upper bound meets them, or nothing above `above`. The rates tried do not depend on
        the limits, so looser limits never give less.

        raises SearchTimeoutError before any rate is found; afterwards the best one is returned, marked as cut
        """
        if self.alone_breaks(limits):
            return None
        steps = math.ceil(_OCTAVES / math.log2(1 + _CLOSE))
        least = math.floor(steps + math.log2(above / self._highest) * steps / _OCTAVES) - 2 if above else 0
        if least > 0 and not self._meets(least / steps, limits):
            return None
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            try:
                meets = self._meets(middle / steps, limits)
            except SearchTimeoutError:
                if not low:
                    raise
                return _cut(self._at(low / steps))
            low, high = (middle, high) if meets else (low, middle)
        best = self._at(low / steps) if low else None
        return _beyond(best, self._at(high / steps), limits) if best is not None else None

    def best_closed_within(self, limits: Limits) -> OperatingPoint | None:
        """Return the highest concurrency of a closed loop within the limits; None: not even one request.

        raises SearchTimeoutError, as `best_within`
        """
        low, high = 0, 2 * self._room + 1
        while high - low > 1:
            middle = (low + high) // 2
            try:
                if middle not in self._loops:
                    self._loops[middle] = self.run_closed(middle)
            except SearchTimeoutError:
                if not low:
                    raise
                return _cut(self._loops[low])
            low, high = (low, middle) if limits.broken(self._loops[middle]) else (middle, high)
        after = self._loops.get(high)
        return _beyond(self._loops[low], after, limits) if low else None

    @property
    def _highest(self) -> float:
        """Return the upper end of the searched rates."""
        bound = self.bound(Limits())
        return bound if math.isfinite(bound) else self.full.rate

    def _meets(self, share: float, limits: Limits) -> bool:
        point = self._at(share)
        return point is not None and not limits.broken(point)

    def _at(self, share: float) -> OperatingPoint | None:
        """Return the point at a share of the octaves below the upper bound."""
        if share not in self._points:
            self._points[share] = self.at(self._highest * 2 ** (_OCTAVES * (share - 1)))
        return self._points[share]

    @property
    def tried(self) -> tuple[OperatingPoint, ...]:
        """Return the sustained points that a search has tried, by rate; closed loops if no rate was tried."""
        points = [point for point in self._points.values() if point is not None] or [*self._loops.values()]
        return tuple(sorted(points, key=lambda point: point.rate))

    @property
    def single_request(self) -> OperatingPoint:
        """Return the point with one request at a time."""
        return self.run_closed(1)

    def alone_breaks(self, limits: Limits) -> tuple[str, ...]:
        """Return the limits that not even a single request meets."""
        waited_s = 0.0  # for the calls before
        for call in self.lengths.calls:
            ttft_s = waited_s + self.serving.front_s + self._seconds([call.n_input], [0], 0, 0.0)
            step_s = self._seconds((), (), 1, call.n_input)
            waited_s = ttft_s + (call.n_output - 1) * step_s
        checks = (
            ("TTFT", limits.ttft_s, ttft_s), ("ITL", limits.itl_s if call.n_output > 1 else None, step_s),
            ("E2E", limits.e2e_s, waited_s),
        )  # fmt: skip
        return tuple(name for name, limit, waited in checks if limit is not None and waited > limit)

    def bound(self, limits: Limits) -> float:
        """Return an upper bound of requests/s: prefill arithmetic, and decode steps shared by as many as fit.

        Step times grow with the batch, and ITL is at least the mean step time, so a limit on ITL bounds the batch.
        inf for a server whose measured steps give no bound.
        """
        if self.serving.running is None:
            return math.inf
        n, context = self.serving.running, min(call.n_input + call.n_output / 2 for call in self.lengths.calls)
        itl_s = limits.itl_s if self.lengths.n_output > 1 else None  # an answer of one token has none
        while itl_s is not None and n > 1 and self._seconds((), (), n, context) > itl_s:
            n -= max(1, n // 64)
        return 1 / sum(
            self._seconds([call.n_input], [0], 1, 0.0) - self._seconds((), (), 1, 0.0)
            + (call.n_output - 1) * self._seconds((), (), n, call.n_input + call.n_output / 2) / n
            for call in self.lengths.calls
        )  # fmt: skip

    @cached_property
    def _usual(self) -> tuple[float, float]:
        """Return mean input and output tokens of a call in flight, weighted by the duration of each call alone."""
        lengths, alone_s = [], []
        for call in self.lengths.calls:
            lengths.append((call.n_input, call.n_output))
            step_s = self._seconds((), (), 1, call.n_input + call.n_output / 2)
            alone_s.append(self.serving.front_s + self._seconds([call.n_input], [0], 0, 0.0)
                           + (call.n_output - 1) * step_s)  # fmt: skip
        return in_flight(lengths, alone_s)

    def _point(
        self,
        counted: Sequence[RequestOutcome],
        n: int,
        rate: float,
        concurrency: float,
        result: SimulationResult,
        description: str,
    ) -> OperatingPoint:
        waits = {name: _values(counted, name) for name in ("ttft_s", "itl_s", "e2e_s")}

        def waits_by(statistic: Callable[[Floats], float]) -> Waits:
            return Waits(*(statistic(values) for values in waits.values()))

        serving = self.serving
        return OperatingPoint(
            model=serving.model,
            device=serving.device,
            precision=serving.precision,
            tp=serving.tp,
            pp=serving.pp,
            input_tokens=self._usual[0],
            output_tokens=self._usual[1],
            concurrency=concurrency,
            rate=rate,
            calls=tuple((call.n_input, call.n_output) for call in self.lengths.calls) if self.lengths.before else (),
            mean=waits_by(lambda v: float(v.mean())),
            p95=waits_by(lambda v: float(np.quantile(v, 0.95))),
            source=FigureSource.SIMULATED,
            sampled=Sampled(
                waits_by(lambda v: float(np.quantile(v, 0.99))),
                waits_by(lambda v: _interval(v, np.mean)),
                waits_by(lambda v: _interval(v, _p95)),
                len(counted),
                n - len(counted),
                result.preemptions,
                f"{description}; {serving.scheduler}",
            ),
        )


def _arrivals_text(traffic: Traffic, coming: ArrivalStream) -> str:
    if traffic.recorded is None:
        return str(traffic.gaps)
    without = f" without {coming.left_out} that are empty or too long" if coming.left_out else ""
    return f"{len(coming.arrivals)} recorded requests{without}"


def _beyond(point: OperatingPoint, after: OperatingPoint | None, limits: Limits) -> OperatingPoint:
    """Return the point with the limits that the next one breaks. after: None if the instance falls behind there"""
    assert point.sampled is not None, "it was simulated"
    return replace(point, sampled=replace(point.sampled, beyond=limits.broken(after) if after is not None else ()))


def _cut(point: OperatingPoint | None) -> OperatingPoint:
    assert point is not None and point.sampled is not None, "it was simulated, and keeps the limits"
    return replace(point, sampled=replace(point.sampled, cut=True))


def _values(requests: Sequence[RequestOutcome], name: str) -> Floats:
    values: Floats = np.array([getattr(request, name) for request in requests])
    finite: Floats = values[~np.isnan(values)]  # answers of one token have no ITL
    return finite if len(finite) else np.zeros(1)


def _p95(values: Floats) -> float:
    return float(np.quantile(values, 0.95))


def _interval(values: Floats, statistic: Callable[[Floats], float]) -> float:
    """Return half of the 95 % interval by batch means, because neighbouring values are correlated."""
    if len(values) < 2 * _BATCHES:
        return math.inf
    batches = [float(statistic(batch)) for batch in np.array_split(values, _BATCHES)]
    return _T * float(np.std(batches, ddof=1)) / math.sqrt(_BATCHES)
