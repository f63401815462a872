"""Objects shared by all models of a repository: metrics configuration, cache, tracer, rate limiter, log settings."""

from dataclasses import dataclass, field

from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.log_settings import LogSettings
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.metrics.metrics_config import MetricsConfig
from millrace.model_repository.request.response_cache import LocalResponseCache
from millrace.model_repository.scheduling.rate_limiter import InstanceRateLimiter
from millrace.model_repository.tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class RepositoryContext:
    """Shared objects. cache, limiter: None if not configured"""

    metrics_config: MetricsConfig = field(default_factory=MetricsConfig)
    cache: LocalResponseCache | None = None
    tracer: Tracer = field(default_factory=Tracer)
    limiter: InstanceRateLimiter | None = None
    log: LogSettings = field(default_factory=LogSettings)

    def unused_settings(self, config: ModelConfig) -> list[str]:
        """Return notes on settings of a configuration that have no effect on this server."""
        notes = []
        if config.response_cache and config.response_cache.enable and self.cache is None:
            notes.append("response_cache is not used without --cache-config local,size=N")
        if self.limiter is None and any(g.rate_limiter and g.rate_limiter.resources for g in config.instance_group):
            notes.append("rate_limiter is not used without --rate-limit execution_count")
        return notes

    @classmethod
    def from_flags(cls, flags: OperationFlags, tracer: Tracer | None = None) -> "RepositoryContext":
        """Create the shared objects from flags. raises ConfigError"""
        return cls(
            MetricsConfig.from_flags(flags.metrics_config),
            LocalResponseCache.from_flags(flags.cache_config),
            tracer or Tracer(),
            InstanceRateLimiter.from_flags(flags.rate_limit, flags.rate_limit_resource),
        )
