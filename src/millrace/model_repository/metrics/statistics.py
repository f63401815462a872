"""Statistics of a model version, for /v2/models/M/stats and metrics. Written only by the event loop."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.model_repository.config.config_rules import HISTOGRAMS
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.metrics.duration_counters import Duration, DurationHistogram
from millrace.model_repository.metrics.metrics_config import MetricsConfig, StageHistogram
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.scheduling.dynamic_batcher import Batch, CloseReason

STAGES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
COMPUTE = ("compute_input", "compute_infer", "compute_output")
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")  # of failures
_Stages = dict[str, Duration | StageHistogram]


def _durations() -> dict[str, Duration]:
    return {name: Duration() for name in COMPUTE}


@dataclass(slots=True)
class ModelStatistics:
    """Statistics. n_inferences counts items, n_executions batches. close_reasons: why batches were closed

    first_response: for a decoupled model, time from a request's arrival to its first response
    """

    stages: _Stages
    first_response: DurationHistogram | None = None
    n_inferences: int = 0
    n_executions: int = 0
    last_inference_ms: int = 0  # since 1970
    by_size: dict[int, dict[str, Duration]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    close_reasons: Counter[CloseReason] = field(default_factory=Counter)

    @classmethod
    def from_config(cls, config: ModelConfig, measures: MetricsConfig, *, is_decoupled: bool) -> "ModelStatistics":
        measured = {stage: measures.stage(family, config) for stage, family in HISTOGRAMS.items()}
        if measures.summary_latencies:
            measured |= {stage: measures.stage("", config) for stage in ("cache_hit", "cache_miss")}
        stages: _Stages = {stage: measured.get(stage) or Duration() for stage in STAGES}
        return cls(stages, measures.first_response(config) if is_decoupled else None)

    def record_success(self, request: InferRequest, done_ns: int) -> None:
        """Record a successful request."""
        self.n_inferences += request.batch_size or 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.stages["success"].add(done_ns - request.received_ns)
        self.stages["queue"].add(request.started_ns - request.queued_ns)
        _add_computing(self.stages, request, done_ns)

    def record_cache_hit(self, request: InferRequest, began_ns: int, done_ns: int) -> None:
        """Record a response from the cache; the lookup started at `began_ns`."""
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.stages["success"].add(done_ns - request.received_ns)
        self.stages["queue"].add(0)
        self.stages["cache_hit"].add(done_ns - began_ns)

    def record_failure(self, request: InferRequest, done_ns: int, reason: str) -> None:
        self.failures[reason] += 1
        self.stages["fail"].add(done_ns - request.received_ns)

    def record_batch(self, batch: Batch, done_ns: int) -> None:
        """Record a computed batch."""
        self.n_executions += 1
        self.close_reasons[batch.close_reason] += 1
        sized = self.by_size.get(batch.size)
        if sized is None:
            sized = self.by_size[batch.size] = _durations()
        _add_computing(sized, batch.requests[0], done_ns)

    def to_dict(self, name: str, version: int) -> dict[str, Any]:
        """Return Triton's `model_stats`, plus the close reasons of batches."""
        return {
            "name": name,
            "version": str(version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.n_inferences,
            "execution_count": self.n_executions,
            "inference_stats": {stage: duration.to_dict() for stage, duration in self.stages.items()},
            "response_stats": {},
            "batch_stats": [
                {"batch_size": size, **{stage: duration.to_dict() for stage, duration in stages.items()}}
                for size, stages in sorted(self.by_size.items())
            ],
            "memory_usage": [],
            "batch_closed": {closed.value: n for closed, n in self.close_reasons.items()},
        }


def _add_computing(stages: Mapping[str, Duration | StageHistogram], request: InferRequest, done_ns: int) -> None:
    """Add the input, inference and output times; a backend that does not separate them has only inference."""
    begin = request.computing_ns or request.started_ns
    end = request.computed_ns or done_ns
    stages["compute_input"].add(begin - request.started_ns)
    stages["compute_infer"].add(end - begin)
    stages["compute_output"].add(done_ns - end)
