"""Configuration of model metrics: the flag `--metrics-config`, and `model_metrics` of a configuration."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import ConfigError, nearest
from millrace.model_repository.config.config_rules import FIRST_RESPONSE
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.metrics.duration_counters import (
    BoundedHistogram,
    DurationHistogram,
    RecentWindow,
    WholeUnitHistogram,
)

FLAG = "--metrics-config"
_SWITCHES = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0)  # Triton's
StageHistogram = DurationHistogram | RecentWindow


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Options with Triton's names. Unlike in Triton, histograms are on unless counters are off: they cost nothing."""

    counter_latencies: bool = True
    histogram_latencies: bool = True
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> "MetricsConfig":
        """Parse KEY=VALUE flags. raises ConfigError"""
        options: dict[str, bool | tuple[float, ...]] = {}
        for flag in flags:
            key, equals, value = flag.partition("=")
            if not equals or key not in cls.__dataclass_fields__:
                expected = "KEY=VALUE, " + nearest(key, cls.__dataclass_fields__)
                raise ConfigError(f"{FLAG} is {flag!r:.100}", expected, "histogram_latencies=false, for one")
            if key in options:
                raise ConfigError(f"{FLAG} says {key} twice", "once", "leave one out")
            options[key] = _quantiles(value) if key == "summary_quantiles" else _switch(key, value)
        if options.get("counter_latencies") is False:  # a histogram's sum would be the same counter
            options.setdefault("histogram_latencies", False)
        return cls(**options)  # type: ignore[arg-type]  # each is of its key's type

    def stage(self, family: str, config: ModelConfig) -> StageHistogram:
        """Create the counter for the durations of a histogram family."""
        bounds = _bounds(config, family)
        histogram = BoundedHistogram(bounds, 1000) if bounds else DurationHistogram()
        return RecentWindow(histogram) if self.summary_latencies else histogram

    def first_response(self, config: ModelConfig) -> DurationHistogram:
        return WholeUnitHistogram(_bounds(config, FIRST_RESPONSE) or _FIRST_RESPONSE_MS, 1_000_000)


def _switch(key: str, value: str) -> bool:
    is_on = _SWITCHES.get(value.lower())
    if is_on is None:
        raise ConfigError(f"{FLAG} {key} is {value!r:.40}", "true or false", "write one of them")
    return is_on


def _quantiles(value: str) -> tuple[float, ...]:
    """Parse Triton's form 0.5:0.05,0.9:0.01; the second number, an error bound, is ignored."""
    try:
        quantiles = tuple(float(pair.partition(":")[0]) for pair in value.split(","))
    except ValueError:
        quantiles = ()
    if not quantiles or not all(0 <= q <= 1 for q in quantiles):
        message = f"{FLAG} summary_quantiles is {value!r:.60}"
        raise ConfigError(message, "numbers from 0 to 1", "summary_quantiles=0.5,0.99")
    return quantiles


def _bounds(config: ModelConfig, family: str) -> tuple[float, ...]:
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier and control.metric_identifier.family == family and control.histogram_options:
            return control.histogram_options.buckets
    return ()
