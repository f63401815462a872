"""What a model may ask of the server that runs it, and what the server asks of it; in one process, or between two."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from .bytes_tensors import Array
from .errors import TritonError

Parameter = bool | int | float | str


@dataclass(frozen=True)
class Answer:
    """outputs: by name. error: in place of them"""

    outputs: Mapping[str, Array] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: TritonError | None = None


class Incoming(ABC):
    """One request to the model."""

    id: str
    inputs: Mapping[str, Array]
    outputs: Sequence[str]  # that are asked for; none: all
    parameters: Mapping[str, Parameter]
    correlation_id: int | str
    flags: int
    timeout_us: int
    cancelled: bool
    trace_context: str | None  # headers of the trace that it is a part of, as JSON; None: nobody records it

    @abstractmethod
    def send(self, answer: Answer | None, final: bool) -> None:
        """From any thread. answer: its arrays are the model's, which may write into them once this returns"""

    @abstractmethod
    def again(self) -> None:
        """It is to be executed again, later: whoever answers it is the next `execute`."""


class BlockingCalls(IntEnum):
    NO = 0
    PERHAPS = 1  # another thread asks while it executes
    YES = 2


@dataclass(frozen=True)
class BlsRequest:
    """One request of the model to another model.

    version: None is the highest. behind: the requests for which it asks, which cancel it when all of them are.
    waits: whether the thread that executes them goes on only when this is answered
    """

    model: str
    version: int | None
    id: str
    correlation_id: int | str
    flags: int
    timeout_us: int
    parameters: Mapping[str, Parameter]
    inputs: Sequence[tuple[str, Array]]  # as a model says them, perhaps one twice
    outputs: Sequence[str]
    is_decoupled: bool
    behind: Sequence[Incoming]
    waits: BlockingCalls


# From another thread: an answer, or nothing but the end; and whether it is the last.
Receive = Callable[[Answer | None, bool], None]


class BlsClient(ABC):
    """A request to another model, from the side of who asks. Of any thread."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody waits for it any more."""

    @abstractmethod
    def taken(self) -> None:
        """Its oldest response was read."""


class Host(ABC):
    """Of one instance of a model. Everything here is called by the model's threads, any of them."""

    is_alone = False  # in a process of its own

    def __init__(self, name: str, model: str) -> None:
        """name: of the instance"""
        self.name, self.model, self.pid = name, model, os.getpid()
        self.is_executing = self.is_closing = False  # between `initialize` and `finalize`; from then on
        self.is_busy = False  # in a call of `execute`

    @abstractmethod
    def ask(self, asked: BlsRequest, receive: Receive) -> BlsClient:
        """Ask another model. Errors are answers, which may come before this returns."""

    def answering(self) -> None:
        """A batch was computed, and the thread of `execute` sends its answers, and nothing else, before it returns."""
        return

    @abstractmethod
    def control(self, what: str, **told: Any) -> Any:
        """`load`, `unload` or `is_ready` a model, and wait until it is done. raises TritonModelException"""

    def load(self, name: str, config: str, files: Mapping[str, str]) -> None:
        """files: in base64. raises TritonModelException"""
        is_loading = not self.is_executing and not self.is_closing
        self.control("load", name=name, config=config, files=files, is_loading=is_loading)

    @abstractmethod
    def metric(self, what: str, **told: Any) -> Any:
        """Make a `family` or a `metric` (their number), `drop` one, or change one. raises TritonModelException"""

    @abstractmethod
    def log(self, message: str, level: int) -> None:
        """level: 0 to 3: info, warning, error, verbose"""


@dataclass(frozen=True)
class Execution:
    """One call of `execute`. thread: that it runs in; None: it has returned, and goes on in an event loop"""

    host: Host
    requests: Sequence[Incoming]
    thread: int | None


EXECUTION: ContextVar[Execution | None] = ContextVar("execution", default=None)
