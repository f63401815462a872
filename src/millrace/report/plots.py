"""Plots for pages: axes, and shapes in the units of the data, as SVG without scripts.

plot = Plot(Axis("input tokens", 0, 4096), Axis("ms", 0, 300)); plot.dots(xs, ys); plot.svg()
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from millrace.report.plot_scale import Scale

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1080, 300, 78, 14, 12, 46
MAX_SHAPES = 2000  # shapes of one kind; of more, every so many-eth is drawn


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis. names: labels used instead of numbers, at 0, 1, 2, ..."""

    label: str
    low: float
    high: float
    names: Sequence[str] = ()

    @classmethod
    def over(cls, label: str, values: Sequence[float], from_zero: bool = True) -> "Axis":
        """Return an axis that covers all values, with a margin."""
        low, high = (min(values), max(values)) if len(values) else (0.0, 1.0)
        low = min(low, 0.0) if from_zero else low
        room = 0.04 * (high - low) or 1.0
        return cls(label, low if from_zero else low - room, high + room)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        if self.names:
            return [(float(i), name) for i, name in enumerate(self.names)]
        return [(value, f"{value:,.10g}") for value in round_ticks(self.low, self.high)]


def round_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return about `about` multiples of 1, 2 or 5 times a power of ten between low and high."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def downsample(values: Sequence[float], max_points: int = MAX_SHAPES) -> list[float]:
    """Evenly chosen, where there are more: never at random, so that a page can be made again."""
    step = max(1, -(-len(values) // max_points))
    return list(values[::step])


@dataclass(slots=True)
class Plot:
    """A plot. Nothing is clipped: shapes must lie within the axes. kind: 0 to 4, a colour of the style sheet"""

    x: Axis
    y: Axis
    height: int = HEIGHT
    _shapes: list[str] = field(default_factory=list)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        across = Scale(self.x.low, self.x.high, LEFT, WIDTH - RIGHT)
        up = Scale(self.y.low, self.y.high, self.height - BOTTOM, TOP)
        return across.at(x), up.at(y)

    def dots(self, xs: Sequence[float], ys: Sequence[float], kind: int = 0) -> None:
        for x, y in zip(downsample(xs), downsample(ys), strict=True):
            left, top = self._at(x, y)
            self._shapes.append(f'<circle class="dot k{kind}" cx="{left}" cy="{top}" r="3"/>')

    def line(self, xs: Sequence[float], ys: Sequence[float], kind: int = 0) -> None:
        points = " ".join(f"{left},{top}" for left, top in (self._at(x, y) for x, y in zip(xs, ys, strict=True)))
        self._shapes.append(f'<polyline class="stroke s{kind}" points="{points}"/>')

    def box(
        self, low: tuple[float, float], high: tuple[float, float], kind: int = 0, opacity: float = 1.0, label: str = ""
    ) -> None:
        """Add a rectangle between two points."""
        (left, bottom), (right, top) = self._at(*low), self._at(*high)
        self._shapes.append(
            f'<rect class="k{kind}" x="{min(left, right)}" y="{min(top, bottom)}" width="{abs(right - left):.2f}" '
            f'height="{abs(bottom - top):.2f}" fill-opacity="{opacity:.3f}"><title>{escape(label)}</title></rect>'
        )

    def text(self, x: float, y: float, content: str) -> None:
        left, top = self._at(x, y)
        self._shapes.append(f'<text x="{left + 6}" y="{top - 6}">{escape(content)}</text>')

    def svg(self, label: str) -> Markup:
        """Return the plot as SVG. label: a description for screen readers"""
        bottom, right = self.height - BOTTOM, WIDTH - RIGHT
        parts = [f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(label)}">']
        for value, name in self.y.ticks:
            _, top = self._at(self.x.low, value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{top}" y2="{top}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{top + 4}" text-anchor="end">{escape(name)}</text>')
        for value, name in self.x.ticks:
            left, _ = self._at(value, self.y.low)
            parts.append(f'<text x="{left}" y="{bottom + 18}" text-anchor="middle">{escape(name)}</text>')
        parts += self._shapes
        middle = (LEFT + right) / 2
        parts.append(f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(self.x.label)}</text>')
        parts.append(f'<text x="{LEFT}" y="{TOP - 2}">{escape(self.y.label)}</text></svg>')
        return Markup("".join(parts))
