"""Flags of `millrace serve`. This module imports little, because `--help` needs it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, cast

from millrace.errors import ConfigError
from millrace.runtime.scheduling.token_budget import DEFAULT_GAP_LIMIT_S
from millrace.runtime.settings import MAX_QUEUED, SCHEDULES
from millrace.serve.http.api_key_file import KeyFile
from millrace.serve.settings import ServerSettings
from millrace.settings import Settings, setting

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ListenFlags(Settings):
    """Network settings."""

    title: ClassVar = "Network"

    host: str = setting(ServerSettings.host, "address to listen on; 0.0.0.0: all interfaces")
    port: int = setting(ServerSettings.port, "port to listen on; 0: any free port", low=0, high=65535)
    reuse_port: bool = setting(
        False, "let several servers share --port and --grpc-port; the kernel distributes connections"
    )
    uds: str | None = setting(None, "Unix socket to listen on, in place of --host and --port", metavar="PATH")
    ssl_certfile: str | None = setting(None, "certificate (PEM); enables TLS, for gRPC too", metavar="FILE")
    ssl_keyfile: str | None = setting(None, "its key (PEM); default: in the same file", metavar="FILE")
    metrics_port: int | None = setting(
        None, "separate port for /metrics only; 0: any free port; default: none", low=0, high=65535
    )


@dataclass(frozen=True, kw_only=True)
class ServeFlags(Settings):
    """Server settings; with ListenFlags they become ServerSettings."""

    title: ClassVar = "Server"

    served_model_name: tuple[str, ...] = setting(
        (), "model name that clients use; repeat it for several; * stands for any characters (default: the model's own)"
    )
    api_key_file: str | None = setting(
        None,
        "file with API keys, one per line, and their limits; read again if it changes; default: no authentication",
        metavar="FILE",
    )
    share_prefix_cache: bool = setting(ServerSettings.share_prefix_cache, "share the prefix cache between API keys")
    cors_origin: tuple[str, ...] = setting((), "allowed CORS origin; *: any")
    max_body_bytes: int = setting(ServerSettings.max_body_bytes, "maximum size of a request body", size=True, low=1)
    max_connections: int | None = setting(
        None, "maximum number of connections; default: the file limit (ulimit -n), at most 4096", low=1
    )
    drain_timeout_s: float = setting(
        ServerSettings.drain_timeout_s,
        "seconds to drain after SIGTERM; running requests get nine tenths of it",
        low=0,
        high=86400,
    )
    warm_prompts: str | None = setting(
        None, "JSONL file of prompts or conversations to prefill before the server is ready", metavar="FILE"
    )
    record: str | None = setting(
        None,
        "record lengths, arrival times and shared prefixes of requests (never text) to FILE, for replay",
        metavar="FILE",
    )
    trace_config: tuple[str, ...] = setting(
        (), "which requests are traced, and where to: mode=opentelemetry, opentelemetry,url=URL; of tensor models "
        "triton,file=PATH; level=TIMESTAMPS, rate=N, count=N", metavar="[MODE,]KEY=VALUE",
    )  # fmt: skip
    log_level: str = setting("info", "minimum log level", choices=LEVELS)
    log_format: str = setting("text", "format of the request log", choices=("text", "json"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.served_model_name:
            raise ConfigError("--served-model-name is empty", "a name for clients", "write one, or leave it out")
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(
                    f'--cors-origin is "{origin}"', "an origin like https://app.example.com, or *", "write it so"
                )

    def server(self, listen: ListenFlags) -> ServerSettings:
        """Create the server's settings. raises ConfigError if the key file is missing or empty"""
        return ServerSettings(
            host=listen.host,
            port=listen.port,
            reuse_port=listen.reuse_port,
            uds=listen.uds,
            ssl_certfile=listen.ssl_certfile,
            ssl_keyfile=listen.ssl_keyfile,
            metrics_port=listen.metrics_port,
            key_file=KeyFile.read(Path(self.api_key_file)) if self.api_key_file else None,
            share_prefix_cache=self.share_prefix_cache,
            cors_origins=self.cors_origin,
            log_format=cast(Literal["text", "json"], self.log_format),
            trace_config=self.trace_config,
            max_body_bytes=self.max_body_bytes,
            max_connections=self.max_connections,
            drain_timeout_s=self.drain_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class QueueFlags(Settings):
    """Scheduling settings: queueing, order and token intervals."""

    title: ClassVar = "Scheduling"

    max_queued: int = setting(
        MAX_QUEUED, "maximum queued sequences (requests, for an encoder); further requests get 429", low=1
    )
    schedule: str = setting(
        "fcfs", "queue order: fcfs, shortest (least work first) or prefix (longest cached prefix first)",
        choices=SCHEDULES,
    )  # fmt: skip
    itl_ms: float = setting(
        DEFAULT_GAP_LIMIT_S * 1e3,
        "target inter-token latency: prefill chunks are sized so that steps stay below it",
        low=1,
        high=60_000,
    )


@dataclass(frozen=True, kw_only=True)
class ProfileFlags(Settings):
    """Profile of expected step times."""

    title: ClassVar = "Scheduling"

    profile: str | None = setting(
        None, "expected step times from `millrace size verify -o`, exported in /metrics next to measured ones",
        metavar="FILE",
    )  # fmt: skip
