"""Metrics in Prometheus' text format, version 0.0.4.

Not prometheus-client's: that appends `_total` to every counter's name, which Triton's names do not have, and takes five
times as long for a scrape.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class MetricFamily:
    """The samples of one metric. name: in full, with a counter's `_total`. kind: counter, gauge, histogram or summary

    samples: each a suffix of the name, labels as `label_text` returns them, and a value
    """

    name: str
    kind: str
    help_text: str
    samples: list[tuple[str, str, float]] = field(default_factory=list)

    def add(self, value: float, labels: str = "", suffix: str = "") -> None:
        self.samples.append((suffix, labels, value))


class CounterValue:
    __slots__ = ("created_s", "value")

    def __init__(self) -> None:
        self.value, self.created_s = 0.0, time.time()

    def inc(self) -> None:
        self.value += 1


class Counter:
    """A counter for each combination of label values. Used by one thread."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str]) -> None:
        """name: without `_total`"""
        self._name, self._help_text, self._labels = name, help_text, labels
        self._values: dict[str, CounterValue] = {}

    def labels(self, *values: str) -> CounterValue:
        text = label_text(dict(sorted(zip(self._labels, values, strict=True))))
        return self._values.setdefault(text, CounterValue())

    def families(self) -> Iterator[MetricFamily]:
        samples = [("", labels, counter.value) for labels, counter in self._values.items()]
        yield MetricFamily(f"{self._name}_total", "counter", self._help_text, samples)
        yield from _created_family(self._name, self._help_text, self._values)


class HistogramValue:
    """Counts per bucket, and the sum of all values. bounds: upper bounds of the buckets but the last, which has none"""

    __slots__ = ("bounds", "counts", "created_s", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.sum, self.created_s = 0.0, time.time()

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Histogram:
    """A histogram for each value of one label. Used by one thread."""

    def __init__(self, name: str, help_text: str, label: str, bounds: Sequence[float]) -> None:
        self._name, self._help_text, self._label, self._bounds = name, help_text, label, bounds
        self._bound_texts = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        self._values: dict[str, HistogramValue] = {}

    def labels(self, value: str) -> HistogramValue:
        return self._values.setdefault(label_text({self._label: value}), HistogramValue(self._bounds))

    def families(self) -> Iterator[MetricFamily]:
        family = MetricFamily(self._name, "histogram", self._help_text)
        for labels, histogram in self._values.items():
            n = 0.0
            for bound, count in zip(self._bound_texts, histogram.counts, strict=True):
                n += count
                family.add(n, f'le="{bound}",{labels}', "_bucket")
            family.add(n, labels, "_count")
            family.add(histogram.sum, labels, "_sum")
        yield family
        yield from _created_family(self._name, self._help_text, self._values)


def _created_family(
    name: str, help_text: str, values: Mapping[str, CounterValue] | Mapping[str, HistogramValue]
) -> Iterator[MetricFamily]:
    """Yield the times at which values began to be counted, if there are any."""
    if values:
        samples = [("", labels, value.created_s) for labels, value in values.items()]
        yield MetricFamily(f"{name}_created", "gauge", help_text, samples)


def label_text(labels: Mapping[str, str]) -> str:
    """Format labels: `name="value",...`."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def metrics_text(families: Iterable[MetricFamily]) -> str:
    """Format families; those of one name are joined."""
    joined: dict[str, MetricFamily] = {}
    for family in families:
        first = joined.setdefault(family.name, family)
        if first is not family:
            first.samples += family.samples
    lines: list[str] = []
    for name, family in joined.items():
        lines += [f"# HELP {name} {_escape(family.help_text, quote=False)}", f"# TYPE {name} {family.kind}"]
        lines += [
            f"{name}{suffix}{{{labels}}} {number_text(value)}" if labels else f"{name}{suffix} {number_text(value)}"
            for suffix, labels, value in family.samples
        ]
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str, quote: bool = True) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quote else escaped


def number_text(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
