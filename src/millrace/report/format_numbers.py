"""Number formatting for terminals and pages."""

import re

_NUMBER = re.compile(r"([\d.,]+( [KMGT]?i?B)?( .?B/s)?| *|-)")


def format_count(n: float) -> str:
    """Format a count: 99,999, 679 k, 4.0 M or 1.10 B."""
    for most, times, digits, unit in ((99_999.5, 1e0, 0, ""), (999_500.0, 1e3, 0, " k"), (999.95e6, 1e6, 1, " M")):
        if n < most:
            return f"{n / times:,.{digits}f}{unit}"
    return f"{n / 1e9:,.2f} B"


def format_4_digits(n: float) -> str:
    """Format with four significant digits, or as an integer from 1,000 on: 0.0123, 70.75, 4,371, 29,170."""
    return f"{n:,.0f}" if abs(n) >= 999.95 else f"{n:.4g}"


def format_exact(n: float) -> str:
    """Format with all digits: 31, 0.25, 29,170,125."""
    return f"{n:,.10g}"


def pluralize(n: float, name: str) -> str:
    """Format a number with a noun: 1 request, 3 requests."""
    return f"{format_exact(n)} {name}{'' if n == 1 else 's'}"


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
    """Return whether a table cell is numeric (right-aligned) or neutral."""
    return _NUMBER.fullmatch(text) is not None
