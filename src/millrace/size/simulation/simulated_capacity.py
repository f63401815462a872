"""Capacities by simulation of what could serve most, within limits and the time of a search."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.size.load.arrivals import Gaps, Traffic
from millrace.size.load.token_lengths import Lengths, Work
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.operating_point import Limits, Point, best
from millrace.size.performance.operating_points import Offers, scaled
from millrace.size.question.settings import HardwareSettings
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.search_budget import Search, SearchTimeoutError
from millrace.size.simulation.serving_model import Serving, computed


class Replicas:
    """Instances under simulation, each made once: what was simulated of it is kept for other limits."""

    def __init__(self, search: Search | None = None, gaps: Gaps | None = None) -> None:
        self.search, self._gaps = search or Search(), gaps or Gaps()
        self._known: dict[tuple[str, str, int, int, Lengths], Replica] = {}

    def of(self, found: Offers, point: Point, lengths: Lengths) -> Replica:
        key = point.device, point.precision, point.tp, point.pp, lengths
        if key not in self._known:
            self._known[key] = Replica(_serving(found, point, lengths), self.search, self._gaps)
        return self._known[key]


def _serving(found: Offers, point: Point, lengths: Lengths) -> Serving:
    if found.profiled is not None:
        return found.profiled.serving(lengths)
    instance = found.instance(point)
    assert instance is not None, "only what is computed is simulated"
    stack = found.own.of(point.device, point.precision) if found.own else None
    return computed(instance, profile(instance.device, point.precision), lengths, stack)


def simulated(
    found: Offers, asked: HardwareSettings, work: Work, limits: Limits, replicas: Replicas, closed: bool = False
) -> Offers:  # fmt: skip
    """And capacities within the limits of what could serve most a device, with arrivals by chance at each instance.

    closed: with as many always in flight, instead

    By branch and bound: no schedule of what is left out could serve more. found: of one device; it stays as it is where
    it was measured, and where the search's time is up before anything is found.
    raises ConfigError where nothing keeps the limits
    """
    if found.basis is None or asked.measured is not None:
        return found
    tried, lengths = limits.scaled(1 / asked.factor), Lengths.of(work)
    alike = {(p.precision, p.tp, p.pp): replicas.of(found, p, lengths) for p in found.points}
    bounded = [
        _CapacitySearch(replica.bound(tried) / (tp * pp), tp * pp, replica) for (_, tp, pp), replica in alike.items()
    ]
    search, of = replicas.search, (found.names[0], lengths, limits)
    search.forget(of)
    cut = _seek(sorted(bounded, key=lambda one: -one.bound), tried, search, closed)
    for one in cut:
        search.cut(one.replica.name, of)
    points: list[Point] = []
    beside: list[Point] = []  # other rates of the same, for drawings
    for one in bounded:
        if one.point is not None:
            points.append(replace(scaled(one.point, asked.factor), system=found.points[0].system))
            beside += [replace(scaled(p, asked.factor), system=found.points[0].system) for p in one.replica.tried]
    if not points:
        try:
            alone = [replace(scaled(replica.alone, asked.factor), system=1) for replica in alike.values()]
        except SearchTimeoutError:
            search.cut(f"a request alone on {found.names[0]}", of)
            return _not_simulated(found, limits, search)
        if cut:
            return _not_simulated(found, limits, search)
        best([p for p in alone if limits.broken(p)] or found.points, limits)  # which says what comes closest
        raise ConfigError(f"nothing keeps the limits on {found.names[0]} under load", "a request alone does",
                          "allow more, or choose faster devices")  # fmt: skip
    return replace(found, points=(*found.points, *points, *beside))


@dataclass(slots=True)
class _CapacitySearch:
    """bound: requests/s of a device that it does not exceed; point: its best so far"""

    bound: float
    devices: int
    replica: Replica
    point: Point | None = None

    @property
    def most(self) -> float:
        return 0.0 if self.point is None else self.point.rate / self.devices


def _seek(of: Sequence[_CapacitySearch], limits: Limits, search: Search, closed: bool) -> list[_CapacitySearch]:
    """Each has the same share of the time; what some of them leave goes to those that were cut. of: best bound first

    What is still cut when time is up is returned.
    """
    left = list(of)
    while left:
        cut: list[_CapacitySearch] = []
        for i, one in enumerate(left):
            most = max(other.most for other in of)
            if one.bound <= most:
                continue
            search.begins(one.replica.name)
            above = 0.0 if one.point is not None else most * one.devices
            try:
                with search.part(1 / (len(left) - i)):
                    found = one.replica.most_closed(limits) if closed else one.replica.most(limits, above)
            except SearchTimeoutError:
                cut.append(one)
                continue
            one.point = found
            if found is not None and found.sampled is not None and found.sampled.cut:
                cut.append(one)
        left = cut
        if not search.has_time:
            break
    return left


def _not_simulated(found: Offers, limits: Limits, search: Search) -> Offers:
    """raises ConfigError where the closed form does not do"""
    if limits.of == "p95":
        raise ConfigError(f"after {search.limit_s:g} s of search nothing was found on {found.names[0]} by simulation, "
                          "and a closed form knows no p95", "more time", "--search-s 600, or --of mean")  # fmt: skip
    return found


def simulated_at(
    found: Offers, point: Point, rate: float, asked: HardwareSettings, replicas: Replicas, instances: int,
    traffic: Traffic, work: Work,
) -> Point | None:  # fmt: skip
    """That configuration at a lower rate of each instance; None where it was not simulated, or falls behind, or the
    search's time is up.

    instances: behind a router, where the load does not fall on them blindly; traffic: what comes to them
    """
    if point.sampled is None:
        return None
    replica, factor = replicas.of(found, point, Lengths.of(work)), asked.factor
    replicas.search.begins(f"the load on {replica.name}")
    try:
        at = replica.at(rate * factor) if traffic.is_blind else replica.behind(traffic, instances, rate * factor)
    except SearchTimeoutError:
        replicas.search.cut(f"what users wait for at this load on {replica.name}")
        return None
    return None if at is None else replace(scaled(at, factor), system=point.system)
