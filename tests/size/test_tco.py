"""Costs of a year: the course's exercise, arithmetic by hand, every split of a fleet tried, prices that are refused."""

import csv
import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import DEVICES, find_device
from millrace.size import plan
from millrace.size.money.prices import Prices, Rent, middle, read_prices
from millrace.size.money.tco import (
    FleetNeed,
    break_even_hours,
    engines,
    hybrid,
    money,
    purchase_costs,
    rental_costs,
    watts,
)
from millrace.size.report.answer_json import answer_to_dict
from millrace.size.report.answer_tables import summary_rows
from millrace.size.report.cost_tables import cost_table, device_table
from tests.size.tables import SIZING, needs_tables

H100 = find_device("H100")
DAY = datetime.date(2026, 11, 1)
OWN = """
date = 2026-11-01
offers = [{ device = "H100", hour = 2.0, who = "us" }, { device = "H100", hour = 4.0, date = 2025-01-01 }]
[buy]
kwh = 0
[buy.systems]
L40S = 100000
[tokens]
input = 0.5
output = 1.5
"""


def own(tmp_path: Path, text: str = OWN) -> Prices:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return read_prices(path)


def test_the_course_exercise(tmp_path: Path) -> None:
    """200 requests/s on DGX H100s of 41.56 each, by the course's costs (no power): 119 kUSD each, 572 kUSD a year."""
    peak = 30e6 * 30 / (365 * 86_400) * 7
    fleet = FleetNeed(H100, 1, 8, 5, peak / 41.56, (1,) * 24)
    found = purchase_costs(fleet, own(tmp_path))
    assert found is not None and found.system == 119_000
    assert found.by_figures == pytest.approx(572e3, abs=500) and found.year == 5 * 119_000


def test_power() -> None:
    """10.2 kW through a year at 0.10 USD and a PUE of 1.3: 11.6 kUSD; others have as much beside their devices."""
    found = purchase_costs(FleetNeed(H100, 1, 8, 1, 1.0, (1,) * 24), read_prices(None))
    assert found is not None and found.power == pytest.approx(10.2 * 8760 * 0.1 * 1.3)
    l40s = find_device("L40S")
    assert watts(l40s, read_prices(None)) == pytest.approx(8 * 350 * 10_200 / 5600)


def test_rents_and_hours() -> None:
    """Twelve devices by day for 10 hours and 2 else, at 3 each."""
    rents = [Rent("H100 SXM", hour, "x", "neocloud", DAY) for hour in (1.0, 3.0, 9.0)]
    found = rental_costs(FleetNeed(H100, 2, 8, 2, 1.5, (1,) * 14 + (6,) * 10), rents)
    assert found is not None and found.rent.hour == 3 and found.peak_hour == 36
    assert found.always == 36 * 8760 and found.scaled == (14 * 2 + 10 * 12) * 3 * 365
    assert rental_costs(FleetNeed(H100, 2, 8, 2, 1.5, (1,) * 24), []) is None
    assert middle(rents[:2]).hour == 1


@pytest.mark.parametrize("hourly", [(1,) * 24, (3,) * 14 + (20,) * 10, tuple(range(1, 25)), (40,) * 23 + (41,)])
def test_no_other_split_is_cheaper(hourly: tuple[int, ...]) -> None:
    prices = read_prices(None)
    fleet = FleetNeed(H100, 1, 8, -(-max(hourly) // 8), 5.1, hourly)
    own, rent = purchase_costs(fleet, prices), rental_costs(fleet, prices.rents(H100, None))
    best = hybrid(fleet, own, rent)
    assert own is not None and rent is not None and best is not None
    for n in range(10):
        beyond = sum(max(0, need - 8 * n) for need in hourly) * rent.rent.hour * 365
        assert best.year <= n * own.system + beyond + 1e-6
    assert best.year <= rent.scaled + 1e-6


def test_who_buys_all_buys_what_is_to_spare() -> None:
    """Of 16 devices around the clock: 3 systems with one to spare cost less than one and 8 rented devices, 4 do not."""
    prices = read_prices(None)
    for spare, systems in ((1, 3), (2, 1)):
        fleet = FleetNeed(H100, 1, 8, 2 + spare, 2.0, (16,) * 24)
        own = purchase_costs(fleet, prices)
        best = hybrid(fleet, own, rental_costs(fleet, prices.rents(H100, None)))
        assert own is not None and best is not None and best.systems == systems
        assert (best.rented == 0 and best.year == own.year) if systems == 3 else best.year < own.year


def test_break_even() -> None:
    """At the hour where both cost the same, a system that is needed so long costs as much rented as bought."""
    prices = read_prices(None)
    fleet = FleetNeed(H100, 8, 8, 1, 1.0, (1,) * 24)
    own, rent = purchase_costs(fleet, prices), rental_costs(fleet, prices.rents(H100, None))
    hours = break_even_hours(own, rent)
    assert own is not None and rent is not None and hours is not None
    assert hours * 365 * 8 * rent.rent.hour == pytest.approx(own.year)
    cheap = rental_costs(fleet, [Rent("H100 SXM", 0.5, "x", "neocloud", DAY)])
    assert break_even_hours(own, cheap) is None


def test_by_the_token(tmp_path: Path) -> None:
    """1,000 in and 100 out at 0.5 and 1.5 a million are 0.00065 a request."""
    prices = own(tmp_path)
    found = money(FleetNeed(H100, 1, 8, 2, 2.0, (16,) * 24), prices, None, 10.0, 2.0, (1000, 100))
    assert found.by_token == pytest.approx(10 * 31_536_000 * 0.00065)
    assert found.break_even_requests == pytest.approx(2 * 119_000 / 365 / 0.00065)
    assert found.utilisation == pytest.approx(10 / 32) and found.rented is not None and found.bought is not None
    assert found.cheapest == min(found.rented.scaled, found.bought.year)
    assert found.a_million_tokens == pytest.approx(found.cheapest / (10 * 31_536_000 * 1100) * 1e6)


def test_engines_of_hours() -> None:
    assert engines((0.0, 1.0, 10.0, 10.1), 5.0, 1.0) == (1, 1, 2, 3)
    assert engines((10.0,), 5.0, 0.8) == (3,)


def test_own_prices_replace_ours(tmp_path: Path) -> None:
    found, ours = own(tmp_path), read_prices(None)
    assert [rent.hour for rent in found.rents(H100, None)] == [2, 4]
    a100 = find_device("A100")
    assert found.rents(a100, None) == ours.rents(a100, None) != []
    assert {rent.tier for rent in ours.rents(a100, "hyperscaler")} == {"hyperscaler"}
    assert found.systems == {**ours.systems, "L40S": 100_000} and found.kwh == 0 and found.licence == ours.licence


def test_old_prices_are_told(tmp_path: Path) -> None:
    prices = own(tmp_path)
    said = prices.stale_notes(prices.rents(H100, None), datetime.date(2026, 11, 23))
    assert len(said) == 1 and "yours is of 2025-01-01" in said[0]
    assert len(prices.stale_notes(prices.rents(H100, None), datetime.date(2027, 11, 2))) == 3


def test_another_currency_has_none_of_our_prices(tmp_path: Path) -> None:
    found = own(tmp_path, 'date = 2026-11-01\ncurrency = "EUR"\noffers = [{ device = "H100", hour = 2.0 }]')
    assert len(found.offers) == 1 and not found.systems
    with pytest.raises(ConfigError, match=r"buy\.years is None"):
        own(tmp_path, 'date = 2026-11-01\ncurrency = "EUR"\n[buy.systems]\nH100 = 5')


@pytest.mark.parametrize("text, said", [
    ("", "has no date"), ("date = 5", "date is 5"), ("date = 2026-11-01\noffer = 5", 'did you mean "offers"'),
    ("date = 2026-11-01\n[buy]\nyears = 0", "years 0"), ("date = 2026-11-01\n[buy]\npue = 0.9", "pue 0.9"),
    ("date = 2026-11-01\n[buy]\nkwh = -1", "kwh is -1"), ("date = 2026-11-01\n[buy]\nkwh = nan", "kwh is nan"),
    ("date = 2026-11-01\n[buy]\nkw = 1", 'did you mean "kwh"'), ("date = 2026-11-01\nbuy = 1", "buy is 1"),
    ('date = 2026-11-01\n[buy.systems]\n"H1000" = 1', "no device is known as H1000"), ("date = [", "is no TOML"),
    ("date = 2026-11-01\noffers = [1]", "no list of tables"), ("date = 2026-11-01\noffers = [{}]", "has no device"),
    ('date = 2026-11-01\noffers = [{ device = "H100" }]', "hour is None"),
    ('date = 2026-11-01\noffers = [{ device = "L4", hour = 1 }, { device = "H100", hour = 0 }]', "offer 2: hour is 0"),
    ('date = 2026-11-01\n[buy.systems]\nH100 = 5\n"h100 sxm" = 6', "systems has H100 SXM twice"),
    ('date = 2026-11-01\noffers = [{ device = "H100", hour = 1, tier = "best" }]', "tier is 'best'"),
    ('date = 2026-11-01\noffers = [{ device = "H100", hour = 1, usd = 2 }]', "has 'usd'"),
    ("date = 2026-11-01\n[tokens]\noutputs = 1", 'did you mean "output"'),
    ('date = 2026-11-01\ncurrency = ""', "currency is"),
])  # fmt: skip
def test_prices_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        own(tmp_path, text)
    assert said in str(found.value)


def test_our_prices_are_what_the_catalogue_knows() -> None:
    """Each with its day, none twice; of every GPU but those of which no dated price was found."""
    prices = read_prices(None)
    for rent in prices.offers:
        assert find_device(rent.device).name == rent.device and datetime.date(2026, 9, 1) <= rent.date <= prices.date
    named = [(rent.device, rent.who) for rent in prices.offers]
    assert len(named) == len(set(named))
    without = {device.name for device in DEVICES if device.peaks.get("fp16") and not prices.rents(device, None)}
    assert without == {"V100 SXM2 32GB", "A10G"}


@needs_tables
def test_our_prices_are_near_those_that_others_saw() -> None:
    """The table beside the project, of which rows without a day are not ours: within three times of its span."""
    seen: dict[str, list[float]] = {}
    with (SIZING / "gpu_prices.csv").open() as file:
        for row in csv.DictReader(file):
            seen.setdefault(find_device(row["gpu"]).name, []).append(float(row["usd_per_gpu_hour"]))
    ours = [rent for rent in read_prices(None).offers if rent.device in seen]
    assert len(ours) > 50
    for rent in ours:
        assert min(seen[rent.device]) / 3 < rent.hour < 3 * max(seen[rent.device]), rent


def test_what_a_note_asks_for_is_what_is_taken(tmp_path: Path) -> None:
    """Of a GPU that nobody is known to rent out or to sell: the notes' words, with numbers, are a file of prices."""
    asked = {"model": "llama-3-8b", "isl": 100, "osl": 10, "rate": 100, "mode": "offline", "hardware": "A10G"}
    found = plan(**asked, simulate=False).money
    assert found is not None and found.cheapest is None
    buy, rent = (note for note in found.notes if "--prices" in note)
    assert buy.startswith("no price of a system of 8 x A10G is known") and rent.startswith("no offer for A10G is known")
    written = [note.partition(", with: date = ..., ")[2].replace("...", "2.5") for note in (buy, rent)]
    file = tmp_path / "prices.toml"
    file.write_text("\n".join(["date = 2026-11-01", *written]))
    assert "--prices FILE" in buy and "--prices FILE" in rent
    given = plan(**asked, simulate=False, prices=str(file)).money
    assert given is not None and given.bought is not None and given.bought.purchase == 2.5 / 4
    assert given.rented is not None and given.rented.rent.hour == 2.5


def test_devices_without_a_price_are_named_beside_others() -> None:
    asked = {"model": "llama-3-8b", "isl": 100, "osl": 10, "rate": 100, "mode": "offline", "simulate": False}
    found = plan(**asked, hardware=["A10G", "L4", "V100"])
    table = device_table(found.alternatives)
    assert table.rows[0][0] == "L4" and {row[0] for row in table.rows if row[4] == "-"} == {"A10G", "V100 SXM2 32GB"}
    (note,) = table.notes
    assert "A10G" in note and "V100 SXM2 32GB" in note and "L4" not in note and "--prices FILE" in note
    assert not device_table(plan(**asked, hardware=["L4", "T4"]).alternatives).notes


def test_a_tier_without_offers_names_the_others() -> None:
    """Lambda, Spheron and CoreWeave have GH200s."""
    asked = {"model": "llama-3-8b", "isl": 100, "osl": 10, "rate": 1, "mode": "offline", "hardware": "GH200"}
    found = plan(**asked, simulate=False, tier="hyperscaler").money
    assert found is not None and found.rented is None
    assert "no offer of a hyperscaler for GH200 96GB is known (--tier), but of a marketplace and a neocloud: leave" in (
        " ".join(found.notes)
    )
    assert plan(**asked, simulate=False, tier="neocloud").money.rented.offers == 2  # type: ignore[union-attr]


def test_costs_in_an_answer() -> None:
    """A load by day alone: engines by the hour, the cheapest device first, a note where only the peak is known."""
    common = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "ttft_ms": 500, "simulate": False}
    day = plan(**common, average=100, hours=8, hardware=["A100", "H100"])
    assert day.money is not None and [one.device for one in day.alternatives] == ["H100 SXM", "A100 SXM 80GB"]
    assert min(day.money.hourly) == 1 < max(day.money.hourly) == day.instances and not day.money.notes
    years = [one.money.cheapest for one in day.alternatives if one.money]
    assert None not in years and years == sorted(c for c in years if c is not None) and len(years) == 2
    assert day.money.error == day.plan.error
    low, high = day.money.band or (0.0, 0.0)
    said = (
        f"{low:,.0f} to {high:,.0f}, if systems serve {day.plan.error:.0%} more or less than told; at the prices above"
    )
    assert ("  may be", said) in cost_table(day.money).rows
    sure = cost_table(replace(day.money, band=(low, low))).rows
    assert ("  may be", f"{low:,.0f}, even if systems serve {day.plan.error:.0%} less or more than told; at the prices "
            "above") in sure  # fmt: skip
    assert 0 < low < min(c for c in years if c is not None) < high < 2 * low, "where figures are as far off as may be"
    peak = plan(**common, rate=100, hardware="A10G")
    assert peak.money is not None and "only the peak is known" in peak.money.notes[0]
    assert peak.money.bought is None and "no price of a system" in peak.money.notes[1]
    assert peak.money.cheapest is None and peak.money.band is None


@pytest.mark.parametrize("more, way, both", [
    ({"average": 100, "hours": 8}, "rented", "no mix is cheaper than all rented"),
    ({"rate": 65}, "bought", "no mix is cheaper than all bought"),
    ({"rate": 65, "spare": 1}, "rented", "no mix is cheaper than all rented"),
    ({"rate": 329, "ttft_ms": 120, "spare": 1}, "both", "13 bought and the rest rented when it is needed"),
    ({"average": 600, "daily": "9," * 20 + "14,14,14,14"}, "both", " bought and the rest rented when it is needed"),
])  # fmt: skip
def test_the_cheapest_way_is_named(more: dict[str, object], way: str, both: str) -> None:
    asked = plan(
        **{**dict(model="llama-3-8b", isl=2000, osl=200, ttft_ms=500, simulate=False, hardware="H100"), **more}
    )
    found = asked.money
    assert found is not None and found.bought is not None and found.rented is not None and found.hybrid is not None
    ways = {"bought": found.bought.year, "rented": found.rented.scaled, "both": found.hybrid.year}
    assert found.cheapest_way == way and ways[way] == min(ways.values()) == found.cheapest
    named = {row[0]: row[1] for row in cost_table(found).rows}
    assert named["both"].endswith(both) and named["the cheapest way"].startswith(f"{way}, {found.cheapest:,.0f}: ")
    assert answer_to_dict(asked)["money"]["cheapest_way"] == way


def test_what_few_requests_cost_stands_whole() -> None:
    """Two people on a system of their own: thousands for a million tokens, not 7e+03."""
    found = plan(model="llama-3-8b", isl=2000, osl=200, ttft_ms=500, simulate=False, hardware="H100", users=2).money
    assert found is not None and found.a_million_tokens is not None and found.a_million_tokens > 1000
    named = {row[0]: row[1] for row in cost_table(found).rows}
    assert f"{found.a_million_tokens:,.0f} a million tokens" in named["the cheapest way"]


def test_a_part_of_a_system_is_said_to_do() -> None:
    """Of three instances of one device each, three devices; of a whole system nothing is said."""
    asked = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "mode": "offline", "simulate": False, "tp": 1}
    each = plan(**asked, systems="1").plan.point.rate
    said = "; 3 of 8 devices would do: --system-size plans with smaller systems"
    assert dict(summary_rows(plan(**asked, rate=2.5 * each)))["instances"].endswith(said)
    assert "would do" not in dict(summary_rows(plan(**asked, rate=7.5 * each)))["instances"]
    three = plan(**asked, rate=3 * each)
    assert replace(three, plan=replace(three.plan, fractional=0.375 * (1 + 1e-12))).instances == 3, (
        "but for a last digit"
    )
    assert "would do" not in dict(summary_rows(plan(**asked, systems="1")))["instances"]
