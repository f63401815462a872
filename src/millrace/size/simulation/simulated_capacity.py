"""Simulated capacities of the most promising configurations, within latency limits and a time budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.size.load.arrivals import Gaps, Traffic
from millrace.size.load.token_lengths import Lengths, RequestWork
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.operating_point import Limits, OperatingPoint, best
from millrace.size.performance.operating_points import Offers, scale_times
from millrace.size.question.settings import HardwareSettings
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.search_budget import SearchBudget, SearchTimeoutError
from millrace.size.simulation.serving_model import Serving, make_serving


class Replicas:
    """Cache of simulated instances: their results are reused for other limits."""

    def __init__(self, search: SearchBudget | None = None, gaps: Gaps | None = None) -> None:
        self.search, self._gaps = search or SearchBudget(), gaps or Gaps()
        self._replicas: dict[tuple[str, str, int, int, Lengths], Replica] = {}

    def get(self, offers: Offers, point: OperatingPoint, lengths: Lengths) -> Replica:
        key = point.device, point.precision, point.tp, point.pp, lengths
        if key not in self._replicas:
            self._replicas[key] = Replica(_serving(offers, point, lengths), self.search, self._gaps)
        return self._replicas[key]


def _serving(offers: Offers, point: OperatingPoint, lengths: Lengths) -> Serving:
    if offers.profiled is not None:
        return offers.profiled.serving(lengths)
    instance = offers.instance(point)
    assert instance is not None, "only what is computed is simulated"
    stack = offers.own.stack_for(point.device, point.precision) if offers.own else None
    return make_serving(instance, profile(instance.device, point.precision), lengths, stack)


def add_simulated(
    offers: Offers,
    settings: HardwareSettings,
    work: RequestWork,
    limits: Limits,
    replicas: Replicas,
    closed: bool = False,
) -> Offers:
    """Add simulated capacities of the configurations that could serve most per device, with random arrivals.

    Branch and bound: configurations whose upper bound is too low are skipped. Offers of one device; they are returned
    unchanged if they were measured, or if the search time is up before anything is found.
    closed: simulate closed loops instead of random arrivals
    raises ConfigError if nothing meets the limits
    """
    if offers.basis is None or settings.measured is not None:
        return offers
    tried, lengths = limits.scale(1 / settings.factor), Lengths.from_work(work)
    alike = {(p.precision, p.tp, p.pp): replicas.get(offers, p, lengths) for p in offers.points}
    bounded = [
        _CapacitySearch(replica.bound(tried) / (tp * pp), tp * pp, replica) for (_, tp, pp), replica in alike.items()
    ]
    search, owner = replicas.search, (offers.names[0], lengths, limits)
    search.forget(owner)
    cut = _seek(sorted(bounded, key=lambda candidate: -candidate.bound), tried, search, closed)
    for candidate in cut:
        search.cut(candidate.replica.name, owner)
    points: list[OperatingPoint] = []
    other_rates: list[OperatingPoint] = []  # other rates of the same configurations, for plots
    for candidate in bounded:
        if candidate.point is not None:
            points.append(replace(scale_times(candidate.point, settings.factor), system=offers.points[0].system))
            other_rates += [
                replace(scale_times(p, settings.factor), system=offers.points[0].system)
                for p in candidate.replica.tried
            ]
    if not points:
        try:
            single_request = [
                replace(scale_times(replica.single_request, settings.factor), system=1) for replica in alike.values()
            ]
        except SearchTimeoutError:
            search.cut(f"a request alone on {offers.names[0]}", owner)
            return _not_simulated(offers, limits, search)
        if cut:
            return _not_simulated(offers, limits, search)
        best([p for p in single_request if limits.broken(p)] or offers.points, limits)  # raises with the closest point
        raise ConfigError(f"nothing keeps the limits on {offers.names[0]} under load", "a request alone does",
                          "allow more, or choose faster devices")  # fmt: skip
    return replace(offers, points=(*offers.points, *points, *other_rates))


@dataclass(slots=True)
class _CapacitySearch:
    """Search state of one configuration. bound: upper bound of requests/s per device; point: the best so far"""

    bound: float
    devices: int
    replica: Replica
    point: OperatingPoint | None = None

    @property
    def best_rate(self) -> float:
        return 0.0 if self.point is None else self.point.rate / self.devices


def _seek(
    searches: Sequence[_CapacitySearch], limits: Limits, search: SearchBudget, closed: bool
) -> list[_CapacitySearch]:
    """Run the searches, best bound first, and return those that are still cut when time is up.

    Each gets an equal share of the time; what finished searches leave goes to those that were cut.
    """
    left = list(searches)
    while left:
        cut: list[_CapacitySearch] = []
        for i, candidate in enumerate(left):
            most = max(other.best_rate for other in searches)
            if candidate.bound <= most:
                continue
            search.begin(candidate.replica.name)
            above = 0.0 if candidate.point is not None else most * candidate.devices
            try:
                with search.part(1 / (len(left) - i)):
                    point = (
                        candidate.replica.best_closed_within(limits)
                        if closed
                        else candidate.replica.best_within(limits, above)
                    )
            except SearchTimeoutError:
                cut.append(candidate)
                continue
            candidate.point = point
            if point is not None and point.sampled is not None and point.sampled.cut:
                cut.append(candidate)
        left = cut
        if not search.has_time:
            break
    return left


def _not_simulated(offers: Offers, limits: Limits, search: SearchBudget) -> Offers:
    """Return closed-form offers if nothing was simulated. raises ConfigError for limits on the p95"""
    if limits.statistic == "p95":
        raise ConfigError(f"after {search.limit_s:g} s of search nothing was found on {offers.names[0]} by simulation, "
                          "and a closed form knows no p95", "more time", "--search-s 600, or --of mean")  # fmt: skip
    return offers


def simulate_at(
    offers: Offers, point: OperatingPoint, rate: float, settings: HardwareSettings, replicas: Replicas, instances: int,
    traffic: Traffic, work: RequestWork,
) -> OperatingPoint | None:  # fmt: skip
    """Simulate a configuration at a lower rate per instance; None if it was not simulated, falls behind, or the search
    time is up.

    instances: number of instances behind the router, if there is one
    """
    if point.sampled is None:
        return None
    replica, factor = replicas.get(offers, point, Lengths.from_work(work)), settings.factor
    replicas.search.begin(f"the load on {replica.name}")
    try:
        at = replica.at(rate * factor) if traffic.is_blind else replica.behind(traffic, instances, rate * factor)
    except SearchTimeoutError:
        replicas.search.cut(f"what users wait for at this load on {replica.name}")
        return None
    return None if at is None else replace(scale_times(at, factor), system=point.system)
