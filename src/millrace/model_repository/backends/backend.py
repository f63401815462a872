"""Backend interface: a `ModelBackend` creates a model's instances, each of which executes in its own thread.

This is a backend in Triton's sense; the server's own backends are whole served models, such as the repository of tensor
models. A third-party backend is an entry point of the group `millrace.backends`: its name is what `backend:` names, its
value a class without constructor arguments.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.model_repository.config.model_config import InstanceGroup, ModelConfig
from millrace.model_repository.models.bls import BlsExecutor
from millrace.model_repository.models.model_version import ModelVersionSource
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.ragged_batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """Context of an instance. config: completed. folder: the model's folder, with its versions below it

    bls: calls other models
    """

    name: str  # the group's name and the instance's number
    config: ModelConfig
    version: int
    folder: Path
    group: InstanceGroup
    bls: BlsExecutor
    namespace: str = ""  # the model's

    @classmethod
    def for_groups(cls, source: ModelVersionSource, bls: BlsExecutor) -> list["InstanceContext"]:
        """Return the contexts of all instances of the model's groups."""
        return [
            cls(
                f"{group.name}_{i}",
                source.config,
                source.version,
                source.folder,
                group,
                bls,
                namespace=source.namespace,
            )
            for group in source.config.instance_group
            for i in range(group.count)
        ]

    @property
    def file(self) -> Path:
        """The model file of the version."""
        return self.folder / str(self.version) / self.config.default_model_filename


class InstanceLostError(Exception):
    """Raised if the instance was lost before it received the batch, which then goes to another instance."""


class Instance(ABC):
    """A model instance. Created, executed and closed in its own thread, one batch at a time.

    responds_async: a request may still be answered after `execute` has returned.
    max_inline_bytes: up to this input size `execute` takes microseconds, less than waking another thread; it is then
        called in the event loop's thread while its own thread waits.
    is_independent: `execute` is complete when it returns, never waits for other requests; the instance is never lost.
    """

    responds_async = False
    max_inline_bytes = 0
    is_independent = False

    @abstractmethod
    def execute(self, requests: Sequence[InferRequest]) -> None:
        """Answer each request; an exception becomes the error of unanswered ones. raises InstanceLostError, too"""

    def begin(self, requests: Sequence[InferRequest], done: Callable[[StatusError | None], None]) -> None:
        """Execute and call `done`, possibly later, from another thread, and with an error.

        raises what `execute` raises, without calling `done`
        """
        self.execute(requests)
        done(None)

    def on_cancel(self, request: InferRequest) -> None:
        """Handle the cancellation of a request in execution; called in the event loop."""
        return

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Register a callback for the loss of the instance: called from any thread with the reason, before a restart.

        Running requests must fail after that call.
        """
        return

    def readiness_check(self) -> Callable[[], bool] | None:
        """Return a function, callable from any thread, that checks readiness and may raise; None: always ready."""
        return None

    def record_time(self, n_bytes: int, took_ns: int, cpu_ns: int | None = None) -> None:
        """Record a computation's time. n_bytes: of its inputs. cpu_ns: CPU time, if the thread may have waited"""
        return

    def memory_bytes(self) -> int | None:
        """Return the instance's memory on this machine; None if unknown. Called from other threads."""
        return None

    def close(self) -> None:
        """Close the instance after its last request."""
        return


class ModelBackend(ABC):
    takes_ragged = False  # whether a batch may mix shapes, if the configuration allows it
    takes_batch_io = False  # whether batch_input and batch_output are supported

    @abstractmethod
    def instance(self, context: InstanceContext) -> Instance:
        """Load an instance of the model. raises any exception on failure"""

    def complete_config(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """Complete the configuration from the model file: inputs, outputs, batch size."""
        return config


class BatchedInstance(Instance):
    """Base class for models on arrays: concatenates a batch, computes it once and splits the outputs."""

    def __init__(self, context: InstanceContext) -> None:
        self.config = context.config
        self._ragged = RaggedBatch(context.config)
        self._is_ragged = bool(self._ragged)  # cached, because every request reads it

    @abstractmethod
    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute all outputs. If the model batches, the first dimension of every array is the batch."""

    def execute(self, requests: Sequence[InferRequest]) -> None:
        first = requests[0]
        is_plain = len(requests) == 1 and not self._is_ragged
        inputs = first.inputs if is_plain else self._ragged.gather(requests)
        # Reading a thread's CPU time is a system call, which can take longer than a quick model.
        measures_cpu = not self.max_inline_bytes
        before_ns = time.thread_time_ns() if measures_cpu else 0
        computing_ns = time.monotonic_ns()
        outputs = self.compute(inputs)
        computed_ns = time.monotonic_ns()
        cpu_ns = time.thread_time_ns() - before_ns if measures_cpu else None
        self.record_time(sum(array.nbytes for array in inputs.values()), computed_ns - computing_ns, cpu_ns)
        for request in requests:
            request.computing_ns, request.computed_ns = computing_ns, computed_ns
        if is_plain:
            _answer(first, outputs)
            return
        parts = {name: self._ragged.scatter(name, array, requests) for name, array in outputs.items()}
        for i, request in enumerate(requests):
            _answer(request, {name: pieces[i] for name, pieces in parts.items()})


def _answer(request: InferRequest, outputs: Mapping[str, Array]) -> None:
    """Send the requested outputs; a missing one fails only this request."""
    try:
        selected = select_requested_outputs(request, outputs)
    except StatusError as error:
        request.fail(error)
        return
    request.send(InferResponse(selected))


def select_requested_outputs(request: InferRequest, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the requested outputs in the requested order. raises StatusError if one is missing"""
    if not request.outputs:
        return outputs
    missing = next((name for name in request.outputs if name not in outputs), None)
    if missing is not None:
        raise StatusError(Code.INTERNAL, f"{request.error_prefix}the model computed no output '{missing}'")
    return {name: outputs[name] for name in request.outputs}
