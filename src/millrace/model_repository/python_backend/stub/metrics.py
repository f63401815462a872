"""`pb_utils.MetricFamily` and its metrics, kept by the server and exported while the model holds them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .bytes_tensors import text
from .errors import TritonModelException
from .host_interface import Host
from .requests import current_host


class ModelMetric:
    """A metric, created by `MetricFamily.Metric`."""

    def __init__(self, host: Host, family: "MetricFamily", number: int) -> None:
        self._host, self._family, self._number = host, family, number  # keeps the family alive

    def increment(self, value: float) -> None:
        """Increment the metric. raises TritonModelException, as all of these do"""
        self._do("increment", value, "Failed to increment metric value")

    def set(self, value: float) -> None:
        self._do("set", value, "Failed to set metric value")

    def observe(self, value: float) -> None:
        self._do("observe", value, "Failed to observe metric value")

    def value(self) -> float:
        return float(self._do("value", 0.0, "Failed to get metric value"))

    def _do(self, operation: str, value: float, failed: str) -> Any:
        try:
            return self._host.metric(operation, number=self._number, value=float(value))
        except TritonModelException as error:
            raise TritonModelException(f"{failed}: {error}") from None

    def __del__(self) -> None:
        if "_number" in self.__dict__:
            self._host.metric("drop", number=self._number)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)
    _bound: ClassVar[Host | None] = None

    def __init__(self, name: str, description: str, kind: int) -> None:
        """raises TritonModelException"""
        self._host = current_host(self._bound, "a metric")
        try:
            arguments = {"name": text(name), "description": text(description), "kind": int(kind)}
            self._number = self._host.metric("family", **arguments)
        except TritonModelException as error:
            raise TritonModelException(f"Error when creating MetricFamily: {error}") from None

    def Metric(  # noqa: N802  Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> ModelMetric:
        """Create a metric. buckets: upper bounds of a histogram. raises TritonModelException"""
        try:
            bounds = None if buckets is None else [float(bound) for bound in buckets]
            number = self._host.metric("metric", family=self._number, labels=dict(labels or {}), buckets=bounds)
        except TritonModelException as error:
            raise TritonModelException(f"Error when creating Metric: {error}") from None
        return ModelMetric(self._host, self, number)

    def __del__(self) -> None:
        if "_number" in self.__dict__:
            self._host.metric("drop", number=self._number)
