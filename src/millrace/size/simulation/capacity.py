"""How many requests a second an instance serves within limits, by simulation with the scheduler that serves.

What is waited for is a property of the scheduler and of how requests come, so each answer names both.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from millrace.size.load.arrivals import ArrivalStream, Gaps, Traffic, arrival
from millrace.size.load.sequential_calls import in_flight
from millrace.size.performance.operating_point import Limits, Point, Sampled, Source, Waits, named_parallel
from millrace.size.performance.roofline_cost import Floats
from millrace.size.simulation.replicas import merge_routed, router, simulate
from millrace.size.simulation.search_budget import Search, SearchTimeoutError
from millrace.size.simulation.serving_model import Serving
from millrace.size.simulation.simulator import Simulated, Simulation
from millrace.size.simulation.virtual_clock import Arrival, RequestOutcome

_LEAST, _TURNS = 1000, 4  # requests simulated for a point: so many, and so many times those that can be in flight
_TOKENS, _FEWEST = 1 << 20, 200  # of answers, that the first of these have together at most; and the fewest requests
_TRANSIENT = 0.25  # of them, those at the beginning that are not counted
_STEADY = 0.95  # of what a full instance serves, that Poisson arrivals may ask for
_ROUNDS = 5  # of a closed loop: the first and the last are not counted
_OCTAVES, _CLOSE = 10, 0.02  # capacities are sought down to 2^-10 of what no schedule exceeds, to 2 %
_BATCHES, _T = 10, 2.262  # means of ten runs of neighbours, Student's t for 95 % of nine degrees of freedom
_MOST_ROUTED, _MOST_REQUESTS = 16, 8192  # instances and requests of a simulation behind a router


class Replica:
    """One instance under load. search: which its simulations are part of; gaps: between requests"""

    def __init__(self, serving: Serving, search: Search | None = None, gaps: Gaps | None = None) -> None:
        self.serving, self.lengths, self._search = serving, serving.lengths, search or Search()
        self._room, self._seconds, self._gaps = serving.room, serving.seconds, gaps or Gaps()
        self._known: dict[float, Point | None] = {}
        self._full: Point | None = None
        self._loops: dict[int, Point] = {}

    @property
    def name(self) -> str:
        one = self.serving
        return f"{one.precision} {named_parallel(one.tp, one.pp)} on {one.device}"

    def run(self, arrivals: Iterable[Arrival], closed: int | None = None) -> Simulated:
        return self._simulation().run(arrivals, closed)

    def _simulation(self, seed: int = 0, of_any: bool = False) -> Simulation:
        """seed: of what its steps take, where that varies; of_any: requests, and what they share is found"""
        made = self.serving.of_any if of_any else self.serving.simulation
        return replace(made(seed), tick=self._search.tick)

    def closed(self, concurrency: int) -> Point:
        """So many requests always in flight, as serving is mostly measured."""
        n = concurrency * _ROUNDS
        found = self.run([arrival(self.lengths, 0)] * n, concurrency)
        counted = found.requests[concurrency : n - concurrency]
        rate = concurrency / float(np.mean([one.e2e_s for one in counted]))
        return self._point(counted, n, rate, concurrency, found, f"{concurrency} always in flight")

    @property
    def _n_requests(self) -> int:
        """Of a point: fewer where answers are long, for each of them has many steps."""
        n_out = sum(call.n_output for call in self.lengths.calls)
        return max(_TURNS * self._room, min(_LEAST, max(_FEWEST, _TOKENS // n_out)))

    @property
    def full(self) -> Point:
        """With as many in flight as fit: the most that it serves, whatever is waited for."""
        if self._full is None:
            self._full = self.closed(self._room)
        return self._full

    def at(self, rate: float, seed: int = 0) -> Point | None:
        """So many requests a second; None where that is more than 95 % of what a full instance serves: queues
        would grow for longer than is simulated.

        The same seed gives the same gaps, only shorter or longer.
        """
        if rate > _STEADY * self.full.rate:
            return None
        n = self._n_requests
        times = self._gaps.times(rate, n, seed)
        found = self.run(arrival(self.lengths, float(t)) for t in times)
        counted = found.requests[int(n * _TRANSIENT) :]
        concurrency = rate * float(np.mean([one.e2e_s for one in counted]))
        return self._point(counted, n, rate, concurrency, found, str(self._gaps))

    def behind(self, traffic: Traffic, instances: int, rate: float, seed: int = 0) -> Point | None:
        """So many such instances behind a router, with that rate each on average; None as of `at`.

        Of more than 16 instances 16 are simulated: a router that chooses among more does hardly better.
        raises ConfigError where no request of a trace fits
        """
        if rate > _STEADY * self.full.rate:
            return None
        many = min(instances, _MOST_ROUTED)
        most = min(self._n_requests * many, _MOST_REQUESTS)
        coming = traffic.coming(self.lengths, self.serving.context, rate * many, most, seed)
        simulations = [self._simulation(i, traffic.recorded is not None or traffic.is_cached) for i in range(many)]
        found = merge_routed(simulate(simulations, coming.arrivals, router(traffic.routing, seed)))
        n = len(coming.arrivals)
        counted = found.requests[int(n * _TRANSIENT) :]
        if traffic.recorded is not None:
            span_s = counted[-1].arrival.at_s - counted[0].arrival.at_s
            if span_s <= 0:
                return None  # a handful of requests, all at once
            rate = (len(counted) - 1) / span_s / many
        concurrency = rate * float(np.mean([one.e2e_s for one in counted]))
        how = f"{_how(traffic, coming)} at {many} instances behind a router ({traffic.routing})"
        if traffic.is_cached:
            tokens = sum(one.n_input for one in coming.arrivals)
            how += f", {found.prefix_hits / tokens:.0%} of prompts' tokens were in a cache"
        return self._point(counted, n, rate, concurrency, found, how)

    def most(self, limits: Limits, above: float = 0.0) -> Point | None:
        """The highest rate within the limits, and what the next higher one that was tried breaks.

        None: not even 2^-10 of what the devices could do keeps them, or no more than `above` does. Rates that are tried
        are the same ones whatever the limits, so that looser limits never give less.

        raises TimeIsUp before any is found; once there is one, it is the answer, and says that it was cut
        """
        if self.alone_breaks(limits):
            return None
        steps = math.ceil(_OCTAVES / math.log2(1 + _CLOSE))
        least = math.floor(steps + math.log2(above / self._highest) * steps / _OCTAVES) - 2 if above else 0
        if least > 0 and not self._keeps(least / steps, limits):
            return None
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            try:
                keeps = self._keeps(middle / steps, limits)
            except SearchTimeoutError:
                if not low:
                    raise
                return _cut(self._at(low / steps))
            low, high = (middle, high) if keeps else (low, middle)
        found = self._at(low / steps) if low else None
        return _beyond(found, self._at(high / steps), limits) if found is not None else None

    def most_closed(self, limits: Limits) -> Point | None:
        """The most requests always in flight within the limits, as serving is mostly measured; None: not even one.

        raises TimeIsUp, as `most`
        """
        low, high = 0, 2 * self._room + 1
        while high - low > 1:
            middle = (low + high) // 2
            try:
                if middle not in self._loops:
                    self._loops[middle] = self.closed(middle)
            except SearchTimeoutError:
                if not low:
                    raise
                return _cut(self._loops[low])
            low, high = (low, middle) if limits.broken(self._loops[middle]) else (middle, high)
        after = self._loops.get(high)
        return _beyond(self._loops[low], after, limits) if low else None

    @property
    def _highest(self) -> float:
        """Requests a second, from which on down capacities are sought."""
        bound = self.bound(Limits())
        return bound if math.isfinite(bound) else self.full.rate

    def _keeps(self, share: float, limits: Limits) -> bool:
        point = self._at(share)
        return point is not None and not limits.broken(point)

    def _at(self, share: float) -> Point | None:
        """share: of the octaves below what no schedule exceeds"""
        if share not in self._known:
            self._known[share] = self.at(self._highest * 2 ** (_OCTAVES * (share - 1)))
        return self._known[share]

    @property
    def tried(self) -> tuple[Point, ...]:
        """All rates at which it keeps up, among those that a search has tried, or all loops."""
        known = [point for point in self._known.values() if point is not None] or [*self._loops.values()]
        return tuple(sorted(known, key=lambda point: point.rate))

    @property
    def alone(self) -> Point:
        """One request at a time."""
        return self.closed(1)

    def alone_breaks(self, limits: Limits) -> tuple[str, ...]:
        """Limits that not even a request alone keeps."""
        waited_s = 0.0  # for the calls before
        for call in self.lengths.calls:
            ttft_s = waited_s + self.serving.front_s + self._seconds([call.n_input], [0], 0, 0.0)
            step_s = self._seconds((), (), 1, call.n_input)
            waited_s = ttft_s + (call.n_output - 1) * step_s
        asked = (
            ("TTFT", limits.ttft_s, ttft_s), ("ITL", limits.itl_s if call.n_output > 1 else None, step_s),
            ("E2E", limits.e2e_s, waited_s),
        )  # fmt: skip
        return tuple(name for name, limit, waited in asked if limit is not None and waited > limit)

    def bound(self, limits: Limits) -> float:
        """Requests a second that no schedule exceeds: arithmetic of prompts, and decode steps shared by as many as fit.

        A step grows with what runs in it, and answers see the mean of their steps at least: so a limit on ITL bounds
        how many run. inf: of a server whose steps follow no law that would bound them
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
        """Tokens in and out of what is in flight at a time, on average: each call as long as it takes alone."""
        lengths, alone_s = [], []
        for call in self.lengths.calls:
            lengths.append((call.n_input, call.n_output))
            step_s = self._seconds((), (), 1, call.n_input + call.n_output / 2)
            alone_s.append(self.serving.front_s + self._seconds([call.n_input], [0], 0, 0.0)
                           + (call.n_output - 1) * step_s)  # fmt: skip
        return in_flight(lengths, alone_s)

    def _point(
        self, counted: Sequence[RequestOutcome], n: int, rate: float, concurrency: float, found: Simulated, how: str
    ) -> Point:
        waits = {name: _values(counted, name) for name in ("ttft_s", "itl_s", "e2e_s")}

        def of(what: Callable[[Floats], float]) -> Waits:
            return Waits(*(what(values) for values in waits.values()))

        one = self.serving
        return Point(
            model=one.model, device=one.device, precision=one.precision, tp=one.tp, pp=one.pp,
            input_tokens=self._usual[0], output_tokens=self._usual[1], concurrency=concurrency, rate=rate,
            calls=tuple((call.n_input, call.n_output) for call in self.lengths.calls) if self.lengths.before else (),
            mean=of(lambda v: float(v.mean())), p95=of(lambda v: float(np.quantile(v, 0.95))), source=Source.SIMULATED,
            sampled=Sampled(
                of(lambda v: float(np.quantile(v, 0.99))), of(lambda v: _interval(v, np.mean)),
                of(lambda v: _interval(v, _p95)), len(counted), n - len(counted), found.preemptions,
                f"{how}; {one.scheduler}",
            ),
        )  # fmt: skip


def _how(traffic: Traffic, coming: ArrivalStream) -> str:
    if traffic.recorded is None:
        return str(traffic.gaps)
    without = f" without {coming.left_out} that are empty or too long" if coming.left_out else ""
    return f"{len(coming.arrivals)} recorded requests{without}"


def _beyond(point: Point, after: Point | None, limits: Limits) -> Point:
    """The point, and what the next one breaks; None: there the instance falls behind."""
    assert point.sampled is not None, "it was simulated"
    return replace(point, sampled=replace(point.sampled, beyond=limits.broken(after) if after is not None else ()))


def _cut(point: Point | None) -> Point:
    assert point is not None and point.sampled is not None, "it was simulated, and keeps the limits"
    return replace(point, sampled=replace(point.sampled, cut=True))


def _values(requests: Sequence[RequestOutcome], name: str) -> Floats:
    values: Floats = np.array([getattr(one, name) for one in requests])
    known: Floats = values[~np.isnan(values)]  # answers of one token have no ITL
    return known if len(known) else np.zeros(1)


def _p95(values: Floats) -> float:
    return float(np.quantile(values, 0.95))


def _interval(values: Floats, of: Callable[[Floats], float]) -> float:
    """Half of the 95 % interval, from batches of neighbours, as neighbours are alike."""
    if len(values) < 2 * _BATCHES:
        return math.inf
    found = [float(of(batch)) for batch in np.array_split(values, _BATCHES)]
    return _T * float(np.std(found, ddof=1)) / math.sqrt(_BATCHES)
