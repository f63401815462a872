"""Prometheus metrics under the names that vLLM's dashboards know (`vllm:`), and a few of our own (`millrace:`).

Counters and gauges are read from the engine loop on each scrape; histograms are filled as answers complete. The two
tokens of the warm-up are counted, too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from millrace.engine.executor import ExecutorLimits
from millrace.runtime.loop_stats import LoopStats, TierStats, WindowStats
from millrace.runtime.request.request import Timings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name",)
# buckets: vLLM's
TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)
# ours -> vLLM's, what it says, its buckets
_HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", "From arrival to the first token", TTFT_S),
    "itl": ("inter_token_latency_seconds", "Between two tokens of one answer", ITL_S),
    "e2e": ("e2e_request_latency_seconds", "From arrival to the last token", REQUEST_S),
    "queue": ("request_queue_time_seconds", "Waiting for the first step", REQUEST_S),
    "prefill": ("request_prefill_time_seconds", "First step to first token", REQUEST_S),
    "decode": ("request_decode_time_seconds", "First token to last", REQUEST_S),
    "inference": ("request_inference_time_seconds", "First step to last token", REQUEST_S),
    "prompt_tokens": ("request_prompt_tokens", "Tokens of a prompt", TOKENS),
    "generation_tokens": ("request_generation_tokens", "Tokens of all answers", TOKENS),
    "longest": ("request_max_num_generation_tokens", "Tokens of the longest answer", TOKENS),
    "per_token": ("request_time_per_output_token_seconds", "First token to last, by the tokens between", ITL_S),
    "params_n": ("request_params_n", "Answers asked for", CHOICES),
    "params_max_tokens": ("request_params_max_tokens", "max_tokens in effect", TOKENS),
}


class ServerMetrics:
    """One registry for one server; nothing is shared with the process's default registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._histograms = {
            ours: Histogram(f"vllm:{name}", help_text, LABELS, buckets=buckets, registry=self.registry)
            for ours, (name, help_text, buckets) in _HISTOGRAMS.items()
        }
        self._http = Counter(
            "millrace:http_requests",
            "HTTP requests by route and status; 499: the client went away",
            ("path", "status"),
            registry=self.registry,
        )
        self._http_classes = Counter(  # the name and labels of the instrumentation that vLLM uses
            "http_requests",
            "HTTP requests by route, method and class of status, such as 2xx",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes, process_open_fds, ...
        self._answered: dict[tuple[str, str, int], tuple[Counter, Counter]] = {}  # looked up once
        self._texts: list[Callable[[], str]] = []
        self._models = _Models()
        self.registry.register(self._models)

    def for_model(self, model_name: str) -> "ModelMetrics":
        """Return the histograms of a model."""
        return ModelMetrics(**{ours: histogram.labels(model_name) for ours, histogram in self._histograms.items()})

    def add(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add a source of a model's own metrics, which is called on each scrape."""
        self._models.sources.append(collect)

    def add_text(self, source: Callable[[], str]) -> None:
        """Add a source of metrics that are already in Prometheus' text format."""
        self._texts.append(source)

    def count_response(self, path: str, method: str, status: int) -> None:
        """Count a response. path: a route's pattern, without values from clients, so that there are few"""
        counters = self._answered.get((path, method, status))
        if counters is None:
            counters = self._answered[path, method, status] = (
                self._http.labels(path, str(status)),
                self._http_classes.labels(path, method, f"{status // 100}xx"),
            )
        for counter in counters:
            counter.inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry) + "".join(source() for source in self._texts).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """The histograms of one model."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    longest: Histogram
    per_token: Histogram
    params_n: Histogram
    params_max_tokens: Histogram

    def observe_finished(self, timings: Timings, n_prompt: int, n: int, max_tokens: int, longest: int) -> None:
        """Record an engine request that ended regularly. timings: by the engine's clock

        longest: tokens of its longest answer
        """
        first, token, last = timings.first_scheduled_s, timings.first_token_s, timings.last_token_s
        if first is not None and token is not None and last is not None:
            self.queue.observe(first - timings.queued_s)
            self.prefill.observe(token - first)
            self.decode.observe(last - token)
            self.inference.observe(last - first)
            self.per_token.observe((last - token) / (longest - 1) if longest > 1 else 0.0)
        self.longest.observe(longest)
        self.prompt_tokens.observe(n_prompt)
        self.generation_tokens.observe(timings.n_output_tokens)
        self.params_n.observe(n)
        self.params_max_tokens.observe(max_tokens)


class _Models(Collector):
    """Collector of all models' metrics; those of one name form one family with a line for each model."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[Metric]]] = []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in (metric for source in self.sources for metric in source()):
            if metric.name in families:
                families[metric.name].samples += metric.samples
            else:
                families[metric.name] = metric
        yield from families.values()


def engine_metrics(model: str, stats: LoopStats, limits: ExecutorLimits) -> Iterator[Metric]:
    """Yield the current metrics of a language model's engine loop."""
    used = max(n / max(1, n_all) for n, n_all in _used_pages(stats))
    yield gauge(model, "vllm:num_requests_running", "Sequences that hold KV pages", stats.running)
    yield gauge(
        model,
        "vllm:num_requests_waiting",
        "Sequences that wait for their first step, or for pages again",
        stats.waiting,
    )
    help_text = "Fraction of KV pages in use (1 = full); the fullest cache group if there are several"
    yield gauge(model, "vllm:kv_cache_usage_perc", help_text, used)
    yield counter(
        model, "vllm:prompt_tokens", "Prompt tokens, computed or found in the prefix cache", stats.prompt_tokens_total
    )
    yield counter(model, "vllm:generation_tokens", "Tokens generated", stats.generation_tokens_total)
    yield counter(model, "vllm:num_preemptions", "Sequences preempted", stats.preemptions_total)
    help_text = "Prompt tokens looked up in the prefix cache"
    yield counter(model, "vllm:prefix_cache_queries", help_text, stats.prefix_queries_total)
    help_text = "Prompt tokens found in the prefix cache, and so not computed"
    yield counter(model, "vllm:prefix_cache_hits", help_text, stats.prefix_hits_total)
    yield _finish_reasons(model, stats)
    yield _iterations(model, stats)
    yield _config(model, limits)
    yield gauge(model, "millrace:kv_pages_used", "KV pages in use", stats.pages_used)
    help_text = "KV pages that are free, but kept: a prompt that begins as they do finds them"
    yield gauge(model, "millrace:kv_pages_kept", help_text, stats.pages_kept)
    help_text = "KV pages in use that prompts pinned"
    yield gauge(model, "millrace:kv_pages_pinned", help_text, stats.pages_pinned)
    help_text = "KV pages whose content was given up for others"
    yield counter(model, "millrace:kv_pages_evicted", help_text, stats.pages_evicted_total)
    if stats.windows:
        yield from _window_metrics(model, stats.windows)
    if stats.tier is not None:
        yield from _tier_metrics(model, stats.tier)
    yield gauge(model, "millrace:engine_healthy", "1 while the engine loop runs", stats.healthy)
    silent_s = 0.0 if stats.idle else stats.last_step_s
    yield gauge(model, "millrace:engine_silent_seconds", "Since the last step; 0 when idle", silent_s)


def _used_pages(stats: LoopStats) -> list[tuple[int, int]]:
    """Return pages in use and all pages: of the caches without a window, then of each window."""
    return [(stats.pages_used, stats.pages_total), *((w.pages_used, w.pages_total) for w in stats.windows)]


def _window_metrics(model: str, windows: tuple[WindowStats, ...]) -> Iterator[Metric]:
    labels = (*LABELS, "window")
    used = GaugeMetricFamily(
        "millrace:kv_window_pages_used", "KV pages in use, of layers with this window", labels=labels
    )
    help_text = "KV pages of layers with this window that are free, but kept for prompts to find"
    cached = GaugeMetricFamily("millrace:kv_window_pages_kept", help_text, labels=labels)
    for window in windows:
        used.add_metric((model, str(window.tokens)), window.pages_used)
        cached.add_metric((model, str(window.tokens)), window.pages_kept)
    yield from (used, cached)


def _tier_metrics(model: str, tier: TierStats) -> Iterator[Metric]:
    yield gauge(model, "millrace:kv_tier_pages", "KV pages that the second tier's files hold", tier.pages)
    yield gauge(model, "millrace:kv_tier_bytes", "Of the second tier's two files", tier.bytes)
    yield counter(model, "millrace:kv_tier_stored", "KV pages written to the second tier", tier.stored_total)
    yield counter(model, "millrace:kv_tier_found", "KV pages that came back from there", tier.found_total)
    help_text = "Records of KV pages that were damaged, and so left out"
    yield counter(model, "millrace:kv_tier_damaged", help_text, tier.damaged_total)
    help_text = "KV pages that were not written: too many at a time, or the disk refused them"
    yield counter(model, "millrace:kv_tier_dropped", help_text, tier.dropped_total)


def decode_metrics(model: str, bound_s: float, step_s: float | None) -> Iterator[Metric]:
    """Yield the roofline's bound of a decode step and its measured time. step_s: None before the first step"""
    help_text = "Least time of a decode step of what runs now, by this machine's measured roofline"
    yield gauge(model, "millrace:decode_step_bound_seconds", help_text, bound_s)
    if step_s is not None:
        help_text = "Measured time of a decode step, without prompt tokens; smoothed"
        yield gauge(model, "millrace:decode_step_seconds", help_text, step_s)


def step_metrics(model: str, measured_s: float, predicted_s: float) -> Iterator[Metric]:
    """Yield the measured time of a step and the time that its profile predicts."""
    yield gauge(model, "millrace:step_seconds", "Measured time of a step, mean of the last 256", measured_s)
    help_text = "The same by the profile that was given, of the very same steps"
    yield gauge(model, "millrace:step_predicted_seconds", help_text, predicted_s)


def gauge(model: str, name: str, help_text: str, value: float) -> Metric:
    """Return one model's gauge; `_Models` merges those of several models into one family."""
    return _with_value(GaugeMetricFamily(name, help_text, labels=LABELS), model, value)


def counter(model: str, name: str, help_text: str, value: float) -> Metric:
    """Return one model's counter."""
    return _with_value(CounterMetricFamily(name, help_text, labels=LABELS), model, value)


def _with_value(family: GaugeMetricFamily | CounterMetricFamily, model: str, value: float) -> Metric:
    family.add_metric((model,), float(value))
    return family


def _finish_reasons(model: str, stats: LoopStats) -> Metric:
    family = CounterMetricFamily(
        "vllm:request_success", "Answers that came to their end", labels=(*LABELS, "finished_reason")
    )
    for reason, count in stats.finished_total.items():
        family.add_metric((model, reason.value), count)
    return family


def _iterations(model: str, stats: LoopStats) -> Metric:
    """Return the histogram of tokens per step; sum and count are exact, but the loop has no buckets."""
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed per engine step", labels=LABELS)
    family.add_metric((model,), [("+Inf", stats.steps_total)], stats.step_tokens_total)
    return family


def _config(model: str, limits: ExecutorLimits) -> Metric:
    labels = (*LABELS, "block_size", "num_gpu_blocks")  # vLLM's words for tokens per page and pages
    family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's shape", labels=labels)
    family.add_metric((model, str(limits.page_tokens), str(limits.n_pages)), 1.0)
    return family
