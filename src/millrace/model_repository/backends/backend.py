"""What runs tensor models: a `ModelBackend` makes a model's instances, each of which answers in a thread of its own.

In Triton's words a backend. `serve/backend.py`'s Backend is a served model as a whole; the repository of tensor models
is one of those. A third party's backend is an entry point of the group `millrace.backends`: its name is what `backend:`
says, its value a class that is made without arguments.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.model_repository.config.model_config import InstanceGroup, ModelConfig
from millrace.model_repository.models.bls import BlsExecutor
from millrace.model_repository.models.model_version import ModelVersionSource, Waiting
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.ragged_batch import Ragged


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """What an instance is told. config: completed. folder: the model's, with its versions below it

    others: by which it may ask other models. waits: requests to these for which it waits while it executes a batch,
    and whether it surely does
    """

    name: str  # of the instance: the group's, and its number
    config: ModelConfig
    version: int
    folder: Path
    group: InstanceGroup
    others: BlsExecutor
    waits: dict[Waiting, bool] = field(default_factory=dict)
    namespace: str = ""  # the model's

    @classmethod
    def all_of(cls, of: ModelVersionSource, others: BlsExecutor) -> list["InstanceContext"]:
        """As its groups have them."""
        return [
            cls(f"{group.name}_{i}", of.config, of.version, of.folder, group, others, namespace=of.namespace)
            for group in of.config.instance_group
            for i in range(group.count)
        ]

    @property
    def file(self) -> Path:
        """The model's own."""
        return self.folder / str(self.version) / self.config.default_model_filename


Computing = Callable[[Mapping[str, Array]], Mapping[str, Array]]  # outputs of inputs, by name


class InstanceLostError(Exception):
    """It was gone before it was given anything: what it was given goes to another one."""


class Instance(ABC):
    """Made, asked and closed in one thread of its own, never two requests at a time unless they are a batch.

    answers_later: a request may still be answered after `execute` has returned.
    quick_bytes: inputs of no more bytes take `execute` some microseconds, less than another thread does to wake up; it
        is then called in the event loop's thread, while its own waits.
    is_independent: `execute` is done when it returns, and has never waited for another request; this is never lost.
    """

    answers_later = False
    quick_bytes = 0
    is_independent = False

    @abstractmethod
    def execute(self, requests: Sequence[InferRequest]) -> None:
        """Answer each of them; what it raises is the answer of those that have none. raises InstanceGoneError, too"""

    def begin(self, requests: Sequence[InferRequest], done: Callable[[StatusError | None], None]) -> None:
        """`execute`, and say that it is done: from any thread, later, and with what went wrong, where others compute.

        raises what `execute` raises, without calling `done`
        """
        self.execute(requests)
        done(None)

    def cancelled(self, request: InferRequest) -> None:
        """Of the event loop: nobody waits any more for one that it was given."""
        return

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call it, from any thread, once this can execute nothing any more, with the reason; it is made anew then.

        What it was executing ends with an error after that.
        """
        return

    def says_ready(self) -> Callable[[], bool] | None:
        """What asks it whether it is ready, from any thread and at any time, and may raise; None: it always is."""
        return None

    def alone(self) -> "Computing | None":
        """All that `execute` does with the inputs of one request, where that is all that it looks at."""
        return None

    def took(self, n_bytes: int, took_ns: int, cpu_ns: int | None = None) -> None:
        """It has computed inputs of so many bytes. cpu_ns: of its thread, if that may have waited for others"""
        return

    def memory_bytes(self) -> int | None:
        """Of this machine's that it holds, asked from another thread than its own; None: it cannot tell."""
        return None

    def close(self) -> None:
        """After its last request."""
        return


class ModelBackend(ABC):
    takes_ragged = False  # requests of different shapes in one batch, where the configuration allows it
    takes_batch_io = False  # batch_input and batch_output of a configuration

    @abstractmethod
    def instance(self, given: InstanceContext) -> Instance:
        """Load the model. raises whatever goes wrong"""

    def completed(self, config: ModelConfig, folder: Path) -> ModelConfig:
        """With what the configuration does not say and the model's own file does: inputs, outputs, sizes of batches."""
        return config


class BatchedInstance(Instance):
    """For models that take arrays: a batch is put together, computed once, and taken apart."""

    def __init__(self, given: InstanceContext) -> None:
        self.config = given.config
        self._ragged = Ragged(given.config)
        self._is_ragged = bool(self._ragged)  # looked at by every request

    @abstractmethod
    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """All of its outputs. Where the model has a batch dimension, it is the first of every array."""

    def alone(self) -> Computing | None:
        is_own = type(self).execute is not BatchedInstance.execute
        return None if self._is_ragged or is_own else self.compute

    def execute(self, requests: Sequence[InferRequest]) -> None:
        first = requests[0]
        is_plain = len(requests) == 1 and not self._is_ragged
        inputs = first.inputs if is_plain else self._ragged.gathered(requests)
        computing_ns, before_ns = time.monotonic_ns(), time.thread_time_ns()
        outputs = self.compute(inputs)
        computed_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns() - before_ns
        self.took(sum(array.nbytes for array in inputs.values()), computed_ns - computing_ns, cpu_ns)
        for request in requests:
            request.computing_ns, request.computed_ns = computing_ns, computed_ns
        if is_plain:
            _answer(first, outputs)
            return
        parts = {name: self._ragged.parts(name, array, requests) for name, array in outputs.items()}
        for i, request in enumerate(requests):
            _answer(request, {name: pieces[i] for name, pieces in parts.items()})


def _answer(request: InferRequest, outputs: Mapping[str, Array]) -> None:
    """One that is not there is its own error, and nobody else's."""
    try:
        found = select_requested_outputs(request, outputs)
    except StatusError as error:
        request.fail(error)
        return
    request.send(InferResponse(found))


def select_requested_outputs(request: InferRequest, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """Those that it asks for, in its order. raises StatusError where one is not there"""
    if not request.outputs:
        return outputs
    missing = next((name for name in request.outputs if name not in outputs), None)
    if missing is not None:
        raise StatusError(Code.INTERNAL, f"{request.named}the model computed no output '{missing}'")
    return {name: outputs[name] for name in request.outputs}
