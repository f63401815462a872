"""Interface between a Python model and the server that runs it, in one process or between two."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .bytes_tensors import Array
from .errors import TritonError

Parameter = bool | int | float | str


@dataclass(frozen=True)
class ModelResponse:
    """A response. outputs: by name. error: replaces the outputs"""

    outputs: Mapping[str, Array] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: TritonError | None = None


class Incoming(ABC):
    """One request to the model."""

    id: str
    inputs: Mapping[str, Array]
    outputs: Sequence[str]  # requested names; empty for all
    parameters: Mapping[str, Parameter]
    correlation_id: int | str
    flags: int
    timeout_us: int
    cancelled: bool
    trace_context: str | None  # trace headers as JSON; None if it is not traced

    @abstractmethod
    def send(self, answer: ModelResponse | None, final: bool) -> None:
        """Send a response, from any thread. The model may write into its arrays once this returns"""

    @abstractmethod
    def reschedule(self) -> None:
        """Execute the request again later; the next `execute` answers it."""


@dataclass(frozen=True)
class BlsRequest:
    """One request of the model to another model.

    version: None is the highest. parents: the requests that it serves; it is cancelled when all of these are.
    """

    model: str
    version: int | None
    id: str
    correlation_id: int | str
    flags: int
    timeout_us: int
    parameters: Mapping[str, Parameter]
    inputs: Sequence[tuple[str, Array]]  # as given by the model, possibly with duplicates
    outputs: Sequence[str]
    is_decoupled: bool
    parents: Sequence[Incoming]


# Called from another thread: a response, or None for the end; and whether it is the last.
Receive = Callable[[ModelResponse | None, bool], None]


class BlsClient(ABC):
    """Caller's handle of a request to another model. Thread-safe."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the request."""

    @abstractmethod
    def on_response_read(self) -> None:
        """Record that the oldest response was read."""


class Host(ABC):
    """Server functions for one instance; called from any of the model's threads."""

    is_alone = False  # whether it has its own process

    def __init__(self, name: str, model: str) -> None:
        """name: the instance's name"""
        self.name, self.model, self.pid = name, model, os.getpid()
        self.is_executing = self.is_closing = False  # between `initialize` and `finalize`; from then on

    @abstractmethod
    def call_model(self, request: BlsRequest, receive: Receive) -> BlsClient:
        """Call another model. Errors arrive as responses, possibly before this returns."""

    def begin_sending(self) -> None:
        """Announce that this thread now sends only the responses of its batch, so that they may be joined."""
        return

    @abstractmethod
    def control(self, operation: str, **arguments: Any) -> Any:
        """Run `load`, `unload` or `is_ready` for a model, and wait. raises TritonModelException"""

    def load(self, name: str, config: str, files: Mapping[str, str]) -> None:
        """Load a model. files: in base64. raises TritonModelException"""
        is_loading = not self.is_executing and not self.is_closing
        self.control("load", name=name, config=config, files=files, is_loading=is_loading)

    @abstractmethod
    def metric(self, operation: str, **arguments: Any) -> Any:
        """Create a `family` or `metric` (returns a number), `drop` or change one. raises TritonModelException"""

    @abstractmethod
    def log(self, message: str, level: int) -> None:
        """Log a message. level: 0 to 3 for info, warning, error, verbose"""


@dataclass(frozen=True)
class Execution:
    """One call of `execute`."""

    host: Host
    requests: Sequence[Incoming]


EXECUTION: ContextVar[Execution | None] = ContextVar("execution", default=None)
