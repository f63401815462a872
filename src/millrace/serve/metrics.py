"""Prometheus metrics under the names that vLLM's dashboards know (`vllm:`), and a few of our own (`millrace:`).

Counters and gauges are read from the engine loop when somebody asks; histograms are filled as answers come in. The
warm-up's two tokens are counted too.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from millrace.engine.executor import ExecutorLimits
from millrace.runtime.request import Timings
from millrace.runtime.stats import LoopStats

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


class Metrics:
    """One registry for one server; nothing is shared with the process's default registry."""

    def __init__(self, model_name: str, stats: Callable[[], LoopStats], limits: ExecutorLimits) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model_name
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two tokens of one answer", ITL_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", REQUEST_S)
        self.queue = self._histogram("request_queue_time_seconds", "Waiting for the first step", REQUEST_S)
        self.prefill = self._histogram("request_prefill_time_seconds", "First step to first token", REQUEST_S)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last", REQUEST_S)
        self.inference = self._histogram("request_inference_time_seconds", "First step to last token", REQUEST_S)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens of all answers", TOKENS)
        self.longest = self._histogram("request_max_num_generation_tokens", "Tokens of the longest answer", TOKENS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "First token to last, by the tokens between", ITL_S
        )
        self.params_n = self._histogram("request_params_n", "Answers asked for", CHOICES)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens in effect", TOKENS)
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
        self.registry.register(_EngineCollector(model_name, stats, limits))

    def answered(self, path: str, method: str, status: int) -> None:
        """`path` is a route's pattern, never what a client wrote, so that there are few."""
        self._http.labels(path, str(status)).inc()
        self._http_classes.labels(path, method, f"{status // 100}xx").inc()

    def finished(self, timings: Timings, n_prompt: int, n: int, max_tokens: int, longest: int) -> None:
        """One request of the engine came to its regular end. `timings` are the engine clock's.

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

    def text(self) -> bytes:
        """In Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help_text, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)


class _EngineCollector(Collector):
    """The engine loop's own counters, at the moment of asking."""

    def __init__(self, model_name: str, stats: Callable[[], LoopStats], limits: ExecutorLimits) -> None:
        self._model, self._stats, self._limits = model_name, stats, limits

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = stats.pages_used / max(1, stats.pages_total)
        yield self._gauge("vllm:num_requests_running", "Sequences that hold KV pages", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for their first step", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use; 1 is all", used)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens computed", stats.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", "Tokens generated", stats.generation_tokens_total)
        yield self._counter("vllm:num_preemptions", "Sequences preempted", stats.preemptions_total)
        yield self._finished(stats)
        yield self._iterations(stats)
        yield self._config()
        yield self._gauge("millrace:kv_pages_used", "KV pages in use", stats.pages_used)
        yield self._gauge("millrace:engine_healthy", "1 while the engine loop runs", stats.healthy)
        silent_s = 0.0 if stats.idle else stats.last_step_s
        yield self._gauge("millrace:engine_silent_seconds", "Since the last step; 0 when idle", silent_s)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=LABELS)
        family.add_metric((self._model,), float(value))
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=LABELS)
        family.add_metric((self._model,), float(value))
        return family

    def _finished(self, stats: LoopStats) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Answers that came to their end", labels=(*LABELS, "finished_reason")
        )
        for reason, count in stats.finished_total.items():
            family.add_metric((self._model, reason.value), count)
        return family

    def _iterations(self, stats: LoopStats) -> Metric:
        """Sum and count are exact; the loop keeps no buckets."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed per engine step", labels=LABELS)
        family.add_metric((self._model,), [("+Inf", stats.steps_total)], stats.step_tokens_total)
        return family

    def _config(self) -> Metric:
        labels = (*LABELS, "block_size", "num_gpu_blocks")  # vLLM's words for tokens per page and pages
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's shape", labels=labels)
        family.add_metric((self._model, str(self._limits.page_tokens), str(self._limits.n_pages)), 1.0)
        return family
