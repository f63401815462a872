"""Drawings: ticks that people read, shapes where the data say, and names that stay text."""

import re

import pytest

from millrace.report.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Plot, downsample, round_ticks


@pytest.mark.parametrize(
    "low, high, ticks",
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 0.9, [0, 0.2, 0.4, 0.6, 0.8]), (-3, 4, [-2, 0, 2, 4]), (5, 5, [5]),
     (0, 3e6, [0, 5e5, 1e6, 1.5e6, 2e6, 2.5e6, 3e6]), (7.2, 7.9, [7.2, 7.4, 7.6, 7.8])],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)


def test_shapes_lie_where_the_data_say() -> None:
    plot = Plot(Axis("x", 0, 10), Axis("y", 0, 100))
    plot.dots([0, 10], [0, 100])
    plot.box((0, 0), (5, 50), label="a <b>")
    svg = plot.svg("what & why")
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg) == [(f"{LEFT}.0", f"{bottom}.0"), (f"{right}.0", f"{TOP}.0")]
    (box,) = re.findall(r'<rect[^>]* x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
    assert [float(v) for v in box] == pytest.approx(
        [LEFT, (TOP + bottom) / 2, (right - LEFT) / 2, (bottom - TOP) / 2], abs=0.02
    )
    assert "a &lt;b&gt;" in svg and "what &amp; why" in svg and "style=" not in svg


def test_an_axis_holds_its_values() -> None:
    axis = Axis.over("x", [3.0, 7.0])
    assert axis.low == 0 and axis.high > 7
    assert Axis.over("x", [3.0, 7.0], from_zero=False).low < 3 and Axis.over("x", []).high > 0
    assert Axis("", 0, 1, ["one", "two"]).ticks == [(0, "one"), (1, "two")]


def test_of_many_every_so_many_eth_is_drawn() -> None:
    assert downsample(list(range(10)), 4) == [0, 3, 6, 9] and downsample([1, 2], 4) == [1, 2]
    assert len(downsample(list(range(10_001)), 2000)) <= 2000
