"""What systems cost a year: bought, rented by the hour, both, or paid by the token; and where one becomes cheaper."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.machine.devices import Device, find_device
from millrace.size.money.prices import Prices, Rent, middle
from millrace.size.performance.operating_point import SYSTEM

HOURS_YEAR, DAYS_YEAR, DAY_HOURS = 8760.0, 365.0, 24
_DGX = "H100 SXM"  # of which the power of a whole system is known


@dataclass(frozen=True, slots=True)
class FleetNeed:
    """What is needed. tp: devices of an instance, less than 1 where it has a slice; system: devices of one

    systems: to buy; hourly: (24,) instances in each hour
    """

    device: Device
    tp: float
    system: int
    systems: int
    fractional: float
    hourly: tuple[int, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """(24,) in each hour."""
        return tuple(math.ceil(n * self.tp - 1e-9) for n in self.hourly)


@dataclass(frozen=True, slots=True)
class Bought:
    """Of one system a year; year: of all, and by_figures of as many as the figures say, not rounded"""

    purchase: float
    hosting: float
    licence: float
    power: float
    year: float
    by_figures: float

    @property
    def system(self) -> float:
        return self.purchase + self.hosting + self.licence + self.power


@dataclass(frozen=True, slots=True)
class Rented:
    """rent: the one in the middle, between low and high. peak_hour: of the busiest hour; always: all of it all year;

    scaled: as many as each hour needs
    """

    rent: Rent
    low: float
    high: float
    offers: int
    peak_hour: float
    always: float
    scaled: float


@dataclass(frozen=True, slots=True)
class Hybrid:
    """systems: bought, what is beyond them rented by the hour"""

    systems: int
    bought: float
    rented: float

    @property
    def year(self) -> float:
        return self.bought + self.rented


@dataclass(frozen=True, slots=True)
class Money:
    """A year's costs. break_even_hours: of a day that a system must be needed to be bought; None: no price, or never

    a_million_tokens, a_thousand_requests: of the cheapest way that is known; by_token: what a provider would take
    break_even_requests: a day, from which buying costs less than that
    band: the cheapest way's year where systems serve more or less than told, by `error` of that; None: no way is known
    """

    currency: str
    bought: Bought | None
    rented: Rented | None
    hybrid: Hybrid | None
    by_token: float | None
    break_even_hours: float | None
    break_even_requests: float | None
    a_million_tokens: float | None
    a_thousand_requests: float | None
    utilisation: float
    hourly: tuple[int, ...]
    notes: tuple[str, ...]
    band: tuple[float, float] | None = None
    error: float = 0.0

    @property
    def cheapest(self) -> float | None:
        return _cheapest(self.bought, self.rented, self.hybrid)[1]

    @property
    def cheapest_way(self) -> str:
        return _cheapest(self.bought, self.rented, self.hybrid)[0]


def _cheapest(own: Bought | None, rent: Rented | None, both: Hybrid | None) -> tuple[str, float | None]:
    """Of the ways that are known, the name and a year; what is no mix goes before one that costs as much."""
    ways = [("bought", own.year)] if own else []
    ways += [("rented", rent.scaled)] if rent else []
    ways += [("both", both.year)] if both else []
    return min(ways, key=lambda way: way[1], default=("", None))


def engines(peaks: Sequence[float], rate: float, utilisation: float) -> tuple[int, ...]:
    """Instances that each hour needs; one at least. rate: requests/s of an instance"""
    return tuple(max(1, math.ceil(peak / (rate * utilisation) - 1e-9)) for peak in peaks)


def bought(fleet: FleetNeed, prices: Prices) -> Bought | None:
    """None where the price of such a system is not known."""
    price = prices.systems.get(fleet.device.name)
    if price is None or fleet.system != SYSTEM:  # prices are of systems of 8
        return None
    power = watts(fleet.device, prices) / 1e3 * HOURS_YEAR * prices.kwh * prices.pue
    one = Bought(price / prices.years, prices.hosting, prices.licence * SYSTEM, power, 0.0, 0.0)
    return Bought(
        one.purchase, one.hosting, one.licence, one.power, one.system * fleet.systems, one.system * fleet.fractional
    )


def watts(device: Device, prices: Prices) -> float:
    """Of a whole system."""
    if device.name in prices.watts:
        return prices.watts[device.name]
    share = prices.watts[_DGX] / (SYSTEM * find_device(_DGX).watts) if _DGX in prices.watts else 1.0
    return SYSTEM * device.watts * share


def rented(fleet: FleetNeed, rents: Sequence[Rent]) -> Rented | None:
    """rents: cheapest first; None where there is no offer"""
    if not rents:
        return None
    rent, devices = middle(rents), fleet.devices
    peak = max(devices) * rent.hour
    return Rented(
        rent, rents[0].hour, rents[-1].hour, len(rents), peak, peak * HOURS_YEAR, sum(devices) * rent.hour * DAYS_YEAR
    )


def hybrid(fleet: FleetNeed, own: Bought | None, rent: Rented | None) -> Hybrid | None:
    """The cheapest number of systems to buy, when the rest is rented in the hours that need it.

    Where nothing is left to rent, all are bought, and those to spare among them.
    """
    if own is None or rent is None:
        return None
    systems = -(-max(fleet.devices) // SYSTEM)

    def of(n: int) -> Hybrid:
        beyond = sum(max(0, devices - n * SYSTEM) for devices in fleet.devices)
        if not beyond:
            return Hybrid(fleet.systems, own.year, 0.0)
        return Hybrid(n, n * own.system, beyond * rent.rent.hour * DAYS_YEAR)

    # costs are straight between these; and with those to spare there is a step at the last
    needed = {-(-devices // SYSTEM) for devices in fleet.devices} | {devices // SYSTEM for devices in fleet.devices}
    return min(map(of, sorted(needed | {0, systems - 1, systems})), key=lambda found: (found.year, found.systems))


def break_even_hours(own: Bought | None, rent: Rented | None) -> float | None:
    """Hours of a day in which a system must be needed so that buying costs less than renting; None: never."""
    if own is None or rent is None:
        return None
    hours = own.system / (SYSTEM * rent.rent.hour * DAYS_YEAR)
    return hours if hours <= DAY_HOURS else None


def money(
    fleet: FleetNeed, prices: Prices, tier: str | None, average: float, rate: float, lengths: tuple[float, float]
) -> Money:
    """tier: of offers, None: any; average: requests/s of a whole year; rate: of an instance

    lengths: tokens of a request, all calls together
    """
    own, rent = bought(fleet, prices), rented(fleet, prices.rents(fleet.device, tier))
    both = hybrid(fleet, own, rent)
    requests = average * HOURS_YEAR * 3600
    a_request = sum(n * price / 1e6 for n, price in zip(lengths, prices.tokens, strict=True))
    _, cheapest = _cheapest(own, rent, both)
    notes = []
    if own is None and fleet.system != SYSTEM:
        notes.append(f"prices for buying are of systems of {SYSTEM}, and these have {fleet.system}")
    elif own is None:
        notes.append(f"no price of a system of {SYSTEM} x {fleet.device.name} is known: give yours in a file, "
                     f'--prices FILE, with: date = ..., buy.systems = {{ "{fleet.device.name}" = ... }}')  # fmt: skip
    if rent is None:
        notes.append(prices.lacks(fleet.device, tier))
    if own is not None and fleet.device.name not in prices.watts:
        notes.append("the power of such a system is estimated from its devices'")
    return Money(
        prices.currency, own, rent, both, a_request * requests if a_request else None, break_even_hours(own, rent),
        own.year / DAYS_YEAR / a_request if own and a_request else None,
        None if cheapest is None else cheapest / (requests * sum(lengths)) * 1e6,
        None if cheapest is None else cheapest / requests * 1e3,
        average / (sum(fleet.hourly) / DAY_HOURS * rate), fleet.hourly, tuple(notes),
    )  # fmt: skip
