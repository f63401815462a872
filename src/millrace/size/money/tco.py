"""Total cost of ownership: a year's costs of buying, renting, a mix, or paying by the token, with break-even points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.machine.devices import Device, find_device
from millrace.size.money.prices import Prices, Rent, middle
from millrace.size.performance.operating_point import SYSTEM

HOURS_YEAR, DAYS_YEAR, DAY_HOURS = 8760.0, 365.0, 24
_DGX = "H100 SXM"  # the power of a whole system is known


@dataclass(frozen=True, slots=True)
class FleetNeed:
    """The fleet to price. tp: devices of an instance, below 1 for a MIG slice; system: devices of a system

    systems: to buy; hourly: (24,) instances needed in each hour
    """

    device: Device
    tp: float
    system: int
    systems: int
    fractional: float
    hourly: tuple[int, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the (24,) devices needed in each hour."""
        return tuple(math.ceil(n * self.tp - 1e-9) for n in self.hourly)


@dataclass(frozen=True, slots=True)
class Bought:
    """Yearly costs of a bought system by kind; year: of all systems; by_figures: of the unrounded number of systems"""

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
    """Costs of renting. rent: the median offer; low, high: the cheapest and the dearest

    peak_hour: of the busiest hour; always: a year at the peak; scaled: a year with the devices that each hour needs
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
    """A mix: `systems` are bought, the rest is rented by the hour."""

    systems: int
    bought: float
    rented: float

    @property
    def year(self) -> float:
        return self.bought + self.rented


@dataclass(frozen=True, slots=True)
class Money:
    """A year's costs.

    break_even_hours: hours a day from which buying is cheaper than renting; None: no price, or never
    a_million_tokens, a_thousand_requests: by the cheapest option; by_token: at a provider's token prices
    break_even_requests: requests a day from which buying is cheaper than paying by the token
    band: costs of the cheapest option if capacities are off by `error` either way; None: no price is known
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


def _cheapest(own: Bought | None, rent: Rented | None, mix: Hybrid | None) -> tuple[str, float | None]:
    """Return name and yearly costs of the cheapest option; ("", None) if none has a price. Ties: no mix."""
    ways = [("bought", own.year)] if own else []
    ways += [("rented", rent.scaled)] if rent else []
    ways += [("both", mix.year)] if mix else []
    return min(ways, key=lambda way: way[1], default=("", None))


def engines(peaks: Sequence[float], rate: float, utilisation: float) -> tuple[int, ...]:
    """Return the instances that each hour needs, at least one. rate: requests/s of an instance"""
    return tuple(max(1, math.ceil(peak / (rate * utilisation) - 1e-9)) for peak in peaks)


def purchase_costs(fleet: FleetNeed, prices: Prices) -> Bought | None:
    """Return the costs of buying; None if the price of such a system is unknown."""
    price = prices.systems.get(fleet.device.name)
    if price is None or fleet.system != SYSTEM:  # prices are of systems of 8
        return None
    power = watts(fleet.device, prices) / 1e3 * HOURS_YEAR * prices.kwh * prices.pue
    bought = Bought(price / prices.years, prices.hosting, prices.licence * SYSTEM, power, 0.0, 0.0)
    return Bought(
        bought.purchase,
        bought.hosting,
        bought.licence,
        bought.power,
        bought.system * fleet.systems,
        bought.system * fleet.fractional,
    )


def watts(device: Device, prices: Prices) -> float:
    """Return the power of a whole system in watts, estimated from its devices if unknown."""
    if device.name in prices.watts:
        return prices.watts[device.name]
    share = prices.watts[_DGX] / (SYSTEM * find_device(_DGX).watts) if _DGX in prices.watts else 1.0
    return SYSTEM * device.watts * share


def rental_costs(fleet: FleetNeed, rents: Sequence[Rent]) -> Rented | None:
    """Return the costs of renting; None if there is no offer. rents: cheapest first"""
    if not rents:
        return None
    rent, devices = middle(rents), fleet.devices
    peak = max(devices) * rent.hour
    return Rented(
        rent, rents[0].hour, rents[-1].hour, len(rents), peak, peak * HOURS_YEAR, sum(devices) * rent.hour * DAYS_YEAR
    )


def hybrid(fleet: FleetNeed, own: Bought | None, rent: Rented | None) -> Hybrid | None:
    """Return the cheapest mix of bought systems and devices rented in the hours that need them.

    If nothing remains to rent, all systems are bought, spares included.
    """
    if own is None or rent is None:
        return None
    systems = -(-max(fleet.devices) // SYSTEM)

    def mix(n: int) -> Hybrid:
        beyond = sum(max(0, devices - n * SYSTEM) for devices in fleet.devices)
        if not beyond:
            return Hybrid(fleet.systems, own.year, 0.0)
        return Hybrid(n, n * own.system, beyond * rent.rent.hour * DAYS_YEAR)

    # costs are linear between these numbers; spares add a step at the last one
    needed = {-(-devices // SYSTEM) for devices in fleet.devices} | {devices // SYSTEM for devices in fleet.devices}
    return min(map(mix, sorted(needed | {0, systems - 1, systems})), key=lambda option: (option.year, option.systems))


def break_even_hours(own: Bought | None, rent: Rented | None) -> float | None:
    """Return the hours a day from which buying is cheaper than renting; None: never."""
    if own is None or rent is None:
        return None
    hours = own.system / (SYSTEM * rent.rent.hour * DAYS_YEAR)
    return hours if hours <= DAY_HOURS else None


def money(
    fleet: FleetNeed, prices: Prices, tier: str | None, average: float, rate: float, lengths: tuple[float, float]
) -> Money:
    """Return all costs of a fleet. tier: of offers, None: any; average: requests/s over a year; rate: of an instance

    lengths: input and output tokens of a request, all calls together
    """
    own, rent = purchase_costs(fleet, prices), rental_costs(fleet, prices.rents(fleet.device, tier))
    mix = hybrid(fleet, own, rent)
    requests = average * HOURS_YEAR * 3600
    a_request = sum(n * price / 1e6 for n, price in zip(lengths, prices.tokens, strict=True))
    _, cheapest = _cheapest(own, rent, mix)
    notes = []
    if own is None and fleet.system != SYSTEM:
        notes.append(f"prices for buying are of systems of {SYSTEM}, and these have {fleet.system}")
    elif own is None:
        notes.append(f"no price of a system of {SYSTEM} x {fleet.device.name} is known: give yours in a file, "
                     f'--prices FILE, with: date = ..., buy.systems = {{ "{fleet.device.name}" = ... }}')  # fmt: skip
    if rent is None:
        notes.append(prices.missing_offer_text(fleet.device, tier))
    if own is not None and fleet.device.name not in prices.watts:
        notes.append("the power of such a system is estimated from its devices'")
    return Money(
        prices.currency, own, rent, mix, a_request * requests if a_request else None, break_even_hours(own, rent),
        own.year / DAYS_YEAR / a_request if own and a_request else None,
        None if cheapest is None else cheapest / (requests * sum(lengths)) * 1e6,
        None if cheapest is None else cheapest / requests * 1e3,
        average / (sum(fleet.hourly) / DAY_HOURS * rate), fleet.hourly, tuple(notes),
    )  # fmt: skip
