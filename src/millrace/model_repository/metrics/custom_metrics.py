"""Metrics that models count themselves, in Prometheus' text format; Triton's rules and words.

Families of one name are one, and so are metrics of one family with equal labels: they are there as long as anybody has
them. Called from any thread, and from destructors, which come in the middle of anything: these only leave a note.
"""

import bisect
import itertools
import math
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.model_repository.request.status_code import Code, StatusError, invalid

KINDS = ("COUNTER", "GAUGE", "HISTOGRAM")
_NAME, _LABEL = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*"), re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = ("nv_", "millrace", "vllm:", "http_", "process_", "python_")  # the server's own names begin so
_MOST = 10_000  # metrics of one server: whoever labels them with what clients write would fill its memory
_LONGEST = 1000  # characters of a name, a label or a description


@dataclass(slots=True)
class _Metric:
    """A value, or of a histogram observations by their bucket, the last beyond all bounds, and their sum."""

    bounds: tuple[float, ...] = ()
    n_in: list[int] = field(default_factory=list)
    value: float = 0.0
    n_holders: int = 0


@dataclass(slots=True)
class _Family:
    name: str
    kind: str
    description: str
    metrics: dict[tuple[tuple[str, str], ...], _Metric] = field(default_factory=dict)
    n_holders: int = 0


@dataclass(slots=True)
class _MetricRef:
    family: _Family
    labels: tuple[tuple[str, str], ...] | None = None  # None: the family itself


class CustomMetrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._held: dict[int, _MetricRef] = {}  # by the numbers that models know them by
        self._numbers = itertools.count(1)
        self._dropped: deque[int] = deque()

    def family(self, name: str, description: str, kind: int) -> int:
        """Its number. raises StatusError, as all of these do"""
        if kind not in range(len(KINDS)):
            raise invalid("Unsupported kind passed to MetricFamily constructor.")
        if not _NAME.fullmatch(name) or len(name) > _LONGEST:
            raise invalid(f"Invalid metric name '{name:.80}': letters, digits, _ and : are expected")
        if name.startswith(_OURS):
            raise invalid(
                f"Invalid metric name '{name:.80}': names that begin with {', '.join(_OURS)} are the server's"
            )
        with self._lock:
            self._sweep()
            family = self._families.get(name)
            if family is None:
                self._check_room()
                family = self._families[name] = _Family(name, KINDS[kind], description[:_LONGEST])
            elif family.kind != KINDS[kind]:
                raise invalid(f"Metric name '{name}' already exists with different type: {family.kind}")
            family.n_holders += 1
            return self._new(_MetricRef(family))

    def metric(self, number: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        """number: of the family. Its own. buckets: of a histogram, upper bounds"""
        with self._lock:
            self._sweep()
            family = self._known(number, "create").family
            bounds = _bounds(family, buckets)
            key = _labels(labels)
            metric = family.metrics.get(key)
            if metric is None:
                self._check_room()
                metric = family.metrics[key] = _Metric(bounds, [0] * (len(bounds) + 1))
            metric.n_holders += 1
            return self._new(_MetricRef(family, key))

    def change(self, what: str, number: int, value: float) -> float:
        """what: increment, set, observe or value. What it is then"""
        with self._lock:
            held = self._known(number, what)
            assert held.labels is not None, "a family has no value"
            family, metric = held.family, held.family.metrics[held.labels]
            allowed = {"COUNTER": ("increment", "value"), "GAUGE": ("increment", "set", "value"),
                       "HISTOGRAM": ("observe",)}  # fmt: skip
            if what not in allowed[family.kind]:
                which = f"TRITONSERVER_METRIC_KIND_{family.kind} does not support {what.capitalize()}"
                raise StatusError(Code.UNSUPPORTED, which)
            if family.kind == "COUNTER" and not value >= 0:
                raise invalid(
                    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
                )
            if what == "set":
                metric.value = value
            elif what == "increment":
                metric.value += value
            elif what == "observe":
                metric.n_in[bisect.bisect_left(metric.bounds, value)] += 1
                metric.value += value
            return metric.value

    def drop(self, number: int) -> None:
        """Whoever had it has it no more."""
        self._dropped.append(number)

    def text(self) -> str:
        """Families without a metric are left out."""
        with self._lock:
            self._sweep()
            lines: list[str] = []
            for family in self._families.values():
                if family.metrics:
                    lines += [f"# HELP {family.name} {_escaped(family.description, quote=False)}",
                              f"# TYPE {family.name} {family.kind.lower()}"]  # fmt: skip
                for labels, metric in family.metrics.items():
                    lines += _samples(family, labels, metric)
            return "".join(f"{line}\n" for line in lines)

    def _known(self, number: int, what: str) -> _MetricRef:
        found = self._held.get(number)
        if found is None:
            raise StatusError(Code.INTERNAL, f"Could not {what} metric value. Metric has been invalidated.")
        return found

    def _new(self, held: _MetricRef) -> int:
        number = next(self._numbers)
        self._held[number] = held
        return number

    def _check_room(self) -> None:
        if len(self._families) + sum(len(family.metrics) for family in self._families.values()) >= _MOST:
            raise StatusError(Code.UNAVAILABLE, f"models of this server have {_MOST} metrics, more are not supported")

    def _sweep(self) -> None:
        while self._dropped:
            held = self._held.pop(self._dropped.popleft(), None)
            if held is None:
                continue
            family = held.family
            if held.labels is None:
                family.n_holders -= 1
                if not family.n_holders:
                    del self._families[family.name]
                continue
            family.metrics[held.labels].n_holders -= 1
            if not family.metrics[held.labels].n_holders:
                del family.metrics[held.labels]


def _bounds(family: _Family, buckets: Sequence[float] | None) -> tuple[float, ...]:
    if family.kind != "HISTOGRAM":
        if buckets is not None:
            raise invalid(f"Unexpected args found in {family.kind.lower()} Metric constructor.")
        return ()
    if buckets is None:
        raise invalid("Bucket boundaries not found in Metric args.")
    if not all(math.isfinite(b) for b in buckets) or list(buckets) != sorted(set(buckets)):
        raise invalid("Bucket Boundaries must be strictly sorted")
    return tuple(buckets)


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    for name, value in labels.items():
        if not isinstance(value, str):
            what = f"Parameter [{name}] must have a type of TRITONSERVER_PARAMETER_STRING to be added as a label."
            raise invalid(what)
        if not _LABEL.fullmatch(name) or name == "le" or max(len(name), len(value)) > _LONGEST:
            raise invalid(f"Invalid label name '{name:.80}', or a value of more than {_LONGEST} characters")
    return tuple(sorted(labels.items()))


def _samples(family: _Family, labels: Sequence[tuple[str, str]], metric: _Metric) -> list[str]:
    if family.kind != "HISTOGRAM":
        return [f"{family.name}{_written(labels)} {_number(metric.value)}"]
    lines, n = [], 0
    for bound, n_in in zip((*metric.bounds, math.inf), metric.n_in, strict=True):
        n += n_in
        lines.append(f"{family.name}_bucket{_written((*labels, ('le', _number(bound))))} {n}")
    told = _written(labels)
    return [f"{family.name}_count{told} {n}", f"{family.name}_sum{told} {_number(metric.value)}", *lines]


def _written(labels: Sequence[tuple[str, str]]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(text: str, quote: bool = True) -> str:
    found = text.replace("\\", "\\\\").replace("\n", "\\n")
    return found.replace('"', '\\"') if quote else found


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value).removesuffix(".0")
