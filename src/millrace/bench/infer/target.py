"""Whom a load of tensors asks, and what every way of asking can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from millrace.bench.client.request_record import BenchRecord
from millrace.bench.infer.model import BenchModel
from millrace.bench.names import HTTP
from millrace.model_repository.request.tensors import Tensor


@dataclass(frozen=True, slots=True)
class InferTarget:
    """version: "" for the server's choice; binary: tensors as bytes, not as JSON (HTTP)"""

    url: str
    model: str
    version: str = ""
    protocol: str = HTTP
    binary: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0


class Transport(Protocol):
    """One server over HTTP or gRPC. `async with` it; failures of inferences are in their answers."""

    async def __aenter__(self) -> "Transport": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def model(self) -> BenchModel:
        """raises MachineError where the server or the model is not there"""

    async def statistics(self) -> Mapping[str, Any] | None:
        """Triton's, of this model, as JSON has them; None where there are none."""

    def body(self, tensors: Sequence[Tensor]) -> Any:
        """A request, ready to be sent again and again. raises ConfigError"""

    async def send(self, body: Any, answer: BenchRecord) -> None:
        """Fills `answer`; only a cancel raises."""
