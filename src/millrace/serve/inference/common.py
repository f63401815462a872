"""What all models of one repository have in common."""

from dataclasses import dataclass, field

from millrace.serve.inference.cache import ResponseCache
from millrace.serve.inference.limiter import RateLimiter
from millrace.serve.inference.measures import Measures
from millrace.serve.inference.operations import OperationFlags
from millrace.serve.inference.tracing import Tracer
from millrace.serve.log_switches import LogSwitches


@dataclass(frozen=True, slots=True)
class Common:
    """cache, limiter: None where there is none"""

    measures: Measures = field(default_factory=Measures)
    cache: ResponseCache | None = None
    tracer: Tracer = field(default_factory=Tracer)
    limiter: RateLimiter | None = None
    log: LogSwitches = field(default_factory=LogSwitches)

    @classmethod
    def of(cls, flags: OperationFlags) -> "Common":
        """raises ConfigError"""
        return cls(
            Measures.of(flags.metrics_config),
            ResponseCache.of(flags.cache_config),
            Tracer.of(flags.trace_config),
            RateLimiter.of(flags.rate_limit, flags.rate_limit_resource),
        )
