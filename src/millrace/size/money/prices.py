"""Dated prices: those that come along, and a user's own over them. TOML; `prices.toml` beside this file is the form."""

import datetime
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, nearest, sanitize
from millrace.machine.devices import Device, find_device
from millrace.settings import read_given

_OURS = Path(__file__).with_name("prices.toml")
_MOST_BYTES, _MOST_OFFERS, _MOST = 1 << 20, 10_000, 1e12
TIERS = ("hyperscaler", "neocloud", "marketplace")
_LEAST_YEARS, _MOST_PUE = 0.01, 100.0
OLD = datetime.timedelta(days=365)
_BUY = ("years", "hosting", "licence", "kwh", "pue")
_KEYS = ("date", "currency", "offers", "buy", "tokens")


@dataclass(frozen=True, slots=True)
class Rent:
    """hour: for one device; page: where that stood"""

    device: str
    hour: float
    who: str
    tier: str
    date: datetime.date
    page: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """In one currency. systems, watts: of one system of 8, by device; tokens: of a million in and out, 0 where unknown

    hosting: a system and year; licence: a device and year; dates: of what a user gave, and of ours where it is used
    """

    currency: str
    date: datetime.date
    offers: tuple[Rent, ...]
    years: float
    hosting: float
    licence: float
    kwh: float
    pue: float
    systems: Mapping[str, float]
    watts: Mapping[str, float]
    tokens: tuple[float, float]

    def rents(self, device: Device, tier: str | None) -> list[Rent]:
        """Cheapest first."""
        found = [rent for rent in self.offers if rent.device == device.name and tier in (None, rent.tier)]
        return sorted(found, key=lambda rent: rent.hour)

    def lacks(self, device: Device, tier: str | None) -> str:
        """What to write where nobody is known to rent it out."""
        others = sorted({rent.tier for rent in self.rents(device, None)})
        if tier is not None and others:
            return (f"no offer of a {tier} for {device.name} is known (--tier), but of a {' and a '.join(others)}: "
                    f"leave --tier out, or {_yours(device)}")  # fmt: skip
        return f"no offer for {device.name} is known: {_yours(device)}"

    def old(self, used: Sequence[Rent], today: datetime.date) -> list[str]:
        """What is older than a year, in words."""
        told = [f"the price of {rent.who} is of {rent.date}, more than a year ago" for rent in used
                if today - rent.date > OLD]  # fmt: skip
        if today - self.date > OLD:
            told.append(f"prices for buying are of {self.date}, more than a year ago")
        return told


def _yours(device: Device) -> str:
    return (
        f'give yours in a file, --prices FILE, with: date = ..., offers = [{{ device = "{device.name}", hour = ... }}]'
    )


def middle(rents: Sequence[Rent]) -> Rent:
    """The one in the middle of the offers; of two the cheaper one."""
    return rents[statistics.median_low(range(len(rents)))]


def read_prices(path: Path | None) -> Prices:
    """Ours, with a user's over them. raises ConfigError"""
    ours = _parsed(_OURS)
    if path is None:
        return _made(ours, str(_OURS.name))
    own = _parsed(path)
    where = str(path)
    for name in own:
        _known(name, _KEYS, where)
    if "date" not in own:
        raise ConfigError(f"{path} has no date", "the day of these prices", "write date = 2026-11-01")
    _date(own["date"], where)
    if own.get("currency", ours["currency"]) != ours["currency"]:  # ours cannot stand beside those of another
        ours = {**ours, "offers": [], "buy": {}}
    replaced = {_device(offer, where) for offer in _list(own, where)}
    kept = [offer for offer in ours["offers"] if offer["device"] not in replaced]
    buy, own_buy = ours["buy"], _table(own, "buy", where)
    offers = [{"date": own["date"], **offer} for offer in _list(own, where)]
    parts = {part: {**buy.get(part, {}), **_of_devices(own_buy, part, where)} for part in ("systems", "watts")}
    merged = {
        **ours, **own, "date": own["date"] if own_buy else ours["date"], "offers": offers,
        "buy": {**buy, **own_buy, **parts}, "tokens": {**ours["tokens"], **_table(own, "tokens", where)},
    }  # fmt: skip
    return _made(merged, where, kept)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        data = read_given(path, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes", "prices", "check the file")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "prices as TOML", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {sanitize(str(error))}", "prices as TOML", "correct it") from None


def _made(found: Mapping[str, Any], where: str, kept: Sequence[Mapping[str, Any]] = ()) -> Prices:
    """kept: offers of ours, before those that are found"""
    buy = found["buy"]
    for name in buy:
        _known(name, (*_BUY, "systems", "watts"), f"{where}, buy")
    for name in found["tokens"]:
        _known(name, ("input", "output"), f"{where}, tokens")
    currency = found["currency"]
    if not isinstance(currency, str) or not currency.isalpha() or len(currency) > 8:
        raise ConfigError(f"{where}: currency is {currency!r:.40}", "such as USD", "correct it")
    usual = {} if buy.get("systems") else {**dict.fromkeys(_BUY, 0.0), "years": 1.0, "pue": 1.0}  # nothing is bought
    rates = {name: number(buy.get(name, usual.get(name)), f"{where}, buy.{name}") for name in _BUY}
    if not rates["years"] >= _LEAST_YEARS or not 1 <= rates["pue"] <= _MOST_PUE:
        raise ConfigError(f"{where}: years {rates['years']:g}, pue {rates['pue']:g}",
                          f"years from {_LEAST_YEARS:g} to {_MOST:g}, a PUE from 1 to {_MOST_PUE:g}",
                          "correct them")  # fmt: skip
    known = ((_OURS.name, kept), (where, found["offers"]))
    return Prices(
        currency=currency, date=_date(found["date"], where), **rates,
        offers=tuple(_rent(one, f"{file}, offer {i}") for file, some in known for i, one in enumerate(some, 1)),
        systems=_by_device(buy.get("systems", {}), f"{where}, buy.systems"),
        watts=_by_device(buy.get("watts", {}), f"{where}, buy.watts"),
        tokens=(number(found["tokens"]["input"], f"{where}, tokens.input"),
                number(found["tokens"]["output"], f"{where}, tokens.output")),
    )  # fmt: skip


def _rent(offer: Mapping[str, Any], where: str) -> Rent:
    for name in offer:
        _known(name, ("device", "hour", "who", "tier", "date", "page"), where)
    tier = offer.get("tier", "neocloud")
    if tier not in TIERS:
        raise ConfigError(f"{where}: tier is {tier!r:.40}", " or ".join(TIERS), "correct it")
    hour = number(offer.get("hour"), f"{where}: hour")
    if not hour:
        raise ConfigError(f"{where}: hour is 0", f"a price above 0, at most {_MOST:g}", "correct it")
    who, page = (sanitize(str(offer.get(name, default))) for name, default in (("who", "yours"), ("page", "")))
    return Rent(_device(offer, where), hour, who, tier, _date(offer["date"], where), page)


def _list(found: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    offers = found.get("offers", [])
    if not isinstance(offers, list) or len(offers) > _MOST_OFFERS or not all(isinstance(o, dict) for o in offers):
        raise ConfigError(f"{where}: offers are no list of tables", '{ device = "H100", hour = 2.69 }', "correct them")
    return offers


def _table(found: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = found.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {name} is {value!r:.40}", f"a table, [{name}]", "correct it")
    return value


def _of_devices(found: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """By the catalogue's names. raises ConfigError, also for a device that has two, of which one would be ignored"""
    named: dict[str, Any] = {}
    for said, value in _table(found, name, where).items():
        if (device := find_device(said).name) in named:
            raise ConfigError(f"{where}: {name} has {device} twice, {said:.40} is one", "once", "leave one out")
        named[device] = value
    return named


def _device(offer: Mapping[str, Any], where: str) -> str:
    if "device" not in offer:
        raise ConfigError(f"{where} has no device", 'device = "H100"', "name it")
    return find_device(str(offer["device"])).name


def _by_device(values: Mapping[str, Any], where: str) -> Mapping[str, float]:
    return {find_device(name).name: number(value, f"{where}: {name}") for name, value in values.items()}


def number(value: Any, where: str, mend: str = "correct it") -> float:
    """Of a file. raises ConfigError where it is none, negative, or endless"""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ConfigError(f"{where} is {value!r:.40}", f"a number from 0 to {_MOST:g}", mend)
    return float(value)


def _date(value: Any, where: str) -> datetime.date:
    if type(value) is not datetime.date:
        raise ConfigError(f"{where}: date is {value!s:.40}", "a day, 2026-11-01", "correct it")
    return value


def _known(name: str, known: Sequence[str], where: str) -> None:
    if name not in known:
        raise ConfigError(f"{where} has {name!r:.60}", nearest(name, known), "correct it")
