"""What one version of a model did, as /v2/models/M/stats and the metrics tell it. Only the event loop writes here."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.model_repository.config.config_rules import HISTOGRAMS
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.metrics.duration_counters import Duration, Histogram
from millrace.model_repository.metrics.metrics_config import Measured, MetricsConfig
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.scheduling.dynamic_batcher import Batch, Closed

STAGES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
COMPUTE = ("compute_input", "compute_infer", "compute_output")
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")  # of failures
_Stages = dict[str, Duration | Measured]
_Alone = tuple[int, int, int, int]  # when it came, when computing began and ended; its batch_size


def _durations() -> dict[str, Duration]:
    return {name: Duration() for name in COMPUTE}


@dataclass(slots=True)
class Statistics:
    """n_inferences counts the items of batches, n_executions the batches; closed: why batches had no more requests.

    first_response: of a decoupled model, from a request's arrival to its first answer
    alone: what is not counted yet, as `settle` does it in a third of the time for many; whoever reads settles before
    closed_alone: why a batch of one request of that size has no more
    """

    stages: _Stages
    first_response: Histogram | None = None
    n_inferences: int = 0
    n_executions: int = 0
    last_inference_ms: int = 0  # since 1970
    by_size: dict[int, dict[str, Duration]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    closed: Counter[Closed] = field(default_factory=Counter)
    alone: list[_Alone] = field(default_factory=list)
    closed_alone: Callable[[int], Closed] = lambda size: Closed.SINGLE

    @classmethod
    def of(cls, config: ModelConfig, measures: MetricsConfig, *, is_decoupled: bool) -> "Statistics":
        measured = {stage: measures.stage(family, config) for stage, family in HISTOGRAMS.items()}
        if measures.summary_latencies:
            measured |= {stage: measures.stage("", config) for stage in ("cache_hit", "cache_miss")}
        stages: _Stages = {stage: measured.get(stage) or Duration() for stage in STAGES}
        return cls(stages, measures.first_response(config) if is_decoupled else None)

    def answered(self, request: InferRequest, done_ns: int) -> None:
        """One request came to its regular end."""
        self.n_inferences += request.batch_size or 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.stages["success"].add(done_ns - request.received_ns)
        self.stages["queue"].add(request.started_ns - request.queued_ns)
        _add_computing(self.stages, request, done_ns)

    def answered_again(self, request: InferRequest, began_ns: int, done_ns: int) -> None:
        """Out of the cache, for which it was looked since `began_ns`: nothing was inferred."""
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.stages["success"].add(done_ns - request.received_ns)
        self.stages["queue"].add(0)
        self.stages["cache_hit"].add(done_ns - began_ns)

    def settle(self) -> None:
        """Count what was answered alone: `executed` and `answered` of batches of one that were begun as they came."""
        alone = self.alone[:]
        if not alone:
            return
        self.alone.clear()
        by_size: dict[int, list[_Alone]] = {}
        for one in alone:
            by_size.setdefault(one[3] or 1, []).append(one)
        for n_items, ones in by_size.items():
            self._computed(
                n_items, [began - came for came, began, _, _ in ones], [done - began for _, began, done, _ in ones]
            )
        ago_ns = time.monotonic_ns() - alone[-1][2]
        self.last_inference_ms = max(self.last_inference_ms, (time.time_ns() - ago_ns) // 1_000_000)

    def _computed(self, n_items: int, input_ns: Sequence[int], infer_ns: Sequence[int]) -> None:
        """Requests of so many items, each alone: the durations of each."""
        n = len(input_ns)
        self.n_inferences += n * n_items
        self.n_executions += n
        self.closed[self.closed_alone(n_items)] += n
        sized, nothing = self.by_size.setdefault(n_items, _durations()), [0] * n
        for stage, spent_ns in zip(COMPUTE, (input_ns, infer_ns, nothing), strict=True):
            self.stages[stage].add_all(spent_ns)
            sized[stage].add_all(spent_ns)
        self.stages["queue"].add_all(nothing)
        self.stages["success"].add_all([a + b for a, b in zip(input_ns, infer_ns, strict=True)])

    def failed(self, request: InferRequest, done_ns: int, reason: str) -> None:
        self.failures[reason] += 1
        self.stages["fail"].add(done_ns - request.received_ns)

    def executed(self, batch: Batch, done_ns: int) -> None:
        """One batch was computed."""
        self.n_executions += 1
        self.closed[batch.closed] += 1
        sized = self.by_size.get(batch.size)
        if sized is None:
            sized = self.by_size[batch.size] = _durations()
        _add_computing(sized, batch.requests[0], done_ns)

    def told(self, name: str, version: int) -> dict[str, Any]:
        """In the words of Triton's `model_stats`, and why batches closed."""
        self.settle()
        return {
            "name": name,
            "version": str(version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.n_inferences,
            "execution_count": self.n_executions,
            "inference_stats": {stage: duration.told() for stage, duration in self.stages.items()},
            "response_stats": {},
            "batch_stats": [
                {"batch_size": size, **{stage: duration.told() for stage, duration in stages.items()}}
                for size, stages in sorted(self.by_size.items())
            ],
            "memory_usage": [],
            "batch_closed": {closed.value: n for closed, n in self.closed.items()},
        }


def _add_computing(to: Mapping[str, Duration | Measured], request: InferRequest, done_ns: int) -> None:
    """Input, inference and output; a backend that does not tell them apart has only the second."""
    begin = request.computing_ns or request.started_ns
    end = request.computed_ns or done_ns
    to["compute_input"].add(begin - request.started_ns)
    to["compute_infer"].add(end - begin)
    to["compute_output"].add(done_ns - end)
