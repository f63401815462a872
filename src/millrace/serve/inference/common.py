"""What all models of one repository have in common."""

from dataclasses import dataclass, field

from millrace.serve.inference.cache import ResponseCache
from millrace.serve.inference.measures import Measures
from millrace.serve.inference.operations import OperationFlags


@dataclass(frozen=True, slots=True)
class Common:
    measures: Measures = field(default_factory=Measures)
    cache: ResponseCache | None = None

    @classmethod
    def of(cls, flags: OperationFlags) -> "Common":
        """raises ConfigError"""
        return cls(
            Measures.of(flags.metrics_config),
            ResponseCache.of(flags.cache_config),
        )
