"""Served models and their backends, found by name; the kind of Backend decides which endpoints a model supports.

A kind of engine is one file with a `ServedModel`, which describes what is served, and the Backend that serves it:
`llm/language_model.py` for language models, `llm/embeddings.py` for encoders. Another kind is another such file; its
endpoints name its Backend in their protocol's table (`protocols/openai/endpoints.py`, or a table that is passed to the
server). No other part of the server knows which kinds exist.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from millrace.errors import ConfigError
from millrace.prometheus import MetricFamily
from millrace.serve.http.api_keys import ApiKeys
from millrace.serve.http.errors import HttpError
from millrace.serve.http.server_context import ServerContext
from millrace.serve.ops.health import EngineHealth, Heartbeat
from millrace.serve.ops.metrics import ModelMetrics


@dataclass(frozen=True, kw_only=True)
class ServedModel(ABC):
    """The description of one model to be served.

    metadata: shown by /v1/metadata as it is; of its keys the server itself reads "source" (where the checkpoint came
        from), "license" (its name), "engine" (the engine's identity, part of `system_fingerprint`), and for Ollama's
        clients "architecture", "precision" (of each part), "parameters" and "weights_bytes" (their numbers)
    """

    name: str
    aliases: tuple[str, ...] = ()
    created: int  # seconds since 1970
    metadata: Mapping[str, object] = field(default_factory=dict)
    max_context: int  # tokens: of prompt and answer together, where there is an answer

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that clients may use. One with * matches any characters, such as claude-*."""
        return (self.name, *self.aliases)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """Return the names that are listed to clients."""
        return tuple(name for name in self.names if "*" not in name)

    @abstractmethod
    def backend(self, serving: ServerContext) -> "Backend":
        """Create the backend, which is not started yet."""


class Backend(ABC):
    """One model with its engine: started, used by its endpoints' handlers, aborted and closed, in this order."""

    kind_name: str  # the kind of model, as errors name it: "a language model"
    other_endpoints = ""  # where the model answers, if none of these protocols has an endpoint for it
    failure_text = "the warm-up failed"  # what a message of `warm_up` follows in an error

    def __init__(self, model: ServedModel, serving: ServerContext) -> None:
        self.model, self.settings = model, serving.settings
        self.metrics: ModelMetrics = serving.metrics.for_model(model.name)

    @property
    def defaults(self) -> Mapping[str, object]:
        """Return the model's own defaults of request fields, by name."""
        return {}

    @property
    def defaults_origin(self) -> str:
        """Return where the defaults come from, "" if they are the model's own."""
        return ""

    @abstractmethod
    def start(self) -> None:
        """Start the engine in the running event loop."""

    @abstractmethod
    async def warm_up(self) -> str | None:
        """Warm up, so that the first request is fast. Return an error message if that failed, or None."""

    async def wait_until_recovered(self) -> bool:
        """Wait after a failed `warm_up` until the failure is fixed; return False if it never will be."""
        return False

    def current_failure(self, at_first: str) -> str:
        """Return what is wrong now, after a `warm_up` that failed with `at_first`; "" if it is fixed."""
        return at_first

    def degraded_reason(self) -> str:
        """Return what cannot be served now, after a successful `warm_up`; "" if everything can."""
        return ""

    @abstractmethod
    def health(self) -> EngineHealth:
        """Return whether the engine works, and when it last made progress."""

    @abstractmethod
    def collect(self) -> Iterator[MetricFamily]:
        """Yield the engine's current counters and gauges, with the model's label."""

    @abstractmethod
    async def abort(self, within_s: float) -> None:
        """Abort what is left, so that every answer ends.

        within_s: time for a step in progress; a step that takes longer is abandoned, and `stuck` is true
        """

    @abstractmethod
    def close(self) -> None:
        """Close after the last answer was written. May be called without `start`, and after `abort`."""

    @property
    def stuck(self) -> bool:
        """Return whether a step did not end, so that its memory must not be released."""
        return False


B = TypeVar("B", bound=Backend)


def _fits(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern, in which * stands for any characters."""
    first, *rest = pattern.split("*")
    *middle, last = rest
    if len(name) < len(pattern) - len(rest) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end) + len(part)
        if at < len(part):
            return False
    return True


class Models:
    """The models of one server, by name, with the state that they share."""

    def __init__(self, serving: ServerContext, models: Sequence[ServedModel]) -> None:
        """raises ConfigError if two models have the same name"""
        assert models, "a server has a model"
        for name, n in Counter(name for model in models for name in model.names).items():
            if n > 1:
                raise ConfigError(f'{n} models are called "{name}"', "names of their own", "rename all but one")
        self.serving, self.keys = serving, ApiKeys(serving.settings.api_keys, serving.settings.key_file)
        serving.metrics.add(self.keys.collect)
        self.backends = [model.backend(serving) for model in models]
        self.heartbeat = Heartbeat(
            [b.health for b in self.backends],
            serving.settings.stall_timeout_s,
            [b.degraded_reason for b in self.backends],
        )
        self._by_name = {name: backend for backend in self.backends for name in backend.model.names}
        for backend in self.backends:
            serving.metrics.add(backend.collect)

    @property
    def first(self) -> Backend:
        return self.backends[0]

    def get(self, name: str | None, listed_at: str = "/v1/models") -> Backend:
        """Return the backend of a name; None: the first. listed_at: the path that lists the models

        raises HttpError with 404 and the known names
        """
        if name is None:
            return self.first
        if name in self._by_name:
            return self._by_name[name]
        for pattern, backend in self._by_name.items():  # in the order in which they were given
            if "*" in pattern and _fits(name, pattern):
                return backend
        raise HttpError(
            404,
            "model_not_found",
            f'the model "{name}" does not exist',
            "one of " + ", ".join(f'"{served_name}"' for served_name in self._by_name) if self._by_name else "no name",
            f"correct the model's name; {listed_at} lists them" if self._by_name else self.first.other_endpoints,
        ).about("model")

    def close(self) -> None:
        """Close all backends after the last answer was written."""
        self.serving.close()
        for backend in self.backends:
            backend.close()
        self.serving.tracer.close_spans()

    def of_kind(self, kind: type[B]) -> list[B]:
        """Return the backends of a kind."""
        return [backend for backend in self.backends if isinstance(backend, kind)]
