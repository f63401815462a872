"""What all models of one repository have in common."""

from dataclasses import dataclass, field

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.log_settings import LogSwitches
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.metrics.metrics_config import MetricsConfig
from millrace.model_repository.request.response_cache import ResponseCache
from millrace.model_repository.scheduling.rate_limiter import RateLimiter
from millrace.model_repository.tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class RepositoryContext:
    """cache, limiter: None where there is none"""

    measures: MetricsConfig = field(default_factory=MetricsConfig)
    cache: ResponseCache | None = None
    tracer: Tracer = field(default_factory=Tracer)
    limiter: RateLimiter | None = None
    log: LogSwitches = field(default_factory=LogSwitches)

    def unused(self, config: ModelConfig) -> list[str]:
        """What a model's configuration says, and this server does not do."""
        found = []
        if config.response_cache and config.response_cache.enable and self.cache is None:
            found.append("response_cache is not used without --cache-config local,size=N")
        if self.limiter is None and any(g.rate_limiter and g.rate_limiter.resources for g in config.instance_group):
            found.append("rate_limiter is not used without --rate-limit execution_count")
        return found

    @classmethod
    def of(cls, flags: OperationFlags, tracer: Tracer | None = None) -> "RepositoryContext":
        """raises ConfigError"""
        return cls(
            MetricsConfig.of(flags.metrics_config),
            ResponseCache.of(flags.cache_config),
            tracer or Tracer(),
            RateLimiter.of(flags.rate_limit, flags.rate_limit_resource),
        )
