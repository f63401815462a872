"""Numbers as people read them."""

import pytest

from millrace.report.format_numbers import format_4_digits, format_count, format_exact, is_number, pluralize


@pytest.mark.parametrize("n, said", [
    (0, "0"), (99_999, "99,999"), (1e5, "100 k"), (678_720, "679 k"), (999_499, "999 k"), (999_500, "1.0 M"),
    (3_967_744, "4.0 M"), (999.949e6, "999.9 M"), (1.1e9, "1.10 B"), (13.45e12, "13,450.00 B"),
])  # fmt: skip
def test_a_number_of_things_has_two_digits_at_least(n: float, said: str) -> None:
    assert format_count(n) == said


@pytest.mark.parametrize("n, said", [
    (0.0, "0"), (1e-9, "1e-09"), (0.01234567, "0.01235"), (70.754, "70.75"), (999.94, "999.9"), (999.95, "1,000"),
    (4371.2, "4,371"), (29_170.4, "29,170"), (1e6, "1,000,000"), (-4371.2, "-4,371"),
])  # fmt: skip
def test_four_digits_or_whole(n: float, said: str) -> None:
    assert format_4_digits(n) == said


def test_what_somebody_said_keeps_its_digits() -> None:
    assert [format_exact(n) for n in (31.0, 0.25, 29_170_125.0, 30.000000000000004)] == [
        "31",
        "0.25",
        "29,170,125",
        "30",
    ]


def test_one_thing_is_not_several() -> None:
    assert [pluralize(n, "run") for n in (0, 1, 2, 1.5, 1e6)] == [
        "0 runs",
        "1 run",
        "2 runs",
        "1.5 runs",
        "1,000,000 runs",
    ]


@pytest.mark.parametrize("text, said", [
    ("1,234.5", True), ("12 GiB", True), ("3.4 GB/s", True), ("-", True), ("", True), ("+0.63", False), ("fp8", False),
])  # fmt: skip
def test_what_stands_flush_right(text: str, said: bool) -> None:
    assert is_number(text) == said
