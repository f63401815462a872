"""Target of tensor inferences, and the interface of its transports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from millrace.bench.client.request_record import BenchRecord
from millrace.bench.infer.model import BenchModel
from millrace.bench.names import HTTP
from millrace.model_repository.request.tensors import InferTensor


@dataclass(frozen=True, slots=True)
class InferTarget:
    """A model on a server. version: "" for the server's choice; binary: send tensors as bytes, not as JSON (HTTP)"""

    url: str
    model: str
    version: str = ""
    protocol: str = HTTP
    binary: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0


class Transport(Protocol):
    """A connection to a server over HTTP or gRPC. Use with `async with`; failures of inferences are in their
    records."""

    async def __aenter__(self) -> "Transport": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def model(self) -> BenchModel:
        """Fetch the model's description. raises MachineError if the server or the model is missing"""

    async def statistics(self) -> Mapping[str, Any] | None:
        """Fetch Triton's statistics of the model in their JSON form; None if there are none."""

    def body(self, tensors: Sequence[InferTensor]) -> Any:
        """Encode a request that can be sent repeatedly. raises ConfigError"""

    async def send(self, body: Any, answer: BenchRecord) -> None:
        """Send a request and fill the record; only cancellation raises."""
