"""Command-line flags for operating tensor models, with Triton's names and syntax."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class OperationFlags(Settings):
    """Flags for metrics, rate limiting and the response cache of tensor models."""

    title: ClassVar = "Model repository (Triton)"

    metrics_config: tuple[str, ...] = setting(
        (), "metrics of tensor models, e.g. summary_latencies=true",
        metavar="KEY=VALUE",
    )  # fmt: skip
    rate_limit: str = setting(
        "off", "let instances share the resources that their rate_limiter names", choices=("off", "execution_count")
    )
    rate_limit_resource: tuple[str, ...] = setting(
        (), "with execution_count: available count of a resource; default: the largest count that any instance needs",
        metavar="NAME:COUNT",
    )  # fmt: skip
    cache_config: tuple[str, ...] = setting(
        (), "response cache for models with response_cache { enable: true }, e.g. local,size=64M",
        metavar="NAME,KEY=VALUE",
    )  # fmt: skip
