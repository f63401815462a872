"""Dated prices: the bundled `prices.toml`, and a user's TOML file of the same form that overrides it."""

import datetime
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, nearest, sanitize
from millrace.machine.devices import Device, find_device
from millrace.settings import read_bounded

_OURS = Path(__file__).with_name("prices.toml")
_MAX_BYTES, _MAX_OFFERS, _MAX_PRICE = 1 << 20, 10_000, 1e12
TIERS = ("hyperscaler", "neocloud", "marketplace")
_MIN_YEARS, _MAX_PUE = 0.01, 100.0
OLD = datetime.timedelta(days=365)
_BUY = ("years", "hosting", "licence", "kwh", "pue")
_KEYS = ("date", "currency", "offers", "buy", "tokens")


@dataclass(frozen=True, slots=True)
class Rent:
    """A rental offer. hour: price of one device an hour; page: source"""

    device: str
    hour: float
    who: str
    tier: str
    date: datetime.date
    page: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices in one currency. systems, watts: price and power of a system of 8 devices, by device name

    tokens: price of a million input and output tokens, 0 if unknown; hosting: per system and year
    licence: per device and year; date: of the user's prices, or of the bundled ones if these are used for buying
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
        """Return the offers for a device, cheapest first."""
        matching = [rent for rent in self.offers if rent.device == device.name and tier in (None, rent.tier)]
        return sorted(matching, key=lambda rent: rent.hour)

    def missing_offer_text(self, device: Device, tier: str | None) -> str:
        """Return the note for a device without offers."""
        other_tiers = sorted({rent.tier for rent in self.rents(device, None)})
        if tier is not None and other_tiers:
            return (
                f"no offer of a {tier} for {device.name} is known (--tier), but of a {' and a '.join(other_tiers)}: "
                f"leave --tier out, or {_yours(device)}"
            )
        return f"no offer for {device.name} is known: {_yours(device)}"

    def stale_notes(self, used: Sequence[Rent], today: datetime.date) -> list[str]:
        """Return notes on prices that are older than a year."""
        notes = [f"the price of {rent.who} is of {rent.date}, more than a year ago" for rent in used
                if today - rent.date > OLD]  # fmt: skip
        if today - self.date > OLD:
            notes.append(f"prices for buying are of {self.date}, more than a year ago")
        return notes


def _yours(device: Device) -> str:
    return (
        f'give yours in a file, --prices FILE, with: date = ..., offers = [{{ device = "{device.name}", hour = ... }}]'
    )


def middle(rents: Sequence[Rent]) -> Rent:
    """Return the median offer; of two middle ones the cheaper."""
    return rents[statistics.median_low(range(len(rents)))]


def read_prices(path: Path | None) -> Prices:
    """Read the bundled prices, overridden by those of the file. raises ConfigError"""
    ours = _read_toml(_OURS)
    if path is None:
        return _parse_prices(ours, str(_OURS.name))
    own = _read_toml(path)
    location = str(path)
    for name in own:
        _check_key(name, _KEYS, location)
    if "date" not in own:
        raise ConfigError(f"{path} has no date", "the day of these prices", "write date = 2026-11-01")
    _date(own["date"], location)
    if own.get("currency", ours["currency"]) != ours["currency"]:  # ours cannot stand beside those of another
        ours = {**ours, "offers": [], "buy": {}}
    replaced = {_device(offer, location) for offer in _list(own, location)}
    default_offers = [offer for offer in ours["offers"] if offer["device"] not in replaced]
    buy, own_buy = ours["buy"], _table(own, "buy", location)
    offers = [{"date": own["date"], **offer} for offer in _list(own, location)]
    parts = {part: {**buy.get(part, {}), **_of_devices(own_buy, part, location)} for part in ("systems", "watts")}
    merged = {
        **ours, **own, "date": own["date"] if own_buy else ours["date"], "offers": offers,
        "buy": {**buy, **own_buy, **parts}, "tokens": {**ours["tokens"], **_table(own, "tokens", location)},
    }  # fmt: skip
    return _parse_prices(merged, location, default_offers)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = read_bounded(path, _MAX_BYTES)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes", "prices", "check the file")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "prices as TOML", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {sanitize(str(error))}", "prices as TOML", "correct it") from None


def _parse_prices(
    document: Mapping[str, Any], location: str, default_offers: Sequence[Mapping[str, Any]] = ()
) -> Prices:
    """Check a document of prices. default_offers: bundled offers that the file does not replace. raises ConfigError"""
    buy = document["buy"]
    for name in buy:
        _check_key(name, (*_BUY, "systems", "watts"), f"{location}, buy")
    for name in document["tokens"]:
        _check_key(name, ("input", "output"), f"{location}, tokens")
    currency = document["currency"]
    if not isinstance(currency, str) or not currency.isalpha() or len(currency) > 8:
        raise ConfigError(f"{location}: currency is {currency!r:.40}", "such as USD", "correct it")
    usual = {} if buy.get("systems") else {**dict.fromkeys(_BUY, 0.0), "years": 1.0, "pue": 1.0}  # nothing is bought
    rates = {name: number(buy.get(name, usual.get(name)), f"{location}, buy.{name}") for name in _BUY}
    if not rates["years"] >= _MIN_YEARS or not 1 <= rates["pue"] <= _MAX_PUE:
        raise ConfigError(f"{location}: years {rates['years']:g}, pue {rates['pue']:g}",
                          f"years from {_MIN_YEARS:g} to {_MAX_PRICE:g}, a PUE from 1 to {_MAX_PUE:g}",
                          "correct them")  # fmt: skip
    sources = ((_OURS.name, default_offers), (location, document["offers"]))
    return Prices(
        currency=currency, date=_date(document["date"], location), **rates,
        offers=tuple(_rent(one, f"{file}, offer {i}") for file, some in sources for i, one in enumerate(some, 1)),
        systems=_by_device(buy.get("systems", {}), f"{location}, buy.systems"),
        watts=_by_device(buy.get("watts", {}), f"{location}, buy.watts"),
        tokens=(number(document["tokens"]["input"], f"{location}, tokens.input"),
                number(document["tokens"]["output"], f"{location}, tokens.output")),
    )  # fmt: skip


def _rent(offer: Mapping[str, Any], location: str) -> Rent:
    for name in offer:
        _check_key(name, ("device", "hour", "who", "tier", "date", "page"), location)
    tier = offer.get("tier", "neocloud")
    if tier not in TIERS:
        raise ConfigError(f"{location}: tier is {tier!r:.40}", " or ".join(TIERS), "correct it")
    hour = number(offer.get("hour"), f"{location}: hour")
    if not hour:
        raise ConfigError(f"{location}: hour is 0", f"a price above 0, at most {_MAX_PRICE:g}", "correct it")
    who, page = (sanitize(str(offer.get(name, default))) for name, default in (("who", "yours"), ("page", "")))
    return Rent(_device(offer, location), hour, who, tier, _date(offer["date"], location), page)


def _list(document: Mapping[str, Any], location: str) -> list[Mapping[str, Any]]:
    offers = document.get("offers", [])
    if not isinstance(offers, list) or len(offers) > _MAX_OFFERS or not all(isinstance(o, dict) for o in offers):
        raise ConfigError(
            f"{location}: offers are no list of tables", '{ device = "H100", hour = 2.69 }', "correct them"
        )
    return offers


def _table(document: Mapping[str, Any], name: str, location: str) -> Mapping[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{location}: {name} is {value!r:.40}", f"a table, [{name}]", "correct it")
    return value


def _of_devices(document: Mapping[str, Any], name: str, location: str) -> Mapping[str, Any]:
    """Return a table by catalogue name. raises ConfigError, also if a device is listed under two names"""
    by_name: dict[str, Any] = {}
    for key, value in _table(document, name, location).items():
        if (device := find_device(key).name) in by_name:
            raise ConfigError(f"{location}: {name} has {device} twice, {key:.40} is one", "once", "leave one out")
        by_name[device] = value
    return by_name


def _device(offer: Mapping[str, Any], location: str) -> str:
    if "device" not in offer:
        raise ConfigError(f"{location} has no device", 'device = "H100"', "name it")
    return find_device(str(offer["device"])).name


def _by_device(values: Mapping[str, Any], location: str) -> Mapping[str, float]:
    return {find_device(name).name: number(value, f"{location}: {name}") for name, value in values.items()}


def number(value: Any, location: str, fix: str = "correct it") -> float:
    """Check a number of a file. raises ConfigError if it is not a finite number of at least 0"""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_PRICE:
        raise ConfigError(f"{location} is {value!r:.40}", f"a number from 0 to {_MAX_PRICE:g}", fix)
    return float(value)


def _date(value: Any, location: str) -> datetime.date:
    if type(value) is not datetime.date:
        raise ConfigError(f"{location}: date is {value!s:.40}", "a day, 2026-11-01", "correct it")
    return value


def _check_key(name: str, allowed: Sequence[str], location: str) -> None:
    if name not in allowed:
        raise ConfigError(f"{location} has {name!r:.60}", nearest(name, allowed), "correct it")
