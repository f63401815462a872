"""Numbers in words, on a screen and on a page."""

import re

_NUMBER = re.compile(r"([\d.,]+( [KMGT]?i?B)?( .?B/s)?| *|-)")


def count(n: float) -> str:
    """A number of things, as 99,999, 679 k, 4.0 M, or 1.10 B."""
    for most, times, digits, unit in ((99_999.5, 1e0, 0, ""), (999_500.0, 1e3, 0, " k"), (999.95e6, 1e6, 1, " M")):
        if n < most:
            return f"{n / times:,.{digits}f}{unit}"
    return f"{n / 1e9:,.2f} B"


def format_4_digits(n: float) -> str:
    """In four digits, or whole where it has more: 0.0123, 70.75, 4,371, 29,170."""
    return f"{n:,.0f}" if abs(n) >= 999.95 else f"{n:.4g}"


def exact(n: float) -> str:
    """As somebody said it, with all of its digits: 31, 0.25, 29,170,125."""
    return f"{n:,.10g}"


def pluralize(n: float, name: str) -> str:
    """1 request, 3 requests."""
    return f"{exact(n)} {name}{'' if n == 1 else 's'}"


def format_percent(share: float) -> str:
    """Format a share; less than 1 is never shown as 100 %."""
    text = f"{100 * share:.3g} %"
    return "almost 100 %" if share < 1 and text == "100 %" else text


def format_duration(seconds: float) -> str:
    """Format a duration in its largest unit: 1.5 days, 3 h, 1.48 min, 12 s."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def is_number(text: str) -> bool:
    """Of a table: one that stands flush right in its column, or leaves that to the others."""
    return _NUMBER.fullmatch(text) is not None
