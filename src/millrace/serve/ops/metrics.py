"""Prometheus metrics under the names that vLLM's dashboards know (`vllm:`), and a few of our own (`millrace:`).

Counters and gauges are read from the engine loop on each scrape; histograms are filled as answers complete. The two
tokens of the warm-up are counted, too.
"""

import math
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.engine.executor import ExecutorLimits
from millrace.prometheus import Counter, CounterValue, Histogram, HistogramValue, MetricFamily, label_text, metrics_text
from millrace.runtime.loop_stats import LoopStats, TierStats, WindowStats
from millrace.runtime.request.request import Timings

LABEL = "model_name"
_PROC = Path("/proc")
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
    """The metrics of one server. Everything here runs in its event loop."""

    def __init__(self) -> None:
        self._histograms = {
            ours: Histogram(f"vllm:{name}", help_text, LABEL, buckets)
            for ours, (name, help_text, buckets) in _HISTOGRAMS.items()
        }
        self._http = Counter(
            "millrace:http_requests",
            "HTTP requests by route and status; 499: the client went away",
            ("path", "status"),
        )
        self._http_classes = Counter(  # the name and labels of the instrumentation that vLLM uses
            "http_requests",
            "HTTP requests by route, method and class of status, such as 2xx",
            ("handler", "method", "status"),
        )
        self._answered: dict[tuple[str, str, int], tuple[CounterValue, CounterValue]] = {}  # looked up once
        self._sources: list[Callable[[], Iterable[MetricFamily]]] = [
            *(histogram.families for histogram in self._histograms.values()),
            self._http.families, self._http_classes.families, process_metrics,
        ]  # fmt: skip

    def for_model(self, model_name: str) -> "ModelMetrics":
        """Return the histograms of a model."""
        return ModelMetrics(**{ours: histogram.labels(model_name) for ours, histogram in self._histograms.items()})

    def add(self, collect: Callable[[], Iterable[MetricFamily]]) -> None:
        """Add a source of metrics, which is called on each scrape; families of several sources are joined by name."""
        self._sources.append(collect)

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
        return metrics_text(family for collect in self._sources for family in collect()).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """The histograms of one model."""

    ttft: HistogramValue
    itl: HistogramValue
    e2e: HistogramValue
    queue: HistogramValue
    prefill: HistogramValue
    decode: HistogramValue
    inference: HistogramValue
    prompt_tokens: HistogramValue
    generation_tokens: HistogramValue
    longest: HistogramValue
    per_token: HistogramValue
    params_n: HistogramValue
    params_max_tokens: HistogramValue

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


def engine_metrics(model: str, stats: LoopStats, limits: ExecutorLimits) -> Iterator[MetricFamily]:
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


def _window_metrics(model: str, windows: tuple[WindowStats, ...]) -> Iterator[MetricFamily]:
    used = MetricFamily("millrace:kv_window_pages_used", "gauge", "KV pages in use, of layers with this window")
    help_text = "KV pages of layers with this window that are free, but kept for prompts to find"
    cached = MetricFamily("millrace:kv_window_pages_kept", "gauge", help_text)
    for window in windows:
        labels = label_text({LABEL: model, "window": str(window.tokens)})
        used.add(window.pages_used, labels)
        cached.add(window.pages_kept, labels)
    yield from (used, cached)


def _tier_metrics(model: str, tier: TierStats) -> Iterator[MetricFamily]:
    yield gauge(model, "millrace:kv_tier_pages", "KV pages in the KV offload files", tier.pages)
    yield gauge(model, "millrace:kv_tier_bytes", "Size of the two KV offload files", tier.bytes)
    yield counter(model, "millrace:kv_tier_stored", "KV pages written to the KV offload files", tier.stored_total)
    yield counter(model, "millrace:kv_tier_found", "KV pages read back from the KV offload files", tier.found_total)
    help_text = "Records of KV pages that were damaged, and so left out"
    yield counter(model, "millrace:kv_tier_damaged", help_text, tier.damaged_total)
    help_text = "KV pages that were not written: too many at a time, or the disk refused them"
    yield counter(model, "millrace:kv_tier_dropped", help_text, tier.dropped_total)


def decode_metrics(model: str, bound_s: float, step_s: float | None) -> Iterator[MetricFamily]:
    """Yield the roofline's bound of a decode step and its measured time. step_s: None before the first step"""
    help_text = "Least time of a decode step of what runs now, by this machine's measured roofline"
    yield gauge(model, "millrace:decode_step_bound_seconds", help_text, bound_s)
    if step_s is not None:
        help_text = "Measured time of a decode step, without prompt tokens; smoothed"
        yield gauge(model, "millrace:decode_step_seconds", help_text, step_s)


def step_metrics(model: str, measured_s: float, predicted_s: float) -> Iterator[MetricFamily]:
    """Yield the measured time of a step and the time that its profile predicts."""
    yield gauge(model, "millrace:step_seconds", "Measured time of a step, mean of the last 256", measured_s)
    help_text = "The same by the profile that was given, of the very same steps"
    yield gauge(model, "millrace:step_predicted_seconds", help_text, predicted_s)


def process_metrics() -> Iterator[MetricFamily]:
    """Yield the metrics that Prometheus' client libraries have for a process; none if /proc cannot be read."""
    try:
        fields = (_PROC / "self" / "stat").read_text().rpartition(")")[2].split()  # from field 3 of proc(5) on
        boot = next(line for line in (_PROC / "stat").read_text().splitlines() if line.startswith("btime "))
        n_fds = sum(1 for _ in (_PROC / "self" / "fd").iterdir())
    except OSError:
        return
    ticks_per_s, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    user, system, started = (int(fields[i]) / ticks_per_s for i in (11, 12, 19))
    max_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for name, kind, help_text, value in (
        ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", int(fields[20])),
        ("resident_memory_bytes", "gauge", "Resident memory size in bytes.", int(fields[21]) * page_bytes),
        ("start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.",
         int(boot.split()[1]) + started),
        ("cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", user + system),
        ("open_fds", "gauge", "Number of open file descriptors.", n_fds),
        ("max_fds", "gauge", "Maximum number of open file descriptors.",
         math.inf if max_fds == resource.RLIM_INFINITY else max_fds),
    ):  # fmt: skip
        yield _family(f"process_{name}", kind, help_text, value)


def gauge(model: str, name: str, help_text: str, value: float) -> MetricFamily:
    """Return one model's gauge."""
    return _family(name, "gauge", help_text, value, {LABEL: model})


def counter(model: str, name: str, help_text: str, value: float) -> MetricFamily:
    """Return one model's counter. name: without `_total`"""
    return _family(f"{name}_total", "counter", help_text, value, {LABEL: model})


def _family(
    name: str, kind: str, help_text: str, value: float, labels: Mapping[str, str] | None = None
) -> MetricFamily:
    return MetricFamily(name, kind, help_text, [("", label_text(labels or {}), float(value))])


def _finish_reasons(model: str, stats: LoopStats) -> MetricFamily:
    family = MetricFamily("vllm:request_success_total", "counter", "Answers that came to their end")
    for reason, count in stats.finished_total.items():
        family.add(float(count), label_text({"finished_reason": reason.value, LABEL: model}))
    return family


def _iterations(model: str, stats: LoopStats) -> MetricFamily:
    """Return the histogram of tokens per step; sum and count are exact, but the loop has no buckets."""
    family = MetricFamily("vllm:iteration_tokens_total", "histogram", "Tokens computed per engine step")
    family.add(float(stats.steps_total), label_text({"le": "+Inf", LABEL: model}), "_bucket")
    family.add(float(stats.steps_total), label_text({LABEL: model}), "_count")
    family.add(float(stats.step_tokens_total), label_text({LABEL: model}), "_sum")
    return family


def _config(model: str, limits: ExecutorLimits) -> MetricFamily:
    # vLLM's words for tokens per page and pages
    labels = {LABEL: model, "block_size": str(limits.page_tokens), "num_gpu_blocks": str(limits.n_pages)}
    return _family("vllm:cache_config_info", "gauge", "The KV cache's shape", 1, labels)
