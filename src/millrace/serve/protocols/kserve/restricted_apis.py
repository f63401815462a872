"""Triton's restricted APIs and forwarded headers: parts of KServe's protocols that need a header, headers for models.

--http-restricted-api model-repository,statistics:x-admin=secret
"""

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace.errors import ConfigError, nearest
from millrace.model_repository.request.status_code import invalid
from millrace.serve.protocols.kserve import re2
from millrace.settings import Settings, setting

# For HTTP by the parts of a path after /v2, for gRPC by the names of calls; everything else is open.
GROUPS = ("health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
          "logging")  # fmt: skip
GRPC_PREFIX = "triton-grpc-protocol-"  # in front of a header's name over gRPC
# Parameters that the protocol itself reads, so that no header can become one.
_RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
_RULE = re.compile(r"([a-z-]+(?:,[a-z-]+)*):([A-Za-z0-9_-]{1,100})=([^\s]{1,1000})")
_OF_CALLS = {
    "health": ("ServerLive", "ServerReady", "ModelReady", "Check"), "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"), "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",), "trace": ("TraceSetting",), "logging": ("LogSettings",),
}  # fmt: skip
_GROUP_OF_CALL = {call: group for group, calls in _OF_CALLS.items() for call in calls}
_OF_ACTIONS = {"infer": "inference", "generate": "inference", "generate_stream": "inference", "ready": "health",
               "config": "model-config", "stats": "statistics", "trace/setting": "trace", "": "metadata"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RestrictionFlags(Settings):
    """Flags for restricted parts of KServe's protocols, and for headers that are forwarded to models."""

    title: ClassVar = "Model repository (Triton)"

    http_restricted_api: tuple[str, ...] = setting(
        (), "KServe HTTP APIs that require a header: GROUP[,GROUP]:HEADER=VALUE", metavar="RULE"
    )
    grpc_restricted_protocol: tuple[str, ...] = setting((), "the same for gRPC calls", metavar="RULE")
    http_header_forward_pattern: str = setting(
        "", "headers whose full name matches (case-insensitively) are forwarded as request parameters", metavar="REGEX"
    )
    grpc_header_forward_pattern: str = setting("", "the same for gRPC metadata", metavar="REGEX")

    def http(self) -> "ApiRestrictions":
        """Return the restrictions of HTTP. raises ConfigError"""
        return ApiRestrictions.from_flags("--http-restricted-api", self.http_restricted_api,
                        "--http-header-forward-pattern", self.http_header_forward_pattern)  # fmt: skip

    def grpc(self) -> "ApiRestrictions":
        """Return the restrictions of gRPC. raises ConfigError"""
        return ApiRestrictions.from_flags("--grpc-restricted-protocol", self.grpc_restricted_protocol,
                        "--grpc-header-forward-pattern", self.grpc_header_forward_pattern)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ApiRestrictions:
    """Restrictions of one protocol. rules: header and value by group; forward: names of headers that models see"""

    rules: Mapping[str, tuple[str, str]]
    forward: re.Pattern[str] | None

    @classmethod
    def from_flags(cls, flag: str, rule_texts: Sequence[str], pattern_flag: str, pattern: str) -> "ApiRestrictions":
        """raises ConfigError"""
        rules: dict[str, tuple[str, str]] = {}
        for rule in rule_texts:
            parsed = _RULE.fullmatch(rule)
            if parsed is None:
                raise ConfigError(f"{flag} is {rule!r:.100}", "GROUP[,GROUP]:HEADER=VALUE", "write it so")
            for group in parsed[1].split(","):
                if group not in GROUPS:
                    raise ConfigError(f'{flag} names "{group}"', nearest(group, GROUPS), "correct it")
                if group in rules:
                    raise ConfigError(f"{flag} restricts {group} twice", "once", "leave one out")
                rules[group] = parsed[2].lower(), parsed[3]
        try:
            compiled = re2.compile_pattern(pattern, ignore_case=True) if pattern else None
        except re.error as error:
            what = f"{pattern_flag} is {pattern!r:.100}: {error}"
            raise ConfigError(what, "a regular expression of RE2's syntax", "correct it") from None
        return cls(rules, compiled)

    @property
    def leaves_inference_alone(self) -> bool:
        """Return whether inferences do not depend on their headers."""
        return "inference" not in self.rules and self.forward is None

    def missing_header(self, group: str | None, headers: Mapping[str, str], prefix: str = "") -> str | None:
        """Return the header that a request to a restricted group lacks, or None. headers: names in lower case"""
        if group is None or group not in self.rules:
            return None
        name, value = self.rules[group]
        sent = headers.get(prefix + name, "")
        return None if hmac.compare_digest(sent.encode(), value.encode()) else prefix + name

    def forwarded_headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers that become parameters. raises StatusError"""
        if self.forward is None:
            return {}
        forwarded = {name: value for name, value in headers.items() if self.forward.fullmatch(name)}
        if reserved := next((name for name in forwarded if name in _RESERVED or name.startswith("triton_")), None):
            raise invalid(f"'{reserved}' is reserved for Triton usage and cannot be forwarded.")
        return forwarded


UNRESTRICTED = ApiRestrictions({}, None)


def headers_as_text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return HTTP headers as text; names are in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def api_group_of_call(name: str) -> str | None:
    return "shared-memory" if "SharedMemory" in name else _GROUP_OF_CALL.get(name)


def group_of_path(path: str) -> str | None:
    """Return the API group of a path, or None if it has none."""
    match path.split("/")[2:]:
        case [] | [""]:
            return "metadata"
        case ["health", *_]:
            return "health"
        case ["models", "stats"]:
            return "statistics"
        case ["models", _, *rest]:
            rest = rest[2:] if rest[:1] == ["versions"] else rest
            return _OF_ACTIONS.get("/".join(rest))
        case ["repository", *_]:
            return "model-repository"
        case ["systemsharedmemory" | "cudasharedmemory", *_]:
            return "shared-memory"
        case ["trace", "setting"]:
            return "trace"
        case ["logging"]:
            return "logging"
    return None
