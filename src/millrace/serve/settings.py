"""Settings of a server; `backend.py` describes its models."""

from dataclasses import dataclass, field
from typing import Literal

from millrace.errors import ConfigError
from millrace.serve.http.api_key_file import KeyFile

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of listening sockets, security and bounds. raises ConfigError

    The length of the queue and the unread tokens of slow readers are settings of the engine (`ServiceOptions`).
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    reuse_port: bool = False  # other servers of this user may listen there, too: connections are shared out
    uds: str | None = None  # path of a Unix socket to listen on, in place of host and port
    ssl_certfile: str | None = None  # PEM, with the chain; with it the server speaks TLS, over gRPC too
    ssl_keyfile: str | None = None  # PEM; None: in ssl_certfile
    metrics_port: int | None = None  # where nothing but /metrics is; None: nowhere else
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no authentication
    key_file: KeyFile | None = None  # more of them, with limits; read anew when it changes
    share_prefix_cache: bool = False  # between API keys: how long a prompt takes tells whether another key sent it
    cors_origins: tuple[str, ...] = ()  # none: no web page of another origin may ask; "*": all may
    log_format: Literal["text", "json"] = "text"
    trace_config: tuple[str, ...] = ()  # as `--trace-config` has it
    max_body_bytes: int = 8 * MIB
    max_preparing: int = 64  # requests whose text is being rendered and tokenised; further ones get 429
    max_receiving_bytes: int = 64 * MIB  # of all bodies together that are on their way
    max_unread_bytes: int = 256 * MIB  # of all replies together that wait for their readers
    max_connections: int | None = None  # None: as many as there are files for (`ulimit -n`), at most 4,096
    header_timeout_s: float = 20.0  # for a client to send the headers of a request
    body_timeout_s: float = 60.0  # for a client to send its whole body
    keep_alive_s: float = 75.0  # longer than clients keep idle connections: they do not write into a closing one
    write_timeout_s: float = 30.0  # a reader that takes nothing for so long is dropped
    stall_timeout_s: float = 60.0  # without a finished step, the engine counts as stuck
    drain_timeout_s: float = 30.0  # from the first signal to the end; nine tenths of it are for running requests

    @property
    def keys(self) -> tuple[object, ...]:
        """All API keys at the start."""
        return (*self.api_keys, *(self.key_file.keys if self.key_file is not None else ()))

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}", "0 to 65535", "choose another port")
        if self.reuse_port and (not self.port or self.uds is not None):
            message = "reuse_port is given with " + ("a Unix socket" if self.port else "any free port")
            raise ConfigError(message, "one port that several servers have", "name it")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given, and ssl_certfile is not", "the certificate of that key", "name it")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format is {self.log_format!r}", '"text" or "json"', "choose one of them")
        for name in ("max_body_bytes", "max_preparing", "max_receiving_bytes", "max_unread_bytes", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", "at least 1", f"raise {name}")
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s", "write_timeout_s", "stall_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", "more than 0 seconds", f"raise {name}")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s is {self.drain_timeout_s}", "at least 0 seconds", "raise it")
        if not all(self.api_keys):
            raise ConfigError("an API key is empty", "at least one character", "remove it, or give it a value")
