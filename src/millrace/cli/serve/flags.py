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

    host: str = setting(ServerSettings.host, "address to listen on; 0.0.0.0 is every network of this machine")
    port: int = setting(ServerSettings.port, "port to listen on; 0 takes a free one", low=0, high=65535)
    reuse_port: bool = setting(
        False, "let several servers have --port and --grpc-port: connections are shared out among them"
    )
    uds: str | None = setting(None, "Unix socket to listen on, in place of --host and --port", metavar="PATH")
    ssl_certfile: str | None = setting(None, "certificate (PEM): speak TLS, over gRPC too", metavar="FILE")
    ssl_keyfile: str | None = setting(None, "its key (PEM); default: in the same file", metavar="FILE")
    metrics_port: int | None = setting(
        None, "port where nothing but /metrics is; 0 takes a free one; default: none", low=0, high=65535
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
    share_prefix_cache: bool = setting(
        ServerSettings.share_prefix_cache, "let API keys find prompts of one another in the prefix cache"
    )
    cors_origin: tuple[str, ...] = setting((), "web origin that may ask from a browser; * for all")
    max_body_bytes: int = setting(ServerSettings.max_body_bytes, "largest request", size=True, low=1)
    max_connections: int | None = setting(
        None, "connections at a time; default: as many as there are files for (ulimit -n), at most 4096", low=1
    )
    drain_timeout_s: float = setting(
        ServerSettings.drain_timeout_s,
        "seconds from SIGTERM to the end; nine tenths are for running requests",
        low=0,
        high=86400,
    )
    warm_prompts: str | None = setting(
        None, "file with a prompt or a conversation a line, as JSON, to be computed before it is ready", metavar="FILE"
    )
    record: str | None = setting(
        None, "file for lengths, arrivals and shared beginnings of requests, never text, to replay", metavar="FILE"
    )
    trace_config: tuple[str, ...] = setting(
        (), "which requests are traced, and where to: mode=opentelemetry, opentelemetry,url=URL; of tensor models "
        "triton,file=PATH; level=TIMESTAMPS, rate=N, count=N", metavar="[MODE,]KEY=VALUE",
    )  # fmt: skip
    log_level: str = setting("info", "least important lines that are logged", choices=LEVELS)
    log_format: str = setting("text", "one line a request, for people or for machines", choices=("text", "json"))

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
        MAX_QUEUED, "sequences that may wait (for an encoder: requests); beyond that the answer is 429", low=1
    )
    schedule: str = setting(
        "fcfs", "which of the waiting goes first: fcfs, shortest (soonest done) or prefix (most of it is known)",
        choices=SCHEDULES,
    )  # fmt: skip
    itl_ms: float = setting(
        DEFAULT_GAP_LIMIT_S * 1e3,
        "target for the time between tokens of running answers: prompts are cut so that a step lasts no longer",
        low=1,
        high=60_000,
    )


@dataclass(frozen=True, kw_only=True)
class ProfileFlags(Settings):
    """Profile of expected step times."""

    title: ClassVar = "Scheduling"

    profile: str | None = setting(
        None, "step times of this engine and machine, by `millrace size verify -o`: /metrics has them beside measured",
        metavar="FILE",
    )  # fmt: skip
