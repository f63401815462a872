"""Custom metrics of models, with Triton's rules and messages.

Families of the same name are shared, and so are metrics of a family with equal labels; both exist while any model holds
them. Called from any thread and from destructors; a destructor only queues the removal, because it may run at any time.
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
from millrace.prometheus import MetricFamily, label_text, number_text

KINDS = ("COUNTER", "GAUGE", "HISTOGRAM")
_NAME, _LABEL = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*"), re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = ("nv_", "millrace", "vllm:", "http_", "process_", "python_")  # prefixes of the server's own metrics
_MAX_METRICS = 10_000  # per server: bounds memory if models use client input as labels
_MAX_LENGTH = 1000  # characters of a name, label or description


@dataclass(slots=True)
class _Metric:
    """A metric: a value, or for a histogram counts per bucket (the last is unbounded) and the sum."""

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
        self._refs: dict[int, _MetricRef] = {}  # by the numbers that models use
        self._numbers = itertools.count(1)
        self._dropped: deque[int] = deque()

    def family(self, name: str, description: str, kind: int) -> int:
        """Create or share a family and return its number. raises StatusError, as all of these do"""
        if kind not in range(len(KINDS)):
            raise invalid("Unsupported kind passed to MetricFamily constructor.")
        if not _NAME.fullmatch(name) or len(name) > _MAX_LENGTH:
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
                family = self._families[name] = _Family(name, KINDS[kind], description[:_MAX_LENGTH])
            elif family.kind != KINDS[kind]:
                raise invalid(f"Metric name '{name}' already exists with different type: {family.kind}")
            family.n_holders += 1
            return self._add_ref(_MetricRef(family))

    def metric(self, number: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        """Create or share a metric of family `number`; return its number. buckets: upper bounds of a histogram"""
        with self._lock:
            self._sweep()
            family = self._ref(number, "create").family
            bounds = _bounds(family, buckets)
            key = _labels(labels)
            metric = family.metrics.get(key)
            if metric is None:
                self._check_room()
                metric = family.metrics[key] = _Metric(bounds, [0] * (len(bounds) + 1))
            metric.n_holders += 1
            return self._add_ref(_MetricRef(family, key))

    def change(self, operation: str, number: int, value: float) -> float:
        """Apply increment, set, observe or value, and return the metric's value."""
        with self._lock:
            ref = self._ref(number, operation)
            assert ref.labels is not None, "a family has no value"
            family, metric = ref.family, ref.family.metrics[ref.labels]
            allowed = {"COUNTER": ("increment", "value"), "GAUGE": ("increment", "set", "value"),
                       "HISTOGRAM": ("observe",)}  # fmt: skip
            if operation not in allowed[family.kind]:
                which = f"TRITONSERVER_METRIC_KIND_{family.kind} does not support {operation.capitalize()}"
                raise StatusError(Code.UNSUPPORTED, which)
            if family.kind == "COUNTER" and not value >= 0:
                raise invalid(
                    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
                )
            if operation == "set":
                metric.value = value
            elif operation == "increment":
                metric.value += value
            elif operation == "observe":
                metric.n_in[bisect.bisect_left(metric.bounds, value)] += 1
                metric.value += value
            return metric.value

    def drop(self, number: int) -> None:
        """Release a family or metric; callable from destructors."""
        self._dropped.append(number)

    def collect(self) -> list[MetricFamily]:
        """Return all families that have metrics."""
        with self._lock:
            self._sweep()
            return [_collected(family) for family in self._families.values() if family.metrics]

    def _ref(self, number: int, operation: str) -> _MetricRef:
        ref = self._refs.get(number)
        if ref is None:
            raise StatusError(Code.INTERNAL, f"Could not {operation} metric value. Metric has been invalidated.")
        return ref

    def _add_ref(self, ref: _MetricRef) -> int:
        number = next(self._numbers)
        self._refs[number] = ref
        return number

    def _check_room(self) -> None:
        if len(self._families) + sum(len(family.metrics) for family in self._families.values()) >= _MAX_METRICS:
            raise StatusError(
                Code.UNAVAILABLE, f"models of this server have {_MAX_METRICS} metrics, more are not supported"
            )

    def _sweep(self) -> None:
        while self._dropped:
            ref = self._refs.pop(self._dropped.popleft(), None)
            if ref is None:
                continue
            family = ref.family
            if ref.labels is None:
                family.n_holders -= 1
                if not family.n_holders:
                    del self._families[family.name]
                continue
            family.metrics[ref.labels].n_holders -= 1
            if not family.metrics[ref.labels].n_holders:
                del family.metrics[ref.labels]


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
            message = f"Parameter [{name}] must have a type of TRITONSERVER_PARAMETER_STRING to be added as a label."
            raise invalid(message)
        if not _LABEL.fullmatch(name) or name == "le" or max(len(name), len(value)) > _MAX_LENGTH:
            raise invalid(f"Invalid label name '{name:.80}', or a value of more than {_MAX_LENGTH} characters")
    return tuple(sorted(labels.items()))


def _collected(family: _Family) -> MetricFamily:
    collected = MetricFamily(family.name, family.kind.lower(), family.description)
    for labels, metric in family.metrics.items():
        text = label_text(dict(labels))
        if family.kind != "HISTOGRAM":
            collected.add(metric.value, text)
            continue
        collected.add(sum(metric.n_in), text, "_count")
        collected.add(metric.value, text, "_sum")
        n = 0
        for bound, n_in in zip((*metric.bounds, math.inf), metric.n_in, strict=True):
            n += n_in
            collected.add(n, label_text({**dict(labels), "le": number_text(bound).removesuffix(".0")}), "_bucket")
    return collected
