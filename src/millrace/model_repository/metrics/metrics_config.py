"""What of a model is measured and told on /metrics: `--metrics-config`, and a configuration's `model_metrics`."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import ConfigError, nearest
from millrace.model_repository.config.config_rules import FIRST_RESPONSE
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.metrics.duration_counters import BoundedHistogram, Histogram, RecentWindow, WholeUnits

FLAG = "--metrics-config"
_SWITCHES = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0)  # Triton's
Measured = Histogram | RecentWindow


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Triton's words; histograms are on here, as nothing is saved without them, unless counters are off."""

    counter_latencies: bool = True
    histogram_latencies: bool = True
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)

    @classmethod
    def of(cls, said: Sequence[str]) -> "MetricsConfig":
        """raises ConfigError"""
        found: dict[str, bool | tuple[float, ...]] = {}
        for one in said:
            key, equals, value = one.partition("=")
            if not equals or key not in cls.__dataclass_fields__:
                expected = "KEY=VALUE, " + nearest(key, cls.__dataclass_fields__)
                raise ConfigError(f"{FLAG} is {one!r:.100}", expected, "histogram_latencies=false, for one")
            if key in found:
                raise ConfigError(f"{FLAG} says {key} twice", "once", "leave one out")
            found[key] = _quantiles(value) if key == "summary_quantiles" else _switch(key, value)
        if found.get("counter_latencies") is False:  # a histogram's sum is the same counter
            found.setdefault("histogram_latencies", False)
        return cls(**found)  # type: ignore[arg-type]  # each is of its key's type

    def stage(self, family: str, config: ModelConfig) -> Measured:
        """For the durations that `family` tells as a histogram."""
        bounds = _bounds(config, family)
        histogram = BoundedHistogram(bounds, 1000) if bounds else Histogram()
        return RecentWindow(histogram) if self.summary_latencies else histogram

    def first_response(self, config: ModelConfig) -> Histogram:
        return WholeUnits(_bounds(config, FIRST_RESPONSE) or _FIRST_RESPONSE_MS, 1_000_000)


def _switch(key: str, value: str) -> bool:
    found = _SWITCHES.get(value.lower())
    if found is None:
        raise ConfigError(f"{FLAG} {key} is {value!r:.40}", "true or false", "write one of them")
    return found


def _quantiles(value: str) -> tuple[float, ...]:
    """0.5:0.05,0.9:0.01, as Triton writes them; the second number, an error, is 0 here."""
    try:
        found = tuple(float(one.partition(":")[0]) for one in value.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= q <= 1 for q in found):
        what = f"{FLAG} summary_quantiles is {value!r:.60}"
        raise ConfigError(what, "numbers from 0 to 1", "summary_quantiles=0.5,0.99")
    return found


def _bounds(config: ModelConfig, family: str) -> tuple[float, ...]:
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier and control.metric_identifier.family == family and control.histogram_options:
            return control.histogram_options.buckets
    return ()
