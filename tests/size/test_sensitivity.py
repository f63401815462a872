"""What would change the answer is what the question would answer, were it asked so."""

from typing import Any

import pytest

from millrace.size import plan

ASKED: dict[str, Any] = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "ttft_ms": 500, "rate": 1000, "spare": 1,
                         "utilisation": 0.8, "hardware": "H100", "simulate": False}  # fmt: skip


@pytest.mark.parametrize("what, more", [
    ("a quarter more requests", {"rate": 1250}), ("half of the requests", {"rate": 500}),
    ("limits half as long", {"ttft_ms": 250}), ("limits twice as long", {"ttft_ms": 1000}),
    ("prompts half as long", {"isl": 1000}), ("answers half as long", {"osl": 100}),
    ("software that takes 0.75 of the time", {"factor": 0.75}), ("16 bits alone", {"precision": "fp16"}),
])  # fmt: skip
def test_one_thing_otherwise(what: str, more: dict[str, Any]) -> None:
    """The configuration stays, but for 16 bits and limits."""
    found = plan(**ASKED)
    (change,) = (one for one in found.changes if one.what == what)
    stays = {} if "precision" in more or "ttft_ms" in more else {"precision": found.plan.point.precision,
                                                                   "tp": found.plan.point.tp}  # fmt: skip
    asked = plan(**{**ASKED, **stays, **more}).plan
    assert change.systems == asked.systems and change.fractional == pytest.approx(asked.fractional)


def test_limits_that_are_as_long_as_they_may_be_have_twice_as_long_beside_them() -> None:
    found = {one.what: one for one in plan(**{**ASKED, "ttft_ms": 1e9}).changes}
    assert found["limits twice as long"].systems is not None


def test_nothing_changes_where_systems_are_given() -> None:
    given = {name: value for name, value in ASKED.items() if name != "rate"}
    assert plan(**given, systems="4").changes == ()


def test_what_no_hardware_would_keep_has_no_systems() -> None:
    """The least TTFT of a prompt of 2,000 tokens is some 25 ms."""
    found = {one.what: one for one in plan(**{**ASKED, "ttft_ms": 30}).changes}
    assert found["limits half as long"].systems is None and found["limits half as long"].fractional is None
    assert found["limits twice as long"].systems is not None
