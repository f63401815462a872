"""Costs, and the comparison of all requested devices, as text tables."""

from collections.abc import Sequence

from millrace.report.format_numbers import format_4_digits
from millrace.size.answer.alternatives import Alternative
from millrace.size.money.tco import DAY_HOURS, Money
from millrace.size.report.table import TextTable, system_count


def device_table(alternatives: Sequence[Alternative]) -> TextTable:
    rows = []
    for row in alternatives:
        cost = row.money.cheapest if row.money else None
        if row.plan is None:
            rows.append([row.device, "-", "-", row.why_not.what if row.why_not else "", "-", "-"])
        else:
            rows.append(
                [
                    row.device, system_count(row.plan.fractional), str(row.plan.systems), row.plan.point.configuration,
                    "-" if cost is None else f"{cost:,.0f}", str(row.plan.point.source),
                ]
            )  # fmt: skip
    currency = next((row.money.currency for row in alternatives if row.money), "")
    header = ("", "by the figures", "systems", "configuration", f"{currency} a year", "figures")
    unknown = [row.device for row in alternatives if row.plan and row.money and row.money.cheapest is None]
    notes = [f"no price of {', '.join(unknown)} is known: give yours with --prices FILE"] if unknown else []
    return TextTable(
        "devices", "On each hardware, the cheapest first where prices are known", rows, header, notes=notes
    )


def cost_table(money: Money) -> TextTable:
    rows = [*_purchase_rows(money), *_rental_rows(money), *_hybrid_rows(money), *_cheapest_rows(money)]
    day, night = max(money.hourly), min(money.hourly)
    if day > night:
        rows.append(("instances", f"{night} at night, {day} by day: {_ranges(money.hourly)}"))
    rows.append(("utilisation", f"{money.utilisation:.0%} of what instances could serve that run, on average"))
    notes = [f"note: {note}" for note in money.notes]
    return TextTable("costs", f"Costs, {money.currency} a year", rows, notes=notes)


def _purchase_rows(money: Money) -> list[tuple[str, str]]:
    own = money.bought
    if own is None:
        return []
    return [
        ("bought", f"{own.year:,.0f}; {own.by_figures:,.0f} for as many as the figures say"),
        ("  a system", f"{own.system:,.0f}: purchase {own.purchase:,.0f}, licences {own.licence:,.0f}, hosting "
                       f"{own.hosting:,.0f}, power {own.power:,.0f}"),
    ]  # fmt: skip


def _rental_rows(money: Money) -> list[tuple[str, str]]:
    own = money.rented
    if own is None:
        return []
    rent, details = own.rent, f"the middle of {own.offers} offers from {own.low:,.2f} to {own.high:,.2f}"
    one = f"{rent.hour:,.2f} a device, by {rent.who} on {rent.date}, {details if own.offers > 1 else 'the only offer'}"
    return [
        ("rented", f"{own.scaled:,.0f} with as many as each hour needs, {own.always:,.0f} with all of them always"),
        ("  an hour", f"{own.peak_hour:,.2f} at the peak; {one}"),
    ]


def _hybrid_rows(money: Money) -> list[tuple[str, str]]:
    rows = []
    if money.hybrid is not None:
        n, details = money.hybrid.systems, money.hybrid
        mixed = f"{details.year:,.0f} with {n} bought and the rest rented when it is needed"
        rows.append(
            ("both", mixed if n and details.rented else f"no mix is cheaper than all {'bought' if n else 'rented'}")
        )
    if money.by_token is not None:
        rows.append(("by the token", f"{money.by_token:,.0f}"))
    if money.bought is not None and money.rented is not None:
        hours = money.break_even_hours
        rows.append(("break-even", "renting is cheaper even around the clock" if hours is None else
                     f"buying is cheaper from {hours:.1f} of {DAY_HOURS} hours a day on"))  # fmt: skip
    if money.break_even_requests is not None:
        rows.append(("", f"and than paying by the token from {money.break_even_requests:,.0f} requests a day on"))
    return rows


def _cheapest_rows(money: Money) -> list[tuple[str, str]]:
    tokens, requests = money.a_million_tokens, money.a_thousand_requests
    if money.cheapest is None or tokens is None or requests is None:
        return []
    rows = [("the cheapest way", f"{money.cheapest_way}, {money.cheapest:,.0f}: "
                                 f"{format_4_digits(tokens)} a million tokens, "
                                 f"{format_4_digits(requests)} a thousand requests")]  # fmt: skip
    if money.band is not None:
        low, high = money.band
        band_text = f"{low:,.0f}, even if systems serve {money.error:.0%} less or more than told"
        if round(low) != round(high):
            band_text = f"{low:,.0f} to {high:,.0f}, if systems serve {money.error:.0%} more or less than told"
        rows.append(("  may be", f"{band_text}; at the prices above"))
    return rows


def _ranges(hourly: tuple[int, ...]) -> str:
    """Format instances by hour: "2 from 0 h, 12 from 8 h, 4 from 18 h"."""
    starts = [hour for hour in range(len(hourly)) if hour == 0 or hourly[hour] != hourly[hour - 1]]
    return ", ".join(f"{hourly[hour]} from {hour} h" for hour in starts)
