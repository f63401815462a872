"""Triton's metrics of tensor models and of the machine, with Triton's names and labels."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from millrace.model_repository.config.config_rules import FIRST_RESPONSE, HISTOGRAMS
from millrace.model_repository.metrics.duration_counters import DurationHistogram, RecentWindow
from millrace.model_repository.metrics.metrics_config import MetricsConfig
from millrace.model_repository.metrics.statistics import REASONS
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.response_cache import LocalResponseCache
from millrace.model_repository.request.status_code import StatusError
from millrace.prometheus import MetricFamily, label_text

_STAT, _MEMORY = Path("/proc/stat"), Path("/proc/meminfo")


class _Sample(NamedTuple):
    """A sample. suffix: appended to the family's name. more: further formatted labels"""

    value: float
    more: str = ""
    suffix: str = ""


_Samples = Callable[[Model], Iterable[_Sample]]


def _stage(name: str, *, quantity: str = "us") -> _Samples:
    def samples(model: Model) -> Iterator[_Sample]:
        duration = model.statistics.stages[name]
        yield _Sample(duration.count if quantity == "count" else duration.ns // 1000)

    return samples


def _failures(model: Model) -> Iterator[_Sample]:
    for reason in REASONS:
        yield _Sample(model.statistics.failures[reason], f',reason="{reason}"')


def _ready(model: Model) -> Iterator[_Sample]:
    try:
        is_ready = model.is_ready and not model.unready_reason
    except StatusError:  # a member of an ensemble is no longer served
        is_ready = False
    yield _Sample(int(is_ready))


def _cached(name: str, *, quantity: str = "us") -> _Samples:
    """Return samples of a cache stage, only for models with a cache."""
    stage_samples = _stage(name, quantity=quantity)
    return lambda model: stage_samples(model) if model.cache is not None else ()


def _closed(model: Model) -> Iterator[_Sample]:
    for closed, n in model.statistics.close_reasons.items():
        yield _Sample(n, f',closed="{closed.value}"')


def _histogram(name: str) -> _Samples:
    return lambda model: _distribution(model.statistics.stages[name], 1000)


def _first_responses(model: Model) -> Iterable[_Sample]:
    histogram = model.statistics.first_response
    return _distribution(histogram, 1_000_000) if histogram is not None else ()


def _distribution(histogram: object, unit_ns: int) -> Iterator[_Sample]:
    """Yield a histogram's samples. unit_ns: nanoseconds per unit of bounds and sum"""
    assert isinstance(histogram, DurationHistogram | RecentWindow), "a stage that is told as a histogram is one"
    n = histogram.count
    for bound, n_up_to in histogram.cumulative():
        yield _Sample(n_up_to, f',le="{bound}"', "_bucket")
    yield _Sample(n, ',le="+Inf"', "_bucket")
    quotient, rest = divmod(histogram.ns, unit_ns)
    yield _Sample(histogram.ns / unit_ns if rest else quotient, suffix="_sum")
    yield _Sample(n, suffix="_count")


def _summary(name: str, measures: MetricsConfig) -> _Samples:
    def samples(model: Model) -> Iterator[_Sample]:
        if name in _CACHED and model.cache is None:
            return
        window = model.statistics.stages[name]
        assert isinstance(window, RecentWindow), "summaries were asked for"
        for quantile, us in window.quantiles(measures.summary_quantiles):
            yield _Sample(us, f',quantile="{quantile:g}"')
        yield _Sample(window.ns / 1000, suffix="_sum")
        yield _Sample(window.count, suffix="_count")

    return samples


_CACHED = ("cache_hit", "cache_miss")
_Family = tuple[str, str, str, _Samples]  # name, type, help text, samples of a model
_WORDS = {"success": "request", "queue": "queue", "compute_input": "compute_input", "compute_infer": "compute_infer",
          "compute_output": "compute_output"}  # fmt: skip


_COUNTS: tuple[_Family, ...] = (
    ("nv_inference_request_success", "counter", "Number of successful inference requests, all batch sizes",
     _stage("success", quantity="count")),
    ("nv_inference_request_failure", "counter", "Number of failed inference requests, all batch sizes", _failures),
    ("nv_inference_count", "counter", "Number of inferences performed (does not include cached requests)",
     lambda m: [_Sample(m.statistics.n_inferences)]),
    ("nv_inference_exec_count", "counter", "Number of model executions performed (does not include cached requests)",
     lambda m: [_Sample(m.statistics.n_executions)]),
    ("nv_cache_num_hits_per_model", "counter", "Number of cache hits per model",
     _cached("cache_hit", quantity="count")),
    ("nv_cache_num_misses_per_model", "counter", "Number of cache misses per model",
     _cached("cache_miss", quantity="count")),
    ("nv_inference_pending_request_count", "gauge",
     "Instantaneous number of pending requests awaiting execution per-model.", lambda m: [_Sample(m.n_pending)]),
    ("nv_model_load_duration_secs", "gauge", "Model load time in seconds", lambda m: [_Sample(round(m.load_s, 6))]),
    ("millrace:model_ready", "gauge", "1 while all of its instances are there", _ready),
    ("millrace:batches_closed", "counter", "Batches, by why they had no more requests", _closed),
)  # fmt: skip


_LATENCIES: tuple[_Family, ...] = (
    ("nv_inference_request_duration_us", "counter",
     "Cumulative inference request duration in microseconds (includes cached requests)", _stage("success")),
    ("nv_inference_queue_duration_us", "counter",
     "Cumulative inference queuing duration in microseconds (includes cached requests)", _stage("queue")),
    ("nv_inference_compute_input_duration_us", "counter",
     "Cumulative compute input duration in microseconds (does not include cached requests)", _stage("compute_input")),
    ("nv_inference_compute_infer_duration_us", "counter",
     "Cumulative compute inference duration in microseconds (does not include cached requests)",
     _stage("compute_infer")),
    ("nv_inference_compute_output_duration_us", "counter",
     "Cumulative inference compute output duration in microseconds (does not include cached requests)",
     _stage("compute_output")),
    ("nv_cache_hit_duration_per_model", "counter",
     "Total cache hit duration per model, in microseconds", _cached("cache_hit")),
    ("nv_cache_miss_duration_per_model", "counter",
     "Total cache miss duration per model, in microseconds", _cached("cache_miss")),
)  # fmt: skip
_HISTOGRAMS: tuple[_Family, ...] = (
    *((family, "histogram", f"Distribution of the {_WORDS[stage]} duration in microseconds", _histogram(stage))
      for stage, family in HISTOGRAMS.items()),
    (FIRST_RESPONSE, "histogram", "Milliseconds to a decoupled model's first response", _first_responses),
)  # fmt: skip


def model_metrics(models: Iterable[Model], measures: MetricsConfig) -> Iterator[MetricFamily]:
    """Yield the metrics of all served versions, without families that have no sample."""
    labelled_models = [(model, _labels(model)) for model in models]
    for name, kind, help_text, samples in _families(measures):
        rows = [(s.suffix, labels + s.more, s.value) for model, labels in labelled_models for s in samples(model)]
        if rows:
            yield MetricFamily(name, kind, help_text, rows)


def failed_metrics(failed: Iterable[tuple[ModelId, int]]) -> Iterator[MetricFamily]:
    """Yield a metric for versions that failed to load, which `model_metrics` does not cover."""
    family = MetricFamily("millrace:model_load_failed", "gauge", "1 for each version that could not be loaded")
    for model_id, version in failed:
        family.add(1, label_text({**_name_labels(model_id.namespace, model_id.name), "version": str(version)}))
    if family.samples:
        yield family


def cache_metrics(cache: LocalResponseCache) -> Iterator[MetricFamily]:
    """Yield the metrics of the response cache."""
    gauges = (
        ("millrace:response_cache_bytes", "Of answers that are kept", cache.n_bytes),
        ("millrace:response_cache_size_bytes", "That they may have", cache.max_bytes),
        ("millrace:response_cache_answers", "Answers that are kept", len(cache)),
    )
    for name, help_text, value in gauges:
        yield MetricFamily(name, "gauge", help_text, [("", "", value)])


def _families(measures: MetricsConfig) -> Iterator[_Family]:
    yield from _COUNTS
    if measures.counter_latencies:
        yield from _LATENCIES
    if measures.histogram_latencies:
        yield from _HISTOGRAMS
    if measures.summary_latencies:
        names = {stage: f"nv_inference_{word}" for stage, word in _WORDS.items()} | {s: f"nv_{s}" for s in _CACHED}
        for stage, name in names.items():
            word = "request" if stage == "success" else stage
            help_text = f"Quantiles of the {word} duration in microseconds, of the last minute"
            yield f"{name}_summary_us", "summary", help_text, _summary(stage, measures)


def _labels(model: Model) -> str:
    tags = {f"_{name}": value for name, value in sorted(model.config.metric_tags.items())}
    return label_text({**_name_labels(model.namespace, model.name), "version": str(model.version), **tags})


def _name_labels(namespace: str, name: str) -> dict[str, str]:
    return ({"namespace": namespace} if namespace else {}) | {"model": name}


class MachineMetrics:
    """Machine metrics. Utilization covers the time since the previous call, at first since boot."""

    def __init__(self) -> None:
        self._busy = self._all = 0

    def collect(self) -> Iterator[MetricFamily]:
        total, free = _memory_bytes()
        gauges = (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization()),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", total - free),
        )
        for name, help_text, value in gauges:
            yield MetricFamily(name, "gauge", help_text, [("", "", value)])

    def _utilization(self) -> float:
        # user nice system idle iowait irq softirq steal; user includes guests
        ticks = [int(n) for n in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        n_all, n_busy = sum(ticks), sum(ticks) - ticks[3] - ticks[4]
        since = n_all - self._all
        busy_share = (n_busy - self._busy) / since if since > 0 else 0.0
        self._all, self._busy = n_all, n_busy
        return min(1.0, max(0.0, busy_share))


def _memory_bytes() -> tuple[int, int]:
    """Return total and available memory."""
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    return kib["MemTotal:"] * 1024, kib["MemAvailable:"] * 1024
