"""Messages hold what came from files and clients: they stay short, printable, and the same wherever they travel."""

import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import LONGEST, BusyError, CheckpointError, MillraceError, RequestError, mib, nearest, sanitize


@pytest.mark.parametrize(
    "text, shown",
    [
        ("ein Mühlgraben, 水車", "ein Mühlgraben, 水車"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("one\r\n  to fix:   rm -rf", r"one\r\n  to fix:   rm -rf"),
        ("\x9b31m \x85 \x7f", r"\x9b31m \x85 \x7f"),  # a terminal's commands in one byte
        ("gpj.exe\u202eegami", r"gpj.exe\u202eegami"),  # written from right to left
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("", ""),
    ],
)
def test_what_cannot_be_printed_is_escaped(text: str, shown: str) -> None:
    assert sanitize(text) == shown
    error = CheckpointError(text, text, text)
    assert (error.what, error.expected, error.fix) == (shown, shown, shown)
    str(error).encode()


@pytest.mark.parametrize("n", [LONGEST - 1, LONGEST, LONGEST + 1, 50_000_000])
def test_the_middle_of_a_long_part_is_left_out(n: int) -> None:
    text = "name " + "x" * (n - 14) + " is wrong"
    shown = sanitize(text)
    assert len(shown) <= LONGEST and shown.startswith("name ") and shown.endswith(" is wrong")
    assert (shown == text) == (n <= LONGEST)
    assert len(sanitize("\x1b" * n)) <= LONGEST


@pytest.mark.parametrize("c", ["e", "é", "水", "😀"])
@pytest.mark.parametrize("n", [LONGEST // 4, LONGEST // 4 + 1, LONGEST // 2 + 1, LONGEST, LONGEST + 1])
def test_what_is_long_is_long_in_bytes(c: str, n: int) -> None:
    """No character is cut in two."""
    shown = sanitize(c * n)
    assert len(shown.encode()) <= LONGEST and {*shown} <= {c, " ", "."}
    assert (shown == c * n) == (n * len(c.encode()) <= LONGEST)


@given(st.text(st.characters(exclude_categories=[]), max_size=3 * LONGEST))
def test_cleaning_twice_changes_nothing(text: str) -> None:
    once = sanitize(text)
    assert sanitize(once) == once and once.isprintable() and len(once.encode()) <= LONGEST


@pytest.mark.parametrize(
    "error",
    [
        MillraceError("\x1b" * 2000, "\n", "fix"),
        RequestError("\x1b", "b", "c", param="stop"),
        BusyError("a" * 5000, "b", "c", retry_after_s=3.0),
    ],
)
def test_errors_travel_between_processes(error: MillraceError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_the_nearest_of_many_or_to_a_long_name_is_found_soon() -> None:
    started_s = time.monotonic()
    assert nearest("x" * 10_000_000, ["top_p", "x" * 5000]).startswith("one of: top_p, xxx")
    assert "did you mean" in nearest("layers.17.q", [f"layers.{i}.q" for i in range(100_000)])
    assert time.monotonic() - started_s < 5
    assert nearest("top_q", ["top_p", "seed"]) == 'did you mean "top_p"?'


@pytest.mark.parametrize(
    "n, told", [(1, "1 B"), (1023, "1023 B"), (98_304, "96 KiB"), (1 << 20, "1 MiB"), (11 << 30, "11.0 GiB")]
)  # fmt: skip
def test_memory_is_told_in_its_unit(n: int, told: str) -> None:
    assert mib(n) == told
