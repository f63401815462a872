"""A served model is a `Backend`, found by its name; what it can do is which kind of Backend it is.

A kind of engine is one file: a `ServedModel`, which holds what is served, and the Backend that serves it:
`llm/language_model.py` for language models, `llm/embeddings.py` for encoders. Another kind is another such file; its
endpoints name its Backend in their protocol's table (`protocols/openai/endpoints.py`, or a table that is passed to the
server). No other part of the server knows which kinds exist.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.core import Metric

from millrace.errors import ConfigError
from millrace.serve.http.api_keys import ApiKeys
from millrace.serve.http.errors import HttpError
from millrace.serve.http.server_context import ServerContext
from millrace.serve.ops.health import EngineHealth, Heartbeat
from millrace.serve.ops.metrics import ModelMetrics


@dataclass(frozen=True, kw_only=True)
class ServedModel(ABC):
    """One model as a server is told of it.

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
        """Names that clients may ask for. One with * stands for all names that it fits, as claude-* does."""
        return (self.name, *self.aliases)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """Names that clients are told of."""
        return tuple(name for name in self.names if "*" not in name)

    @abstractmethod
    def backend(self, serving: ServerContext) -> "Backend":
        """What serves it. It is not started yet."""


class Backend(ABC):
    """One model behind one engine: started, asked by its endpoints' handlers, aborted and closed, in order."""

    kind_name: str  # the kind of model, as errors name it: "a language model"
    other_endpoints = ""  # where the model answers, if none of these protocols has an endpoint for it
    failure_text = "the warm-up failed"  # what a message of `warm_up` follows in an error

    def __init__(self, model: ServedModel, serving: ServerContext) -> None:
        self.model, self.settings = model, serving.settings
        self.metrics: ModelMetrics = serving.metrics.for_model(model.name)

    @property
    def defaults(self) -> Mapping[str, object]:
        """What happens where a request leaves a field out, by the field's name: what this model decides."""
        return {}

    @property
    def defaults_origin(self) -> str:
        """Whose defaults these are, if not the model's own."""
        return ""

    @abstractmethod
    def start(self) -> None:
        """Its engine, in the running event loop."""

    @abstractmethod
    async def warm_up(self) -> str | None:
        """So that the first client waits for nothing. What went wrong, so that it is not ready; or None."""

    async def wait_until_recovered(self) -> bool:
        """After a `warm_up` that failed: waits until what went wrong is put right. False: it never will be"""
        return False

    def current_failure(self, at_first: str) -> str:
        """What is wrong now, after a `warm_up` that failed with `at_first`; "": nothing any more"""
        return at_first

    def degraded_reason(self) -> str:
        """What is not there now of what it serves, after a `warm_up` that went well; "": nothing"""
        return ""

    @abstractmethod
    def health(self) -> EngineHealth:
        """Does it work, and when was it last seen working?"""

    @abstractmethod
    def collect(self) -> Iterator[Metric]:
        """Its engine's own counters and gauges at this moment, with the model's label."""

    @abstractmethod
    async def abort(self, within_s: float) -> None:
        """End what is left, so that every answer comes to its end, and nobody waits here.

        within_s: for a step in progress; one that takes longer is left behind, and then `stuck` is true
        """

    @abstractmethod
    def close(self) -> None:
        """After the last answer was written. It may be called without `start`, and after `abort`."""

    @property
    def stuck(self) -> bool:
        """A step that did not end: its memory must not be given back."""
        return False


B = TypeVar("B", bound=Backend)


def _fits(name: str, pattern: str) -> bool:
    """Whether a name is the pattern, in which * stands for any characters."""
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
    """The models of one server, by their names, with what they share."""

    def __init__(self, serving: ServerContext, models: Sequence[ServedModel]) -> None:
        """raises ConfigError where two go by one name"""
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
        """None: the first. raises HttpError with 404 and the known names; listed_at: the path that lists them"""
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
        """After the last answer was written."""
        self.serving.close()
        for backend in self.backends:
            backend.close()
        self.serving.tracer.close_spans()

    def of_kind(self, kind: type[B]) -> list[B]:
        """Those that can do what this kind can."""
        return [backend for backend in self.backends if isinstance(backend, kind)]
